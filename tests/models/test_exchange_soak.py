"""Groups with little memory read from each other, while requests are cancelled and sent elsewhere."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.models.checkpoints import prompt_ids
from tests.models.engine_groups import GREEDY
from tests.models.exchange_groups import ForeignMember, Loop, Member, Ranks, through
from workers.config import GroupConfig
from workers.types import RequestId, SamplingParams

SECONDS = 10.0
NUM_AT_ONCE = 12
SAMPLINGS = (GREEDY, SamplingParams(max_tokens=12, temperature=1.0, seed=3))
PROMPTS = tuple(tuple(prompt_ids(400, seed=stem)[: 60 + 46 * cut]) for stem in range(12) for cut in range(8))
NOTHING = {
    "active_blocks": 0,
    "kv_leases": 0,
    "num_running": 0,
    "num_waiting": 0,
    "kv_transferring_blocks": 0,
}

Wanted = tuple[tuple[int, ...], SamplingParams]


@pytest.mark.faults
@pytest.mark.parametrize("transport", ["memory", "sockets"])
def test_whatever_is_read_answers_are_those_of_one_group(
    loop: Loop, ranks: Ranks, long_config: Callable[[str, int], GroupConfig], transport: str
) -> None:
    """Pools are shorter of blocks than the requests: leases are revoked and blocks given away while read."""
    rng = random.Random(5)

    def small(tensor_parallel: int, num_blocks: int) -> GroupConfig:
        config = long_config("llama", tensor_parallel)
        return replace(
            config,
            model=replace(config.model, max_model_len=450),
            cache=replace(config.cache, num_blocks=num_blocks),
            schedule=replace(config.schedule, max_step_tokens=64),
            transfer=replace(config.transfer, transport=transport),
        )

    members: list[Member] = [
        ForeignMember(loop, "a", small(1, 60), ranks),
        ForeignMember(loop, "b", small(1, 40), ranks),
        ForeignMember(loop, "c", small(2, 50), ranks),
    ]
    try:
        expected: dict[Wanted, list[int]] = {}
        for prompt in PROMPTS:
            for sampling in SAMPLINGS:
                request_id = members[0].submit(prompt, sampling, salt="alone")
                expected[prompt, sampling] = members[0].answer(request_id).token_ids
        running: list[tuple[Member, RequestId, Wanted]] = []
        until_s = time.monotonic() + SECONDS
        while time.monotonic() < until_s or running:
            if len(running) < NUM_AT_ONCE and time.monotonic() < until_s:
                wanted = rng.choice(PROMPTS), rng.choice(SAMPLINGS)
                reader, source = rng.sample(members, 2)
                if rng.random() < 0.5:
                    request_id = through(source, reader, *wanted)
                else:
                    neighbour = source.source(rng.choice([None, "0f" * 16]))
                    request_id = reader.submit(*wanted, source=neighbour)
                running.append((reader, request_id, wanted))
                if rng.random() < 0.1:
                    reader.redirect(request_id, rng.choice([None, source.source()]))
            elif running and rng.random() < 0.02:
                reader, request_id, _ = running.pop(rng.randrange(len(running)))
                reader.abort(request_id)
            for entry in list(running):
                reader, request_id, wanted = entry
                answer = reader.answers[request_id, 0]
                if answer.finish is not None:
                    running.remove(entry)
                    assert answer.token_ids == expected[wanted], (reader.name, answer, wanted)
            time.sleep(0.001)
        for member in members:
            stats = member.wait_for("rest", timeout_s=12.0, **NOTHING)
            assert stats.kv_fetched_tokens_total > 0
            assert stats.kv_fetches_stalled_total == 0
    finally:
        for member in members:
            member.close()
