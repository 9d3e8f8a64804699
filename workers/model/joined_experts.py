"""Experts that a file holds in one tensor for a whole layer, seen as one matrix each.

transformers 5 has them so in memory, and writes them so with `save_original_format=False`: `gate_up_proj`
(experts, 2 * inner, hidden), the gate first, and `down_proj` (experts, hidden, inner). As rows lie one behind
the other, every matrix is a run of bytes of its own, and is read as if the file named it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from workers.model.names import WeightNames
from workers.model.safetensors_header import TensorEntry

_MOST_EXPERTS = 1 << 16  # of one tensor; more are left as they are, so refused: nothing has so many


def single_matrices(names: WeightNames, name: str, entry: TensorEntry) -> Iterator[tuple[str, TensorEntry]]:
    """The tensor `name` (as the model calls it), or the matrices that it holds."""
    where = names.expert.partition("{")[0]
    parts = {
        f".{where}gate_up_proj": (names.expert_gate, names.expert_up),
        f".{where}down_proj": (names.expert_down,),
    }
    for ending, own in parts.items():
        if where and name.endswith(ending) and len(entry.shape) == 3:
            count, outputs, inputs = entry.shape
            if outputs % len(own) or not 0 < count <= _MOST_EXPERTS:
                break
            size = (entry.stop - entry.start) // (count * len(own))
            layer = name[: -len(ending) + 1]
            for place in range(count * len(own)):
                number, part = divmod(place, len(own))
                start = entry.start + place * size
                yield (
                    f"{layer}{names.expert.format(number)}{own[part]}.weight",
                    replace(entry, shape=(outputs // len(own), inputs), start=start, stop=start + size),
                )
            return
    yield name, entry
