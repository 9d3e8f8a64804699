"""`python -m workers` as a user types it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.models import checkpoints
from tests.models.toy_tokenizers import byte_tokenizer
from workers.__main__ import main

TEXT = "ok 🦙 żółć 漢字 👩‍🚀 fin"
PROMPT = "Say it:"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "workers", *arguments],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Says TEXT, a byte a token, after PROMPT."""
    tokenizer = byte_tokenizer()
    script = tokenizer.encode(TEXT, add_special_tokens=False)
    prompt_len = len(tokenizer(PROMPT)["input_ids"])
    folder = tmp_path_factory.mktemp("scripted")
    return checkpoints.pos_script(folder, script, prompt_len=prompt_len, tokenizer=tokenizer, n_positions=128)


@pytest.mark.parametrize("tensor_parallel", ["1", "2"])
def test_generate_streams_whole_characters(scripted: Path, tensor_parallel: str) -> None:
    done = run(
        "generate", str(scripted), "--prompt", PROMPT, "--tp", tensor_parallel,
        "--dtype", "float32", "--threads", "1",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == TEXT + "\n"


@pytest.mark.parametrize(
    ("option", "says"),
    [
        (("--max-tokens", "0"), "argument --max-tokens: must be at least 1, got 0"),
        (("--max-tokens", "-1"), "argument --max-tokens: must be at least 1, got -1"),
        (("--prompt", ""), "argument --prompt: is empty; the model needs something to continue"),
        (("--top-p", "0"), "argument --top-p: must be above 0 and at most 1, got 0"),
        (("--temperature", "nan"), "argument --temperature: must be at least 0 and at most 1e+09, got nan"),
        (("--tp", "0"), "argument --tp: must be at least 1, got 0"),
    ],
)
def test_bad_values_are_refused_before_anything_loads(
    option: tuple[str, str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["generate", "/nowhere", "--prompt", "x", *option])
    assert caught.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"python -m workers generate: error: {says}"


def test_news_are_on_stderr(scripted: Path) -> None:
    done = run("generate", str(scripted), "--prompt", PROMPT, "--max-tokens", "3", "--threads", "1")
    news = [line.partition(" s  ")[2] for line in done.stderr.splitlines()]
    assert [line for line in news if line and not line.startswith("...")] == [
        "loading torch and transformers",
        f"loading {scripted}",
        "loading the tokenizer",
        f"ready, {len(byte_tokenizer()(PROMPT)['input_ids'])} prompt tokens",
    ]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--tp", "5"), "tensor_parallel 5"),
        (("--dtype", "int4"), "model.dtype 'int4'"),
        (("--max-tokens", "1000"), "context length"),
        (("--max-model-len", "5000"), "model.max_model_len 5000"),
    ],
)
def test_faults_are_one_sentence(
    scripted: Path, options: tuple[str, str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", str(scripted), "--prompt", "x", "--threads", "1", *options]) == 1
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("error: ") and says in last


def test_a_fault_ends_the_program_with_a_sentence_and_no_traceback() -> None:
    done = run("generate", "/nowhere", "--prompt", "x")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "error: /nowhere: no such model folder\n"


def test_bench_reports_each_batch(scripted: Path) -> None:
    done = run(
        "bench", str(scripted), "--batch", "1", "3", "--prompt-len", "5", "--max-tokens", "6", "--json",
        "--threads", "1",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout.splitlines()[-1])["rows"]
    assert [row["batch"] for row in rows] == [1, 3]
    assert all(row["prompt_tokens"] == 5 and row["ttft_ms"] > 0 and row["tpot_ms"] > 0 for row in rows)
    assert all(row["decode_tokens_per_s"] > 0 for row in rows)


def test_a_tilde_means_the_home_folder(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Everywhere: the tokenizer, which knows no tilde, is given the same path."""
    monkeypatch.setenv("HOME", "/home-of-a-test")
    assert main(["generate", "~/model", "--prompt", "x"]) == 1
    assert capsys.readouterr().err == "error: /home-of-a-test/model: no such model folder\n"
