"""The leaves of the config tree: how to walk them, and which values each may have.

Every number has a range with both ends: the lower one is the smallest value with which the part still does
its work, the upper one lies far above any use, so that only a mistake (a unit, a zero too many) is beyond it.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import fields, is_dataclass
from pathlib import PurePath
from types import NoneType, UnionType
from typing import Any, NamedTuple, get_args

from pydantic import BaseModel

from cluster.config.problems import Problem, join
from cluster.config.tree import TandemConfig
from workers.decoding.drafter import METHODS, MODEL_METHODS
from workers.kv_format import INT8


class Range(NamedTuple):
    """Legal values of a number. None, as the value, is always legal; NaN never is."""

    least: float
    most: float
    is_least_legal: bool = True

    def allows(self, value: float) -> bool:
        """Whether the number lies inside."""
        return (value >= self.least if self.is_least_legal else value > self.least) and value <= self.most

    def __str__(self) -> str:
        low = "at least" if self.is_least_legal else "above"
        return f"{low} {_plain(self.least)}, at most {_plain(self.most)}"


_DAY_S = 86_400
_COUNT = Range(1, 1_000_000)
_WEIGHT = Range(0, 1000)

RANGES: dict[str, Range] = {
    "model.max_model_len": Range(1, 1 << 24),
    "pools.*.tensor_parallel": Range(1, 1024),
    "pools.*.cpus_per_rank": Range(0, 1024),
    "pools.*.gpus_per_rank": Range(0, 1),  # a rank computes on one device
    "pools.*.start_timeout_s": Range(1, _DAY_S),
    "pools.*.drain_timeout_s": Range(0, _DAY_S),
    "pools.*.cache.block_size": Range(1, 1024),
    "pools.*.cache.num_blocks": Range(1, 1 << 27),
    "pools.*.cache.memory_fraction": Range(0, 1, is_least_legal=False),
    "pools.*.cache.max_bytes": Range(1 << 20, 1 << 44),
    "pools.*.schedule.max_step_tokens": _COUNT,
    "pools.*.schedule.max_running": Range(1, 1 << 16),
    "pools.*.schedule.max_prefill_chunk": _COUNT,
    "pools.*.schedule.max_waiting": Range(1, 1_000_000),
    "pools.*.schedule.expected_output_tokens": _COUNT,
    "pools.*.speculative.max_draft_tokens": Range(1, 64),
    "pools.*.transfer.heartbeat_s": Range(0.1, 600),
    "pools.*.transfer.lease_s": Range(1, 3600),
    "pools.*.transfer.expect_s": Range(0.1, 3600),
    "pools.*.transfer.stall_s": Range(3, 3600),
    "pools.*.transfer.silent_s": Range(2, 3600),  # groups say something every second
    "pools.*.transfer.timeout_s": Range(0.1, 60),
    "pools.*.parallel.step_timeout_s": Range(0.1, 3600),
    "pools.*.parallel.threads_per_rank": Range(1, 1024),
    "router.placement.expected_output_tokens": _COUNT,
    "router.placement.delay_weight": _WEIGHT,
    "router.placement.delay_per_sequence": _WEIGHT,
    "router.placement.context_weight": _WEIGHT,
    "router.placement.row_share": _WEIGHT,
    "router.placement.interference_weight": _WEIGHT,
    "router.placement.balance_tokens": Range(0, 1_000_000),
    "router.placement.max_balance_tokens": Range(0, 100_000_000),
    "router.placement.default_prefill_tokens_per_s": Range(1, 1e9),
    "router.placement.default_step_s": Range(1e-5, 60),
    "router.placement.silent_after_s": Range(0.1, 3600),
    "router.placement.silent_cost_ms": Range(0, 1e9),
    "router.placement.transfer_ms": Range(0, 60_000),
    "router.placement.default_transfer_bytes_per_s": Range(1000, 1e13),
    "scaling.ttft_s": Range(0.001, 3600),
    "scaling.tpot_s": Range(0.0001, 60),
    "scaling.max_kv_use": Range(0.01, 1),
    "scaling.drain_s": Range(0.1, 3600),
    "scaling.headroom": Range(0.01, 1),
    "scaling.prefill_per_decode": Range(0.001, 1000),
    "scaling.scale_down_after_s": Range(0, _DAY_S),
    "scaling.min_reversal_s": Range(0, _DAY_S),
    "scaling.idle_to_zero_s": Range(1, _DAY_S),
    "scaling.settle_s": Range(0, 3600),
    "router.http.group_wait_s": Range(0, 3600),
    "router.http.max_body_bytes": Range(1024, 1 << 30),
    "router.http.max_header_bytes": Range(1024, 64 << 10),  # the proxy passes no more on
    "router.http.body_timeout_s": Range(0.1, 3600),
    "router.http.max_json_depth": Range(8, 512),
    "router.http.max_json_keys": Range(100, 10_000_000),
    "router.http.max_prompts": Range(1, 1024),
    "router.http.max_choices": Range(1, 128),  # the engine's own limit, as of the next one
    "router.http.max_logprobs": Range(0, 20),
    "router.http.max_stops": Range(0, 1024),
    "router.http.max_stop_chars": Range(1, 1 << 16),
    "router.http.max_stop_token_ids": Range(0, 10_000),
    "router.http.max_logit_bias": Range(0, 100_000),
    "router.http.max_template_chars_per_token": Range(1, 1000),
    "router.http.keep_alive_s": Range(0.1, 3600),
    "router.http.send_timeout_s": Range(0.1, 3600),
    "router.http.max_request_s": Range(1, 7 * _DAY_S),
    "router.http.goodput_ttft_s": Range(0.001, 3600),
    "router.http.goodput_tpot_s": Range(0.0001, 3600),
    "router.http.text_threads": Range(1, 256),
    "router.http.render_timeout_s": Range(0.01, 60),
    "router.http.tokenize_timeout_s": Range(0.01, 600),
    "router.http.max_queued_requests": _COUNT,
    "router.http.max_queued_tokens": Range(1, 1_000_000_000),
    "router.http.max_inflight_requests": _COUNT,
    "router.http.max_requests_per_key": _COUNT,
}
CHOICES: dict[str, tuple[str, ...]] = {
    "model.dtype": ("auto", "bfloat16", "float32"),
    "model.quantization": ("auto", "none", "int8", "int4"),
    "pools.*.cache.dtype": ("auto", INT8),
    "pools.*.speculative.method": ("none", *METHODS, *MODEL_METHODS),
    "pools.*.transfer.transport": ("auto", "memory", "process_group", "sockets"),
}
_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[A-Za-z0-9._~\[\]:-]+")


def children(kind: Any) -> dict[str, Any] | None:
    """Names and types of the fields of a node of the tree; None for a leaf value."""
    if isinstance(kind, UnionType):  # a part that may be left out
        kind = next((option for option in get_args(kind) if option is not NoneType), kind)
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return {name: info.annotation for name, info in kind.model_fields.items()}
    if isinstance(kind, type) and is_dataclass(kind):
        return {field.name: field.type for field in fields(kind)}
    return None


def pattern_of(path: Sequence[str]) -> str:
    """The dotted path with the pool's name replaced by `*`."""
    return ".".join("*" if i == 1 and path[0] == "pools" else part for i, part in enumerate(path))


def leaf_problems(config: TandemConfig) -> Iterable[Problem]:
    """Values that no other value makes right."""
    for path, value in _leaves(config):
        pattern, name = pattern_of(path), join(*path)
        limits, choices = RANGES.get(pattern), CHOICES.get(pattern)
        if limits is not None and value is not None and not limits.allows(value):
            yield Problem(path=name, message="out of range", got=str(value), allowed=str(limits))
        if choices is not None and value not in choices:
            allowed = ", ".join(choices)
            yield Problem(path=name, message="not one of the choices", got=repr(value), allowed=allowed)
        for text in value if isinstance(value, tuple) else (value,):
            if isinstance(text, str) and any(unicodedata.category(character) == "Cc" for character in text):
                yield Problem(path=name, message="holds a control character", got=repr(text)[:100])
    yield from _http_problems(config)


def _leaves(node: Any, path: tuple[str, ...] = ()) -> Iterable[tuple[tuple[str, ...], Any]]:
    """Every leaf value of the tree with its path."""
    names = children(type(node))
    if names is None:
        yield path, node
        return
    for name in names:
        yield from _leaves(getattr(node, name), (*path, name))


def _http_problems(config: TandemConfig) -> Iterable[Problem]:
    http = config.router.http
    for origin in http.cors_origins:
        if not _ORIGIN.fullmatch(origin):
            yield Problem(
                path="router.http.cors_origins",
                message="not an origin as browsers send it",
                got=repr(origin)[:100],
                allowed="*, null, or scheme://host[:port] without a path",
            )
    file = http.api_keys_file
    if file is not None and not PurePath(file).is_absolute() and not file.startswith("~/"):
        hint = "processes of the cluster have working folders of their own; begin it with / or ~/"
        yield Problem(
            path="router.http.api_keys_file", message="is no absolute path", got=repr(file), hint=hint
        )


def _plain(number: float) -> str:
    """A number as people write it: no exponent up to 15 digits."""
    return str(int(number)) if number == int(number) and abs(number) < 1e15 else f"{number:g}"
