"""A prompt that is read from another group gives what a computed one gives, for one step of the tail."""

from __future__ import annotations

from dataclasses import replace

from tests.unit.engine.toy import make_request, numbers, reference
from tests.unit.exchange.world import Group, Options, World
from workers.engine.exchange import Offered, OpenLease, Pulled

TRANSFER = "0f" * 16


def _pair(**options: int) -> tuple[World, Group, Group]:
    world = World()
    return world, world.start("P", Options(**options)), world.start("D", Options(**options))


def test_blocks_are_read_while_the_source_computes_them() -> None:
    world, prefill, decode = _pair(max_step_tokens=8)
    request = make_request("r", numbers(23), 6)
    decode.submit(replace(request, kv_source=world.source("P", TRANSFER)))
    prefill.submit(replace(make_request("p", numbers(23), 0), transfer_id=TRANSFER))
    assert not decode.step()  # waits
    assert world.deliver_all(OpenLease) == 1
    seen = []
    for _ in range(3):
        assert prefill.step()
        offered = world.deliver()
        assert isinstance(offered, Offered)
        seen.append((len(offered.offers), offered.is_complete))
        world.copy_all()
        world.deliver_all(Pulled)
        world.check()
    assert seen == [(2, False), (2, False), (1, True)]
    assert prefill.stats_held == 5
    world.deliver_all()
    assert prefill.stats_held == 0
    assert decode.step()
    assert decode.memory.num_computed_tokens == 3  # the tail of 23 tokens
    world.settle()
    world.assert_rest()
    assert decode.transcript.tokens["r", 0] == reference(request)
    assert decode.transcript.cached("r") == 20
    stats = decode.engine.stats()
    assert (stats.kv_fetches_total, stats.kv_fetched_tokens_total) == (1, 20)
