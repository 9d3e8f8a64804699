"""Which outputs of the files' matrices a rank holds, in the order in which it wants them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from workers.model.architecture import ModelSpec
from workers.model.names import QkvLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSpans:
    """Of one rank; every span in elements, not heads."""

    queries: range  # of the outputs to queries, and of the inputs of the output projection
    keys: range  # of the outputs to keys, and of those to values
    inner: range  # of the MLP
    vocab: range
    qkv: tuple[tuple[str, tuple[range, ...]], ...]  # (tensor, spans of it) that make up [queries|keys|values]
    up: tuple[tuple[str, tuple[range, ...]], ...]  # the same of [gate | up], or of up alone


def spans_of_rank(spec: ModelSpec, rank: int, size: int) -> RankSpans:
    """Names are those in a layer."""
    queries = _scaled(spec.q_heads_of_rank(rank, size), spec.head_dim)
    keys = _scaled(spec.kv_heads_of_rank(rank, size), spec.head_dim)
    inner = spec.intermediate_of_rank(rank, size)
    return RankSpans(
        queries=queries,
        keys=keys,
        inner=inner,
        vocab=spec.vocab_of_rank(rank, size),
        qkv=_qkv(spec, queries, keys, rank, size),
        up=_up(spec, inner),
    )


def _qkv(
    spec: ModelSpec, queries: range, keys: range, rank: int, size: int
) -> tuple[tuple[str, tuple[range, ...]], ...]:
    names = spec.weights
    match names.qkv:
        case QkvLayout.SEPARATE:
            return ((names.query, (queries,)), (names.key, (keys,)), (names.value, (keys,)))
        case QkvLayout.STACKED:
            q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
            stacked = (queries, _shifted(keys, q_size), _shifted(keys, q_size + kv_size))
            return ((names.query, stacked),)
        case QkvLayout.BY_KV_HEAD:
            group = spec.queries_per_kv_head
            kv_heads = spec.kv_heads_of_rank(rank, size)
            heads = [
                *(head // group * (group + 2) + head % group for head in spec.q_heads_of_rank(rank, size)),
                *(head * (group + 2) + group for head in kv_heads),
                *(head * (group + 2) + group + 1 for head in kv_heads),
            ]
            spans = tuple(_scaled(run, spec.head_dim) for run in _runs(heads))
            return ((names.query, spans),)


def _up(spec: ModelSpec, inner: range) -> tuple[tuple[str, tuple[range, ...]], ...]:
    names = spec.weights
    if not spec.gated_mlp:
        return ((names.up, (inner,)),)
    if names.gate == names.up:
        return ((names.up, (inner, _shifted(inner, spec.intermediate_size))),)
    return ((names.gate, (inner,)), (names.up, (inner,)))


def _runs(numbers: Iterable[int]) -> list[range]:
    """Neighbours that count up by one, as ranges."""
    found: list[range] = []
    for number in numbers:
        if found and number == found[-1].stop:
            found[-1] = range(found[-1].start, number + 1)
        else:
            found.append(range(number, number + 1))
    return found


def _scaled(span: range, factor: int) -> range:
    return range(span.start * factor, span.stop * factor)


def _shifted(span: range, by: int) -> range:
    return range(span.start + by, span.stop + by)
