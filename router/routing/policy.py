"""Which group a request goes to, as a pure function of what the router knows.

Every group gets a cost in predicted milliseconds, the sum of terms that are kept for explanation:

    queue     prompt tokens that are before us: waiting there, or sent there and not yet counted by its stats
    prefill   our own prompt tokens that are not cached there
    delay     what others there lose meanwhile: a share of the same, so that of two ways that are equally long
              for us the one with less work wins, and a burst of equal prompts waits for the first of them
    interference  more of the same on decode groups, whose steps are for answers
    decode    our tokens come slower, the more sequences share a step with them
    context   a step reads the keys and values of all its sequences: ours comes slower by those of the others,
              theirs by those of ours
    memory    blocks that running requests must give back first
    silent    the group has not been heard for longer than its heartbeat
    balance   a small charge for having been given more requests lately, so that groups that are equal
              otherwise take turns, and an idle group gets its share of a hot prefix after a while

Lowest cost first; equal costs go to the group with fewer requests of ours, then by a hash of prompt and
group, so that all router replicas spread cold prompts alike. Rates are measured (`load`); a group that has
not been measured yet is taken to be like the others, and one that has been measured a few times is in
between: the rate of a few prompts says as much of their length as of the group. Choices in which two groups
take part are made in `pairing`.

Of many groups only a few can be among the best. The cost of each is worked out in one plain loop, without its
terms (`quick_costs`), and the groups that may come among the `KEEP` cheapest (`shortlist`) are ranked: so the
first `KEEP` choices are those that ranking every group would give, in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from hashlib import blake2b
from heapq import nsmallest
from typing import NamedTuple

from workers.types import GroupId, Role

KEEP = 32  # choices that are surely the best; of no more groups than that all are ranked
# Quick costs differ from exact ones in the last digits, and those are rounded to a tenth before they compare.
_MARGIN_MS = 0.2


class PlacementPolicy(Enum):
    """Config path `router.policy`."""

    PREFIX = "prefix"  # everything below
    LEAST_LOADED = "least_loaded"  # the same cost, as if nothing were cached anywhere
    ROUND_ROBIN = "round_robin"  # groups in turn


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyConfig:
    """Weights of the cost. They suit small and large groups, since rates are measured."""

    policy: PlacementPolicy = PlacementPolicy.PREFIX
    expected_output_tokens: int = 128  # new tokens a choice is expected to have, when it may have as many
    delay_weight: float = 0.5  # ms charged for the others' sake per ms of our own prefill
    delay_per_sequence: float = 0.1  # and as many more per sequence that is there
    context_weight: float = 2.0  # ms charged per ms of reading contexts while our answer lasts
    row_share: float = 0.02  # how much longer a decode step takes per further sequence, of its length
    interference_weight: float = 0.5  # ms charged per ms of prefill on a decode group
    balance_tokens: float = 35.0  # prompt tokens charged per request that a group got more than another
    max_balance_tokens: float = 2000.0  # at most as many: a group that has just joined must not be flooded
    default_prefill_tokens_per_s: float = 4000.0  # until any group has been measured
    default_step_s: float = 0.02
    silent_after_s: float = 3.0  # a group silent for longer comes last
    silent_cost_ms: float = 60_000.0
    pull: bool = True  # groups may read cached blocks of their neighbours instead of computing them
    transfer_ms: float = 10.0  # a read of blocks takes at least as long
    default_transfer_bytes_per_s: float = 1e9  # until the two groups have been measured


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestView:
    """What placement needs to know of a request."""

    num_prompt_tokens: int
    max_output_tokens: int  # over all choices
    num_choices: int = 1
    spread_key: bytes = b""  # equal prompts have equal keys
    turn: int = 0  # counts requests, for ROUND_ROBIN


@dataclass(slots=True, kw_only=True)
class GroupLoad:
    """What placement knows of a group. Only read here; `load.LoadTracker` keeps one up to date."""

    group_id: GroupId
    block_size: int  # tokens
    prefill_tokens_per_s: float | None = None  # None: not measured yet
    rate_trust: float = 1.0  # share of it, against the mean of all groups, in the rate that is reckoned with
    step_s: float | None = None  # length of a step
    waiting_tokens: int = 0  # prompt tokens not computed yet, as the group says
    running_tokens: int = 0  # context of running sequences
    context_token_s: float = 0.0  # of a decode step, to read the keys and values of one token; 0: unknown
    num_running: int = 0
    num_waiting: int = 0
    available_blocks: int = 0  # free or evictable
    active_blocks: int = 0
    charged_tokens: int = 0  # uncached prompt tokens sent there that its stats do not count yet
    charged_requests: int = 0
    own_requests: int = 0  # of this router, unfinished
    recent_requests: float = 0.0  # that this router gave it lately, older ones counting less
    silent_s: float = 0.0
    role: Role = Role.UNIFIED
    kv_format: str = ""  # groups of one format read each other's blocks; empty: this one does not
    block_bytes: int = 0


class Choice(NamedTuple):
    """A group with its predicted cost."""

    group_id: GroupId
    cost_ms: float
    terms: Mapping[str, float]  # ms each; they add up to the cost
    source: GroupId | None = None  # it reads blocks of the prompt from this group
    fetched_tokens: int = 0  # as many


def rank(
    request: RequestView,
    loads: Sequence[GroupLoad],
    matches: Mapping[GroupId, int],
    config: PolicyConfig,
    *,
    keep: int = KEEP,
) -> list[Choice]:
    """The groups, best first: all, or of more than `keep` the best. `matches`: leading blocks of the prompt
    that a group has cached."""
    if config.policy is PlacementPolicy.ROUND_ROBIN:
        return _in_turn(request, loads, config)
    if config.policy is not PlacementPolicy.PREFIX:
        matches = {}
    baseline = baseline_of(loads, config)
    if len(loads) > keep:
        quick = quick_costs(request, loads, matches, baseline, config)
        loads = shortlist(request, loads, quick, [sum(parts) for parts in quick], keep)
    ranked = []
    for load in loads:
        matched = matches.get(load.group_id, 0)
        uncached = split_prompt(request.num_prompt_tokens, load.block_size, matched).uncached
        terms = cost_terms(request, load, uncached, baseline, config)
        choice = Choice(load.group_id, sum(terms.values()), terms)
        ranked.append((*order_key(request, load, choice.cost_ms), choice))
    ranked.sort(key=lambda entry: entry[:3])
    return [entry[3] for entry in ranked]


class TokenSplit(NamedTuple):
    """Prompt tokens of a request on a group."""

    cached: int
    uncached: int


def whole_block_tokens(num_prompt_tokens: int, block_size: int) -> int:
    """Prompt tokens whose KV can come from elsewhere: full blocks, without the last token, which is always
    computed."""
    return max(num_prompt_tokens - 1, 0) // block_size * block_size


def split_prompt(num_prompt_tokens: int, block_size: int, matched_blocks: int) -> TokenSplit:
    """What of the prompt is cached."""
    cached = min(matched_blocks * block_size, whole_block_tokens(num_prompt_tokens, block_size))
    return TokenSplit(cached, num_prompt_tokens - cached)


class Baseline(NamedTuple):
    """What a group's cost is measured against: figures of all groups together."""

    prefill_tokens_per_s: float  # mean of the groups measured, for those that are not
    step_s: float  # the same
    recent_requests: float  # of the group with the fewest


def baseline_of(loads: Sequence[GroupLoad], config: PolicyConfig) -> Baseline:
    """Over these groups; the config's defaults while none has been measured."""
    return Baseline(
        prefill_tokens_per_s=_mean(
            [load.prefill_tokens_per_s for load in loads], config.default_prefill_tokens_per_s
        ),
        step_s=_mean([load.step_s for load in loads], config.default_step_s),
        recent_requests=fewest_recent(loads),
    )


def fewest_recent(loads: Sequence[GroupLoad]) -> float:
    """Recent requests of the group that has had the fewest."""
    return min((load.recent_requests for load in loads), default=0.0)


def order_key(request: RequestView, load: GroupLoad, cost_ms: float) -> tuple[float, int, bytes]:
    """Sorts choices: by cost, then fewer requests of ours, then by a hash that all routers share."""
    spread = blake2b(request.spread_key + load.group_id.encode(), digest_size=8).digest()
    return round(cost_ms, 1), load.own_requests, spread


def _mean(values: Sequence[float | None], default: float) -> float:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else default


def expected_output(request: RequestView, config: PolicyConfig) -> int:
    """New tokens of all choices together."""
    return min(request.max_output_tokens, config.expected_output_tokens * request.num_choices)


def cost_terms(
    request: RequestView, load: GroupLoad, uncached: int, baseline: Baseline, config: PolicyConfig
) -> dict[str, float]:
    """Cost of a request on a group, ms. `uncached`: prompt tokens that it computes there."""
    ms_per_token = _ms_per_token(load, baseline)
    step_ms = 1000.0 * (load.step_s or baseline.step_s)
    ahead_tokens = config.balance_tokens * (load.recent_requests - baseline.recent_requests)
    sharing = load.num_running + load.num_waiting + load.charged_requests
    steps = expected_output(request, config) / request.num_choices
    prefill_ms = uncached * ms_per_token
    terms = {
        "queue": (load.waiting_tokens + load.charged_tokens) * ms_per_token,
        "prefill": prefill_ms,
        "delay": (config.delay_weight + config.delay_per_sequence * sharing) * prefill_ms,
        "decode": steps * step_ms * config.row_share * sharing,
        "context": config.context_weight
        * steps
        * 1000.0
        * load.context_token_s
        * _read_tokens(request, load),
        "memory": _memory_wait_steps(request, load, uncached, config) * step_ms,
        "silent": silent_cost_ms(load, config),
        "balance": min(ahead_tokens, config.max_balance_tokens) * 1000.0 / baseline.prefill_tokens_per_s,
    }
    if load.role is Role.DECODE:
        terms["interference"] = config.interference_weight * prefill_ms
    return terms


QuickCost = tuple[float, float, float]  # queue, what grows with the tokens computed, the rest; ms


def shortlist(
    request: RequestView,
    loads: Sequence[GroupLoad],
    quick: Sequence[QuickCost],
    costs: Sequence[float],
    keep: int,
) -> list[GroupLoad]:
    """Groups that may be among the `keep` cheapest of more than that. `costs`: of each group, or of its
    cheapest way. Of groups in the same state, like all that have been idle from the start, the order that
    decides between equals leaves `keep`."""
    limit = nsmallest(keep, costs)[-1] + _MARGIN_MS
    alike: dict[tuple[QuickCost, float], list[GroupLoad]] = {}
    for load, parts, cost in zip(loads, quick, costs, strict=True):
        if cost <= limit:
            alike.setdefault((parts, cost), []).append(load)
    found = []
    for equals in alike.values():
        if len(equals) > keep:
            equals = nsmallest(keep, equals, key=lambda load: order_key(request, load, 0.0))
        found += equals
    return found


def quick_costs(
    request: RequestView,
    loads: Sequence[GroupLoad],
    matches: Mapping[GroupId, int],
    baseline: Baseline,
    config: PolicyConfig,
) -> list[QuickCost]:
    """`cost_terms` of each group, ms, in three sums that are right up to rounding: the queue, what grows with
    the tokens computed (prefill, delay, interference), and the rest."""
    num = request.num_prompt_tokens
    last = max(num - 1, 0)
    expected = expected_output(request, config)
    baseline_ms_per_token = 1000.0 / baseline.prefill_tokens_per_s
    balance_ms = config.balance_tokens * baseline_ms_per_token
    max_balance_ms = config.max_balance_tokens * baseline_ms_per_token
    decode_ms = expected / request.num_choices * config.row_share * 1000.0
    context_ms = expected / request.num_choices * config.context_weight * 1000.0
    base_share = 1.0 + config.delay_weight
    per_sequence, silent_after_s = config.delay_per_sequence, config.silent_after_s
    get, costs = matches.get, []
    for load in loads:
        size = load.block_size
        cached = get(load.group_id, 0) * size
        if cached > last:
            cached = last // size * size
        uncached = num - cached
        ms_per_token = _ms_per_token(load, baseline)
        step_s = load.step_s or baseline.step_s
        sharing = load.num_running + load.num_waiting + load.charged_requests
        share = base_share + per_sequence * sharing
        if load.role is Role.DECODE:
            share += config.interference_weight
        balance = balance_ms * (load.recent_requests - baseline.recent_requests)
        rest = decode_ms * step_s * sharing + (balance if balance < max_balance_ms else max_balance_ms)
        charged = load.charged_tokens
        if load.context_token_s:
            read = load.running_tokens + load.waiting_tokens + charged + num * sharing
            rest += context_ms * load.context_token_s * read
        missing = (uncached + expected) // size + 1 + charged // size - load.available_blocks
        if missing > 0 and load.active_blocks:
            steps = config.expected_output_tokens * min(missing / load.active_blocks, 8.0)
            rest += steps * step_s * 1000.0
        if load.silent_s > silent_after_s:
            rest += config.silent_cost_ms
        queue = (load.waiting_tokens + charged) * ms_per_token
        costs.append((queue, uncached * share * ms_per_token, rest))
    return costs


def _ms_per_token(load: GroupLoad, baseline: Baseline) -> float:
    """Of a prompt on a group: the geometric mean of its own rate and that of all, as far as it is trusted."""
    rate, trust = load.prefill_tokens_per_s, load.rate_trust
    if rate is None:
        return 1000.0 / baseline.prefill_tokens_per_s
    if trust == 1.0:
        return 1000.0 / rate
    own_share: float = (rate / baseline.prefill_tokens_per_s) ** trust
    return 1000.0 / (baseline.prefill_tokens_per_s * own_share)


def _read_tokens(request: RequestView, load: GroupLoad) -> int:
    """Tokens of context that steps read more because of a request there: those of the others, which slow
    ours, and ours, which slow each of the others."""
    others = load.running_tokens + load.waiting_tokens + load.charged_tokens
    sharing = load.num_running + load.num_waiting + load.charged_requests
    return others + request.num_prompt_tokens * sharing


def silent_cost_ms(load: GroupLoad, config: PolicyConfig) -> float:
    """A group that has not been heard of comes after all others."""
    return config.silent_cost_ms if load.silent_s > config.silent_after_s else 0.0


def _memory_wait_steps(request: RequestView, load: GroupLoad, uncached: int, config: PolicyConfig) -> float:
    """Steps until enough blocks come free: running requests give theirs back evenly over a mean answer."""
    needed = (uncached + expected_output(request, config)) // load.block_size + 1
    missing = needed + load.charged_tokens // load.block_size - load.available_blocks
    if missing <= 0 or not load.active_blocks:
        return 0.0
    return config.expected_output_tokens * min(missing / load.active_blocks, 8.0)


def _in_turn(request: RequestView, loads: Sequence[GroupLoad], config: PolicyConfig) -> list[Choice]:
    """Groups by name, starting one further each time; silent ones last."""
    named = sorted(loads, key=lambda load: load.group_id)
    start = request.turn % len(named) if named else 0
    choices = []
    for load in named[start:] + named[:start]:
        cost_ms = silent_cost_ms(load, config)
        choices.append(Choice(load.group_id, cost_ms, {"silent": cost_ms}))
    return sorted(choices, key=lambda choice: choice.cost_ms)
