"""Where the first token's time went, with a real engine: its own stages explain nearly all of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cases.serving import COMPLETIONS, endless_letters, serving
from tests.unit.router.client import call

MOST_UNEXPLAINED = 0.3  # share; in a process that shares one interpreter lock with its engine


def test_a_long_prompt_is_explained_by_its_prefill(tmp_path: Path) -> None:
    with serving(endless_letters(tmp_path), num_blocks=2049, max_step_tokens=16) as server:
        body = {"prompt": "abc" * 1000, "max_tokens": 2}
        answer = server.whole(COMPLETIONS, body)
        first = call(server.stack.app, f"/explain/{answer['id']}").json()["first_token"]
        stages, ttft_ms = first["stages_ms"], first["ttft_ms"]
        assert sum(stages.values()) == pytest.approx(ttft_ms)
        assert stages["prefill"] > (1 - MOST_UNEXPLAINED) * ttft_ms
        assert stages["serve"] < MOST_UNEXPLAINED * ttft_ms
        assert (stages["transfer"], stages["first_decode"]) == (0, 0)
        again = server.whole(COMPLETIONS, body)
        cached = call(server.stack.app, f"/explain/{again['id']}").json()["first_token"]["stages_ms"]
        assert cached["prefill"] < 0.3 * stages["prefill"]
        stats, report = server.idle(), server.dispatcher.groups()[0].report
        assert (stats.prompt_tokens_total, stats.remote_tokens_total) == (6000, 0)
        counts = {steps.kind.value: sum(steps.seconds.counts) for steps in report.steps}
        assert counts["decode"] == 2 and counts["prefill"] > 6000 / 2 / 16
