from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from workers.training import draft, medusa


@pytest.mark.parametrize("main", [draft.main, medusa.main])
@pytest.mark.parametrize("option", ["--prompts", "--max-tokens", "--vocabulary", "--threads", "--epochs"])
@pytest.mark.parametrize("value", ["0", "-1", "many"])
def test_counts_are_at_least_one(
    main: Callable[[Sequence[str]], int], option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--model", "none", "--out", "none", f"{option}={value}"])
    assert ended.value.code == 2
    assert f"argument {option}: '{value}' is not a whole number of at least 1" in capsys.readouterr().err
