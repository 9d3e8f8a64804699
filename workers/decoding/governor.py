"""How many guessed tokens a step should check: as many as bring the most tokens a second.

A guess that is checked costs a row of the step, and is worth its chance of being right. What a row costs
depends on the machine and on how many rows there are already: with few, the weights are read for all of them
at once and a further row is nearly free; with many, each takes its time. So both sides are measured:

    time of a step      by number of rows, from the steps themselves
    chance of a guess   from what became of the sequence's guesses so far
    time of guessing    by number of sequences in one pass of what guesses, if that takes time at all
    time of reading     of a token, where what guesses has to have read the sequence before

and the guesses with the best chances are taken while the expected tokens a second rise (goodput, as in Liu et
al., "Optimizing Speculative Decoding for Serving Large Language Models Using Goodput", 2024). Looking for
guesses takes time, too: where none could pay, nobody looks. Reading is paid once, before the first guess of a
sequence, and everybody waits for it: a sequence is read only when the tokens that it has still to write are
expected to save more than that.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heapreplace
from itertools import accumulate, islice, repeat
from math import ceil, floor
from operator import mul
from typing import NamedTuple

from workers.decoding.chances import Chance, TreeChances
from workers.decoding.times import ReadingTime, StepTimes
from workers.decoding.trials import GuessTrials

# Guesses have to promise so much more than none: both sides are estimates, and of several numbers of guesses
# the one that seems best is rarely as good as it seems.
_MARGIN = 1.05
_TRIAL_SHARE = 0.02  # of the time without guesses that reading for a trial may take
_TRIED_TREE = 4  # guesses of a tree in a trial
# Until so many have been checked, one sequence at a time has one: a full batch would pay dearly.
_KNOWN_TREES = 6


class Unread(NamedTuple):
    """Of a sequence."""

    num_tokens: int  # that have to be read before anything is guessed after it
    num_left: int  # that it is expected to write yet


class _Passes:
    """The passes that make some guesses, and what they take, seconds. A guess of a sequence is made in a pass
    of its own, which it shares with those of other sequences."""

    def __init__(self, times: StepTimes, num_sequences: int) -> None:
        self._by_rows = [0.0] * (num_sequences + 1)  # seconds of a pass
        if not times.is_empty:
            self._by_rows[1:] = map(times.of, range(1, num_sequences + 1))
        self._rows: list[int] = []  # of each pass
        self.seconds = 0.0

    def add(self, number: int) -> None:
        """One more sequence has a guess of this number, from 0; it has those before it already."""
        if number == len(self._rows):
            self._rows.append(0)
        rows = self._rows[number]
        self._rows[number] += 1
        self.seconds += self._by_rows[rows + 1] - self._by_rows[rows]


class _Best(NamedTuple):
    """A number of guesses."""

    num_guesses: int
    saved_s: float  # a token, against none


class Governor:
    """Of one engine: measures its steps and says how long drafts may be."""

    def __init__(self, *, has_trees: bool = False) -> None:
        """has_trees: guesses of a sequence are a tree, made in one pass; else a chain, made one by one."""
        self._tree = TreeChances() if has_trees else None
        self.chance = Chance()  # of all sequences
        self._times = StepTimes()
        self._pass_times = StepTimes()
        self._reading = ReadingTime()
        self._trials = GuessTrials(of_trees=has_trees)
        self._turn = 0  # of one sequence that has a tree

    def observe(self, num_rows: int, seconds: float) -> None:
        """A step that decoded only, with `num_rows` rows, drafts among them; the time without guessing."""
        self._times.observe(num_rows, seconds)
        self._trials.plain_s += seconds

    def is_worth_looking(self, chances: Sequence[float], most: int, max_rows: int) -> bool:
        """Whether to look for guesses and to ask for `lengths`: not where none can pay, even if there were
        `most` for each sequence; but now and then all the same: what is never tried is never learnt anew."""
        room = min(max_rows - len(chances), most * len(chances))
        if self._times.is_empty or room < 1:
            return False
        trials, num_sequences = self._trials, len(chances)
        if trials.is_due(num_sequences):
            return True
        if self._tree is None:
            may_pay = self._may_pay(chances, room)
        else:
            may_pay = self._best_of_trees(self._tree, [most] * num_sequences, room) > 0
        if not may_pay:
            trials.pass_over()
        return may_pay

    def observe_tree(self, parents: Sequence[int], last: int) -> None:
        """Of a tree of guesses, which may be a chain, those up to the one of number `last` came true; -1:
        none. Counts where guesses are made as trees."""
        if self._tree is None:
            return
        right = []
        while last >= 0:
            right.append(last)
            last = parents[last]
        self._tree.observe(len(parents), right)

    def observe_pass(self, num_rows: int, seconds: float) -> None:
        """A pass that made a guess for each of some sequences."""
        self._pass_times.observe(num_rows, seconds)

    def observe_reading(self, num_tokens: int, seconds: float) -> None:
        """A pass that read so many tokens, more than those that it made guesses after."""
        least_s = 0.0 if self._pass_times.is_empty else self._pass_times.of(1)
        self._reading.observe(num_tokens, seconds - least_s)

    def lengths(
        self,
        chances: Sequence[float],
        limits: Sequence[int],
        max_rows: int,
        unread: Sequence[Unread] | None = None,
    ) -> list[int]:
        """How many guesses of each sequence to check, at most `limits`, so that a step of one row a sequence
        and these has no more than `max_rows`. unread: None where nothing has to be read."""
        lengths, trials = [0] * len(chances), self._trials
        if self._times.is_empty:
            return lengths
        if self._tree is not None and self._tree.num_seen < _KNOWN_TREES:
            limits = _one_alone(limits, self._turn)
            self._turn += 1
        room = max(0, max_rows - len(chances))
        if self._tree is not None:
            wanted = trials.with_more(self._best_of_trees(self._tree, limits, room))
            order = _by_turns(limits, min(room, max(1, wanted)))
        else:
            order, best = self._chains(chances, limits, room, unread)
            wanted = trials.with_more(best)
        for index in order[:wanted]:
            lengths[index] += 1
        if any(lengths):
            trials.pay()
        elif trials.is_due(len(chances)):
            tried = order[0] if order else self._cheapest(limits, unread or ())
            if tried is None:
                trials.put_off()
            else:
                trials.try_some(len(chances))
                most = room if self._tree is None else min(room, _TRIED_TREE)
                lengths[tried] = max(0, min(limits[tried], most))
        else:
            trials.pass_over()
        return lengths

    def _may_pay(self, chances: Sequence[float], room: int) -> bool:
        """Whether up to `room` guesses could pay if each were as likely right as the likeliest one. Where
        tokens and times grow in straight lines, the best number is at the end of a line."""
        rows, best = len(chances), max(chances)
        least_rate = _MARGIN * rows / self._times.of(rows)
        return any(
            rows + best * (more - rows) > least_rate * self._times.of(more)
            for more in self._times.bends(rows, rows + room)
        )

    def _best_of_trees(self, tree: TreeChances, limits: Sequence[int], room: int) -> int:
        """How many guesses make the most tokens a second, the first ones of all sequences before their second
        ones. Where tokens and times grow in straight lines, that is at the end of a line."""
        values, rows = tree.values(max(limits, default=0)), len(limits)
        sizes = [sum(number < limit for limit in limits) for number in range(len(values))]
        room = min(room, sum(sizes))
        bends = [*(more - rows for more in self._times.bends(rows, rows + room)), *accumulate(sizes)]
        if not self._pass_times.is_empty:
            bends += self._pass_times.bends(0, rows)
        best, best_rate = 0, _MARGIN * rows / self._times.of(rows)
        for count in sorted({min(room, whole) for each in bends for whole in (floor(each), ceil(each))}):
            tokens, left = float(rows), count
            for value, size in zip(values, sizes, strict=True):
                tokens += value * min(size, left)
                left -= min(size, left)
            guessing_s = 0.0
            if count and not self._pass_times.is_empty:
                guessing_s = self._pass_times.of(min(count, sizes[0]))
            rate = tokens / (self._times.of(rows + count) + guessing_s)
            if rate > best_rate:
                best, best_rate = count, rate
        return best

    def _chains(
        self,
        chances: Sequence[float],
        limits: Sequence[int],
        room: int,
        unread: Sequence[Unread] | None,
    ) -> tuple[list[int], int]:
        """The sequence of each guess, likeliest first, and how many of them make the most tokens a second."""
        worths = [
            list(accumulate(repeat(chance, limit), mul))
            for chance, limit in zip(chances, limits, strict=True)
        ]
        order = _by_worth(worths, room)
        best = self._best(worths, order)
        if unread is not None:
            dear = [i for i, own in enumerate(unread) if worths[i] and not self._is_worth_reading(own, best)]
            if dear:
                for index in dear:
                    worths[index] = []
                order = _by_worth(worths, room)
                best = self._best(worths, order)
        return order, best.num_guesses

    def _best(self, worths: Sequence[Sequence[float]], order: Sequence[int]) -> _Best:
        """How many of the guesses in `order` (the sequence of each) make the most tokens a second."""
        tokens, rows, best = float(len(worths)), len(worths), 0
        plain_rate = tokens / self._times.of(rows)
        best_rate = _MARGIN * plain_rate
        lengths = [0] * len(worths)
        passes = _Passes(self._pass_times, len(worths))
        for count, index in enumerate(order, 1):
            tokens += worths[index][lengths[index]]
            passes.add(lengths[index])
            lengths[index] += 1
            rate = tokens / (self._times.of(rows + count) + passes.seconds)
            if rate > best_rate:
                best_rate, best = rate, count
        return _Best(best, 1 / plain_rate - 1 / best_rate if best else 0.0)

    def _is_worth_reading(self, unread: Unread, best: _Best) -> bool:
        return self._reading.of(unread.num_tokens) <= best.saved_s * unread.num_left

    def _cheapest(self, limits: Sequence[int], unread: Sequence[Unread]) -> int | None:
        """The sequence that is read soonest, unless even that takes too long for a trial."""
        able = [index for index, _ in enumerate(unread) if limits[index]]
        if not able:
            return None
        index = min(able, key=lambda each: unread[each].num_tokens)
        takes_s = self._reading.of(unread[index].num_tokens)
        return index if takes_s <= _TRIAL_SHARE * self._trials.plain_s else None


def _one_alone(limits: Sequence[int], turn: int) -> list[int]:
    """No guesses but of one of the sequences that can have any, of another one in the next turn."""
    able = [index for index, limit in enumerate(limits) if limit]
    chosen = able[turn % len(able)] if able else -1
    return [limit if index == chosen else 0 for index, limit in enumerate(limits)]


def _by_turns(limits: Sequence[int], most: int) -> list[int]:
    """The sequence of each guess, all first ones before all second ones."""
    turns = range(max(limits, default=0))
    order = (index for turn in turns for index, limit in enumerate(limits) if turn < limit)
    return list(islice(order, most))


def _by_worth(worths: Sequence[Sequence[float]], most: int) -> list[int]:
    """The sequence of each guess, those first that are most likely right, with all that they follow."""
    heap = [(-own[0], index) for index, own in enumerate(worths) if own]
    heapify(heap)
    taken = [0] * len(worths)
    order: list[int] = []
    while heap and len(order) < most:
        index = heap[0][1]
        order.append(index)
        taken[index] += 1
        if taken[index] < len(worths[index]):
            heapreplace(heap, (-worths[index][taken[index]], index))
        else:
            heappop(heap)
    return order
