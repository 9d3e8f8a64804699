"""`python -m cluster.bench.program`: carries out an order that comes in on standard input (see `orders`)."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import msgspec

from cluster.bench.calibrate import calibrate
from cluster.bench.kv_cache import compare_kv_cache
from cluster.bench.orders import CalibrateOrder, Order, QuantizeOrder, SweepOrder
from cluster.bench.quantize import quantize
from cluster.bench.sweep import sweep
from workers.engine.step import GroupFailed
from workers.model.errors import CheckpointError, TensorParallelError
from workers.types import RequestRefused

_EXPECTED = (CheckpointError, TensorParallelError, GroupFailed, RequestRefused, ValueError, OSError)


def main() -> int:
    # Who gave the order ends this process, also after Ctrl-C at the terminal, which reaches both; what is
    # half made is removed on the way out.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _leave)
    # What libraries print must not get between the lines of the protocol.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def say(**line: Any) -> None:
        print(json.dumps(line), file=answers, flush=True)

    def report(text: str) -> None:
        say(progress=text)

    try:
        order: Order = msgspec.json.decode(sys.stdin.buffer.read(), type=Order)
        say(result=_carry_out(order, report))
    except _EXPECTED as error:
        say(error=str(error))
        return 1
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    return 0


def _leave(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


def _carry_out(order: Order, report: Callable[[str], None]) -> dict[str, Any]:
    if isinstance(order, CalibrateOrder):
        return calibrate(order, report)
    if isinstance(order, SweepOrder):
        return sweep(order, report)
    if isinstance(order, QuantizeOrder):
        return quantize(order, report)
    return compare_kv_cache(order, report)


if __name__ == "__main__":
    sys.exit(main())
