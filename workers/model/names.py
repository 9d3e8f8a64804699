"""How the tensors of a family are called in its files, and in which shape they lie there."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class QkvLayout(Enum):
    """How the projections to queries, keys and values lie along the outputs of their tensors."""

    SEPARATE = "separate"  # three tensors
    STACKED = "stacked"  # in one: all queries, all keys, all values
    BY_KV_HEAD = "by_kv_head"  # in one, for every KV head: the queries that read it, its key, its value


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightNames:
    """Names without their `.weight` and `.bias` endings. Layer names follow `prefix + layer.format(i)`.

    What a family does not have stays empty.
    """

    prefix: str  # of everything but the head; files saved from the bare model lack it
    head: str
    embedding: str
    final_norm: str
    layer: str
    attention_norm: str = ""
    attention_post_norm: str = ""
    mlp_norm: str = ""
    mlp_post_norm: str = ""
    query: str  # of all three, unless qkv is SEPARATE
    key: str = ""
    value: str = ""
    qkv: QkvLayout = QkvLayout.SEPARATE
    output: str
    up: str
    down: str
    gate: str = ""  # equal to `up`: one tensor has both, the gate first
    router: str = ""
    expert: str = ""  # where the names of an expert begin, with {} for its number; then
    expert_gate: str = ""
    expert_up: str = ""
    expert_down: str = ""
    query_norm: str = ""
    key_norm: str = ""
    positions: str = ""
    inputs_first: bool = False  # matrices of the layers lie as (in, out)
    buffers: tuple[str, ...] = ()  # endings of tensors that old files carry and that hold no weights
    renamed: tuple[tuple[str, str], ...] = ()  # (how names may begin in files, how they begin here)
    renamed_parts: tuple[tuple[str, str], ...] = ()  # the same of a part of a name, with its dots

    def of_layer(self, index: int, name: str) -> str:
        return f"{self.prefix}{self.layer.format(index)}{name}"

    def name_of(self, stored: str) -> str:
        """What a tensor that a file calls `stored` is called here."""
        for other, own in self.renamed:
            if stored.startswith(other):
                return own + stored[len(other) :]
        for other, own in self.renamed_parts:
            stored = stored.replace(other, own, 1)
        return stored

    def is_router(self, name: str) -> bool:
        """Whether a matrix, by its name in the files, chooses experts."""
        return bool(self.router) and name.endswith(f".{self.router}.weight")

    def is_buffer(self, name: str) -> bool:
        return name.endswith(self.buffers)
