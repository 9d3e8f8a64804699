"""What the measuring programs are asked to do, and the line protocol in which they answer.

The command line has neither torch nor an engine; it starts `python -m cluster.bench.program`, writes an order
as JSON to its standard input, and reads lines from its standard output: {"progress": text} as it goes on, at
last {"result": {...}} or {"error": text}.
"""

from __future__ import annotations

from msgspec import Struct


class EngineSettings(Struct, frozen=True, kw_only=True):
    """The engine that is measured: one group of its own on this machine."""

    model: str  # folder
    dtype: str = "auto"
    quantization: str = "none"
    tensor_parallel: int = 1
    threads: int | None = None  # of each rank; None: as the engine chooses
    max_running: int = 128
    max_step_tokens: int = 512
    max_bytes: int = 4 << 30  # of the KV pool, on a CPU


class CalibrateOrder(Struct, frozen=True, kw_only=True, tag="calibrate"):
    """Ceilings, and engine steps at several shapes."""

    engine: EngineSettings
    seconds: float = 75.0  # of measuring, after loading: another pass only begins when it should fit


class SweepOrder(Struct, frozen=True, kw_only=True, tag="sweep"):
    """The same prompt and output length at several batch sizes."""

    engine: EngineSettings
    batches: tuple[int, ...] = (1, 8, 32, 64, 128)
    prompt_tokens: int = 512
    new_tokens: int = 256
    runs: int = 1


class KvCacheOrder(Struct, frozen=True, kw_only=True, tag="kv-cache"):
    """One sequence, with its keys and values kept and with all of it computed anew for every token."""

    engine: EngineSettings
    prompt_tokens: int = 64
    new_tokens: int = 256


class QuantizeOrder(Struct, frozen=True, kw_only=True, tag="quantize"):
    """A model folder with its weights in few bits, and what that costs in quality."""

    model: str  # folder
    form: str  # int8 or int4
    out: str  # folder to be made
    has_report: bool = True  # score a text with both


Order = CalibrateOrder | SweepOrder | KvCacheOrder | QuantizeOrder
