"""The engine on a bare machine, without a cluster: `python -m workers generate` and `... bench`.

Not covered: chat history, stop strings, serving. Those are the router's.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from workers.config import CacheConfig, GroupConfig, ModelConfig, ParallelConfig, ScheduleConfig
from workers.progress import Progress


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code: 0, or 1 with a sentence on stderr. Raises SystemExit(2) for bad options."""
    options = _parser().parse_args(arguments)
    folder = Path(options.model).expanduser()
    if not folder.is_dir():
        print(f"error: {folder}: no such model folder", file=sys.stderr)
        return 1
    config = GroupConfig(
        model=ModelConfig(
            path=str(folder),
            dtype=options.dtype,
            quantization=options.quantization,
            max_model_len=options.max_model_len,
        ),
        cache=CacheConfig(dtype=options.kv_dtype),
        schedule=ScheduleConfig(max_step_tokens=options.max_step_tokens),
        parallel=ParallelConfig(
            tensor_parallel=options.tp, threads_per_rank=options.threads, device=options.device
        ),
    )
    with Progress(sys.stderr) as progress:
        progress.start("loading torch and transformers")
        # Here, not above: it takes seconds, in which bad options are refused and something is said.
        from workers.offline import run

        return run(config, options, progress)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m workers", description="The Tandem engine, without a cluster."
    )
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name: str, help_text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=help_text)
        sub.add_argument("model", help="model folder in Hugging Face layout")
        sub.add_argument("--tp", type=_whole(1), default=1, help="ranks that share the model")
        sub.add_argument("--dtype", default="auto", help="auto (bfloat16), bfloat16 or float32")
        sub.add_argument("--quantization", default="auto", help="of linear weights: auto, none, int8, int4")
        sub.add_argument("--kv-dtype", default="auto", help="of keys and values: auto (as --dtype) or int8")
        sub.add_argument("--device", default="auto", help="auto, cpu or cuda")
        sub.add_argument("--threads", type=_whole(1), help="CPU threads per rank; default: cores / ranks")
        sub.add_argument("--max-model-len", type=_whole(1), help="longest context in tokens")
        sub.add_argument("--max-step-tokens", type=_whole(1), default=512, help="token budget of a step")
        return sub

    generate = command("generate", "continue a prompt, streaming to stdout")
    generate.add_argument("--prompt", required=True, type=_text)
    generate.add_argument("--chat", action="store_true", help="the prompt is a user's message")
    generate.add_argument("--max-tokens", type=_whole(1), help="default: 256 or what fits the context")
    generate.add_argument("--temperature", type=_between(0.0, 1e9), default=0.0)
    generate.add_argument("--top-k", type=_whole(0), default=0)
    generate.add_argument("--top-p", type=_between(0.0, 1.0, above=True), default=1.0)
    generate.add_argument("--min-p", type=_between(0.0, 1.0), default=0.0)
    generate.add_argument("--repetition-penalty", type=_between(0.0, 1e9, above=True), default=1.0)
    generate.add_argument("--seed", type=int, default=0)
    bench = command("bench", "measure time to first token and tokens per second")
    bench.add_argument("--batch", type=_whole(1), nargs="+", default=[1, 8, 32], help="requests at a time")
    bench.add_argument("--prompt-len", type=_whole(1), default=128)
    bench.add_argument("--max-tokens", type=_whole(1), default=64)
    bench.add_argument("--json", action="store_true", help="one JSON line instead of a table")
    return parser


def _whole(least: int) -> Callable[[str], int]:
    """Reader of a whole number of at least so much."""

    def number(text: str) -> int:
        if (value := int(text)) < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, got {text}")
        return value

    return number


def _between(least: float, most: float, *, above: bool = False) -> Callable[[str], float]:
    """Reader of a number from `least` to `most`; `above`: greater than `least`."""

    def number(text: str) -> float:
        value = float(text)
        if not least <= value <= most or (above and value == least):
            raise argparse.ArgumentTypeError(
                f"must be {'above' if above else 'at least'} {least:g} and at most {most:g}, got {text}"
            )
        return value

    return number


def _text(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("is empty; the model needs something to continue")
    return text


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
