"""The child's side of a peer: one JSON object a line comes in, one goes out.

    {"do": "generate", "prompts": [[1, 2], ...], "new_tokens": 64}          -> {"seconds": 0.5}
    {"do": "after_beginning", "beginning": [1, 2], "prompt": [1, 2, 3]}     -> {"seconds": 0.1}
    anything that fails                                                     -> {"error": "..."}

The first line out is {"ready": "VERSION"}. Ends at the end of its input. Runs in the peer's environment, so
only the standard library is imported here.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence, Sized
from pathlib import Path
from typing import Protocol

TokenIds = Sequence[int]


class Peer(Protocol):
    """What a peer's program implements; greedy, no end token stops it."""

    version: str

    def generate(self, prompts: Sequence[TokenIds], new_tokens: int) -> float:
        """Seconds until every prompt has its `new_tokens`."""
        ...

    def after_beginning(self, beginning: TokenIds, prompt: TokenIds) -> float:
        """Seconds to the first token of `prompt` when its start has been computed before."""
        ...


def after_cached(peer: Peer, beginning: TokenIds, prompt: TokenIds) -> float:
    """`after_beginning` of a peer that finds beginnings in its prefix cache by itself."""
    peer.generate([beginning], 1)
    return peer.generate([prompt], 1)


def check_lengths(answers: Iterable[Sized], new_tokens: int) -> None:
    """Raises RuntimeError unless every answer has `new_tokens` tokens."""
    lengths = {len(answer) for answer in answers}
    if lengths != {new_tokens}:
        raise RuntimeError(f"asked for {new_tokens} tokens, got {sorted(lengths)}")


def serve(load: Callable[[Path, str, Path, int], Peer]) -> None:
    """Runs `PROGRAM MODEL_FOLDER WEIGHT_FORMAT CACHE_FOLDER THREADS`; `load` takes these four."""
    # What libraries print goes to stderr; the real stdout is ours alone.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(message: dict[str, object]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    folder, weights, cache, threads = sys.argv[1:]
    try:
        peer = load(Path(folder), weights, Path(cache), int(threads))
    except Exception as error:
        traceback.print_exc()
        answer({"error": f"{type(error).__name__}: {error}"})
        return
    answer({"ready": peer.version})
    for line in sys.stdin:
        order = json.loads(line)
        try:
            if order["do"] == "generate":
                seconds = peer.generate(order["prompts"], order["new_tokens"])
            else:
                seconds = peer.after_beginning(order["beginning"], order["prompt"])
        except Exception as error:
            traceback.print_exc()
            answer({"error": f"{type(error).__name__}: {error}"})
        else:
            answer({"seconds": seconds})
