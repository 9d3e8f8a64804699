"""From where a group gets the KV blocks of a prompt that it lacks: the choices that `policy` does not
have, because two groups take part.

    none       it computes them itself: the cost of `policy`
    prefill    a prefill group computes the whole prompt, and our group reads the full blocks as they come
    neighbour  another group has more of the prompt cached; nothing is computed there

Of a choice with a source, only what is left of the prompt is computed on the group itself. The terms of the
group are those of `policy`, where `queue` is what is left of its queue once the blocks are there, and

    transfer          the bytes, at the rate measured between the two groups; what comes while a prefill group
                      still computes is not taken off: a pair is worth its place without that
    source_queue, source_prefill, source_delay, source_memory, source_silent, source_balance
                      of a prefill group: the same terms there

The cheapest choice wins, so a prompt that is short, mostly cached, or would have to queue for prefill is
computed where it is answered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from router.routing.policy import (
    KEEP,
    Baseline,
    Choice,
    GroupLoad,
    PlacementPolicy,
    PolicyConfig,
    QuickCost,
    RequestView,
    TokenSplit,
    baseline_of,
    cost_terms,
    fewest_recent,
    order_key,
    quick_costs,
    rank,
    shortlist,
    silent_cost_ms,
    split_prompt,
    whole_block_tokens,
)
from workers.types import GroupId

_OF_COMPUTING = ("prefill", "delay", "interference")  # terms that grow with the tokens computed
_MAX_PREFILL_GROUPS = 4  # the cheapest ones are weighed with every group

Pair = tuple[GroupId, GroupId]  # who gives, who reads


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Who could give blocks of a prompt."""

    prefill: Sequence[GroupLoad] = ()  # groups that compute prompts for others
    cached: Mapping[GroupId, int] = field(default_factory=dict)  # leading blocks that a group surely has
    bytes_per_s: Mapping[Pair, float] = field(default_factory=dict)  # of the pairs that have been measured
    barred: frozenset[Pair] = frozenset()  # have just failed


class _Reader(NamedTuple):
    """A group that may answer, as it would alone."""

    load: GroupLoad
    split: TokenSplit
    alone: Choice


class _Source(NamedTuple):
    """A group to read from with its own share of the cost, none for a neighbour: it computes nothing."""

    load: GroupLoad
    terms: Mapping[str, float]
    cost_ms: float = 0.0
    until_ready_ms: float = 0.0  # until its blocks can be read


def rank_with_sources(
    request: RequestView,
    loads: Sequence[GroupLoad],
    matches: Mapping[GroupId, int],
    sources: Sources,
    config: PolicyConfig,
    *,
    keep: int = KEEP,
) -> list[Choice]:
    """The groups with all their sources, best first: all, or of more than `keep` groups the best. `matches`:
    leading blocks that a group has cached."""
    if config.policy is PlacementPolicy.ROUND_ROBIN:
        return _in_turn(request, loads, sources, config)
    use_cache = config.policy is PlacementPolicy.PREFIX
    if not use_cache:
        matches = {}
    neighbours = _neighbours(loads, sources, config) if use_cache else []
    everywhere = baseline_of([*loads, *sources.prefill], config)
    baseline = everywhere._replace(recent_requests=fewest_recent(loads))
    prefills = _prefill_groups(request, matches, sources.prefill, everywhere, config, keep)
    if len(loads) > keep:
        ways = _Ways(prefills, neighbours, sources, config)
        quick = quick_costs(request, loads, matches, baseline, config)
        costs = [
            ways.lowest_ms(request.num_prompt_tokens, load, matches.get(load.group_id, 0), parts)
            for load, parts in zip(loads, quick, strict=True)
        ]
        loads = shortlist(request, loads, quick, costs, keep)
    ranked = []
    for load in loads:
        matched = matches.get(load.group_id, 0)
        split = split_prompt(request.num_prompt_tokens, load.block_size, matched)
        terms = cost_terms(request, load, split.uncached, baseline, config)
        reader = _Reader(load, split, Choice(load.group_id, sum(terms.values()), terms))
        choices = [reader.alone]
        whole = whole_block_tokens(request.num_prompt_tokens, load.block_size)
        for prefill in prefills:
            if whole > split.cached and _is_readable(prefill.load, load, sources):
                choices.append(_pair(reader, prefill, whole, sources, config))
        if (found := _neighbour(load, split.cached, neighbours, sources)) is not None:
            given = min(sources.cached[found.load.group_id] * load.block_size, whole)
            if given > split.cached:
                choices.append(_pair(reader, found, given, sources, config))
        _, own, spread = order_key(request, load, 0.0)
        for position, choice in enumerate(choices):  # of equal ones, first without, then as given
            ranked.append((round(choice.cost_ms, 1), own, spread, position, choice))
    ranked.sort(key=lambda entry: entry[:4])
    return [entry[4] for entry in ranked]


def _is_readable(source: GroupLoad, reader: GroupLoad, sources: Sources) -> bool:
    """Whether the reader can use the source's blocks, as far as the router knows."""
    return (
        source.kv_format == reader.kv_format != ""
        and source.group_id != reader.group_id
        and (source.group_id, reader.group_id) not in sources.barred
    )


def _prefill_groups(
    request: RequestView,
    matches: Mapping[GroupId, int],
    loads: Sequence[GroupLoad],
    everywhere: Baseline,
    config: PolicyConfig,
    keep: int,
) -> list[_Source]:
    """The cheapest prefill groups. There the request has no tokens of its own."""
    prompt = replace(request, max_output_tokens=0, num_choices=1)
    baseline = everywhere._replace(recent_requests=fewest_recent(loads))
    if len(loads) > keep:
        quick = quick_costs(prompt, loads, matches, baseline, config)
        loads = shortlist(request, loads, quick, [sum(parts) for parts in quick], keep)
    ranked = []
    for load in loads:
        matched = matches.get(load.group_id, 0)
        uncached = split_prompt(request.num_prompt_tokens, load.block_size, matched).uncached
        terms = cost_terms(prompt, load, uncached, baseline, config)
        del terms["decode"], terms["context"]  # no answer of ours
        own = {f"source_{name}": value for name, value in terms.items()}
        prefill = _Source(load, own, sum(terms.values()), terms["queue"] + terms["prefill"])
        ranked.append((*order_key(request, load, prefill.cost_ms), prefill))
    ranked.sort(key=lambda entry: entry[:3])
    return [entry[3] for entry in ranked[:_MAX_PREFILL_GROUPS]]


def _neighbours(loads: Sequence[GroupLoad], sources: Sources, config: PolicyConfig) -> list[_Source]:
    """Groups that have some of the prompt and have been heard of, those with most of it first."""
    heard = {load.group_id: load for load in loads if not silent_cost_ms(load, config)}
    most_first = sorted(sources.cached.items(), key=lambda entry: -entry[1])
    return [_Source(heard[group_id], {}) for group_id, count in most_first if count and group_id in heard]


def _neighbour(
    load: GroupLoad, own_tokens: int, neighbours: Sequence[_Source], sources: Sources
) -> _Source | None:
    """The group that has most of the prompt, when it is more than the group itself has."""
    own_blocks = own_tokens // load.block_size
    for found in neighbours:
        if sources.cached[found.load.group_id] <= own_blocks:
            break
        if _is_readable(found.load, load, sources):
            return found
    return None


@dataclass(frozen=True, slots=True)
class _Ways:
    """The first look at all groups: what the cheapest way of each costs, up to rounding."""

    prefills: Sequence[_Source]
    neighbours: Sequence[_Source]
    sources: Sources
    config: PolicyConfig

    def lowest_ms(self, num_prompt_tokens: int, load: GroupLoad, matched: int, parts: QuickCost) -> float:
        """`parts` are those of `quick_costs`."""
        queue, computing, rest = parts
        lowest = queue + computing + rest
        whole = whole_block_tokens(num_prompt_tokens, load.block_size)
        cached = min(matched * load.block_size, whole)
        if whole == cached:
            return lowest
        neighbour = _neighbour(load, cached, self.neighbours, self.sources)
        ways = [(found, whole) for found in self.prefills if _is_readable(found.load, load, self.sources)]
        if neighbour is not None:
            given = min(self.sources.cached[neighbour.load.group_id] * load.block_size, whole)
            ways.append((neighbour, given))
        for source, given in ways:
            fetched = given - cached
            transfer_ms = _transfer_ms(source.load, load, fetched, self.sources, self.config)
            left = max(queue - source.until_ready_ms - transfer_ms, 0.0)
            share = 1.0 - fetched / (num_prompt_tokens - cached)
            lowest = min(lowest, left + computing * share + rest + transfer_ms + source.cost_ms)
        return lowest


def _transfer_ms(
    source: GroupLoad, reader: GroupLoad, num_tokens: int, sources: Sources, config: PolicyConfig
) -> float:
    num_bytes = num_tokens // reader.block_size * reader.block_bytes
    rate = sources.bytes_per_s.get((source.group_id, reader.group_id), config.default_transfer_bytes_per_s)
    return config.transfer_ms + 1000.0 * num_bytes / rate


def _pair(
    reader: _Reader, source: _Source, given_tokens: int, sources: Sources, config: PolicyConfig
) -> Choice:
    """The reader reads what it lacks of the first `given_tokens` of the prompt, and computes the rest."""
    load, split, alone = reader
    fetched = given_tokens - split.cached
    transfer_ms = _transfer_ms(source.load, load, fetched, sources, config)
    computed_share = 1.0 - fetched / split.uncached
    terms = {**alone.terms, "transfer": transfer_ms, **source.terms}
    terms["queue"] = max(terms["queue"] - source.until_ready_ms - transfer_ms, 0.0)
    for name in _OF_COMPUTING:
        if name in terms:
            terms[name] *= computed_share
    return Choice(load.group_id, sum(terms.values()), terms, source.load.group_id, fetched)


def _in_turn(
    request: RequestView, loads: Sequence[GroupLoad], sources: Sources, config: PolicyConfig
) -> list[Choice]:
    """Groups in turn, each with the prefill groups in turn and then without; silent ones are left out."""
    named = sorted(sources.prefill, key=lambda load: load.group_id)
    heard = [load for load in named if not silent_cost_ms(load, config)]
    by_id = {load.group_id: load for load in loads}
    choices = []
    for choice in rank(request, loads, {}, config):
        load = by_id[choice.group_id]
        whole = whole_block_tokens(request.num_prompt_tokens, load.block_size)
        able = [source for source in heard if _is_readable(source, load, sources)] if whole else []
        start = request.turn % len(able) if able else 0
        for source in able[start:] + able[:start]:
            choices.append(choice._replace(source=source.group_id, fetched_tokens=whole))
        choices.append(choice)
    return choices
