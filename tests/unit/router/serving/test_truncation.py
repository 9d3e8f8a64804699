"""Conversations cut by whole turns: what it costs the router. What is kept: see
`tests/cases/test_truncation.py`."""

from __future__ import annotations

import time

from tests.unit.router.client import CHAT, call
from tests.unit.router.fakes import INFO, stack

NUM_TURNS = 12_000  # in a body far below its limits


def test_a_conversation_of_many_turns_is_cheap_to_cut() -> None:
    """Making all the shorter conversations at once took seconds on the event loop, and hundreds of MB."""
    app = stack().app
    body = {
        "messages": [{"role": "user", "content": "hi"}] * NUM_TURNS,
        "truncation": "auto",
        "max_tokens": 8,
    }
    began_s = time.process_time()
    answer = call(app, CHAT, body)
    assert answer.status_code == 200, answer.text
    num_kept = (INFO.max_model_len - 8 - len("?assistant: ")) // len("user: hi?")
    assert answer.json()["usage"]["truncation"]["dropped_messages"] == NUM_TURNS - num_kept
    assert time.process_time() - began_s < 4.0  # 0.7 s; it was 15
