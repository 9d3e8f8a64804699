"""How many guesses are worth their rows."""

from __future__ import annotations

import random
from math import isclose

from workers.decoding.chances import TreeChances
from workers.decoding.governor import Governor, Unread

# Milliseconds by rows: small batches wait for memory.
FLAT = {1: 10.0, 2: 10.0, 4: 10.2, 8: 10.6, 16: 15.0, 32: 28.0, 48: 40.0, 64: 52.0, 256: 220.0}


def _governor(times: dict[int, float]) -> Governor:
    governor = Governor()
    for rows, milliseconds in times.items():
        governor.observe(rows, milliseconds / 1000)
    return governor


def test_nothing_is_guessed_before_a_step_has_been_seen() -> None:
    assert Governor().lengths([0.9], [8], 512) == [0]


def test_alone_good_guesses_are_taken_and_bad_ones_not() -> None:
    governor = _governor(FLAT)
    assert governor.lengths([0.9], [7], 512) == [7]
    assert 1 <= governor.lengths([0.2], [7], 512)[0] <= 3
    assert governor.lengths([0.01], [7], 512) == [0]


def test_in_a_full_batch_only_what_is_nearly_certain_pays() -> None:
    governor = _governor(FLAT)
    assert governor.lengths([0.6] * 32, [8] * 32, 512) == [0] * 32
    lengths = governor.lengths([0.99] * 4 + [0.3] * 28, [8] * 32, 512)
    assert sum(lengths[:4]) > 0 == sum(lengths[4:])


def test_the_row_that_brings_most_goes_first() -> None:
    first, second = _governor(FLAT).lengths([0.9, 0.8], [8, 8], 8)
    assert (first, second) == (4, 2)  # .9 .81 | .8 | .73 .66 | .64


def test_limits_and_rows_are_kept() -> None:
    governor = _governor(dict.fromkeys(FLAT, 10.0))
    assert governor.lengths([0.9, 0.9], [3, 0], 512) == [3, 0]
    assert sum(governor.lengths([0.9] * 3, [8] * 3, 10)) == 7
    assert governor.lengths([0.9] * 3, [8] * 3, 3) == [0, 0, 0]
    assert governor.lengths([], [], 512) == []


def test_what_does_not_pay_is_tried_now_and_then() -> None:
    governor = _governor(FLAT)
    tried = [sum(governor.lengths([0.3] * 32, [8] * 32, 512)) for _ in range(64)]
    assert tried == ([0] * 31 + [8]) * 2


def test_more_than_pays_is_tried_now_and_then() -> None:
    """A step that took long once would not be tried again, nor guesses behind one that was wrong."""
    governor = _governor(FLAT)
    taken = [governor.lengths([0.5], [7], 512)[0] for _ in range(64)]
    assert taken == ([taken[0]] * 31 + [taken[0] + 2]) * 2 and 0 < taken[0] < 6


def test_nobody_looks_for_guesses_that_cannot_pay() -> None:
    """But once in 32 steps, whether there are any or not."""
    governor = _governor(FLAT)
    chances = [0.3] * 32
    looked = []
    for step in range(1, 97):
        if governor.is_worth_looking(chances, 8, 512):
            looked.append((step, sum(governor.lengths(chances, [0] * 31 + [step // 8], 512))))
    assert looked == [(32, 4), (64, 8), (96, 12)]
    assert not governor.is_worth_looking(chances, 8, 512)
    for _ in range(30):
        assert not governor.is_worth_looking(chances, 8, 512)
    assert governor.is_worth_looking(chances, 8, 512)
    assert governor.lengths(chances, [0] * 32, 512) == [0] * 32
    assert not governor.is_worth_looking(chances, 8, 512)
    assert governor.is_worth_looking([0.3] * 31 + [0.99], 8, 512)
    assert governor.is_worth_looking([0.3], 8, 512)
    assert not governor.is_worth_looking(chances, 8, 32)  # no room
    assert not Governor().is_worth_looking([0.9], 8, 512)
    assert not governor.is_worth_looking([], 8, 512)


def test_whoever_looks_in_vain_would_have_got_none_anyway() -> None:
    draw = random.Random(3)
    num_none = 0
    for _ in range(300):
        seconds, times = 1.0, {}
        for rows in sorted(draw.sample(range(1, 200), 6)):
            seconds += draw.random() * rows / 10
            times[rows] = 1000 * seconds
        governor, count = _governor(times), draw.randint(1, 40)
        chances, max_rows = [draw.random() ** 3 for _ in range(count)], draw.randint(1, 120)
        if not governor.is_worth_looking(chances, 4, max_rows):
            num_none += 1
            assert governor.lengths(chances, [4] * count, max_rows) == [0] * count
    assert num_none > 50


def test_it_turns_down_as_the_batch_grows_and_up_again() -> None:
    governor = _governor(FLAT)
    means = [sum(governor.lengths([0.7] * n, [8] * n, 512)) / n for n in (1, 8, 32, 8, 1)]
    assert means[0] == means[4] > means[1] == means[3] > means[2]


def test_one_disturbed_step_does_not_make_guesses_look_free() -> None:
    """Seen once, with few rows, it would otherwise count until there are so few again."""
    governor = _governor({**FLAT, 2: 900.0})
    assert governor.lengths([0.6] * 32, [8] * 32, 512) == [0] * 32


def test_guesses_that_take_long_to_make_have_to_bring_more() -> None:
    quick, slow = _governor(FLAT), _governor(FLAT)
    for rows in (1, 2, 4, 8, 16, 32):
        quick.observe_pass(rows, 0.0005)
        slow.observe_pass(rows, 0.004)
    assert quick.lengths([0.9], [7], 512) == [7]
    assert slow.lengths([0.9], [7], 512) == [4]
    assert slow.lengths([0.3], [7], 512) == [0]
    assert slow.lengths([0.6] * 4, [1] * 4, 512) == [1] * 4  # in one pass, not in four


def test_guesses_of_a_tree_are_worth_what_became_of_those_of_their_number() -> None:
    governor = Governor(has_trees=True)
    for rows, milliseconds in FLAT.items():
        governor.observe(rows, milliseconds / 1000)
    governor.observe_pass(1, 0.002)  # of all guesses together
    for turn in range(200):  # the way 0, 2 came true, or none
        governor.observe_tree((-1, -1, 0, 2), 2 if turn % 4 else -1)
    assert governor.lengths([0.9], [8], 512) == [3]
    assert governor.lengths([0.9] * 32, [8] * 32, 512) == [0] * 32
    for _ in range(200):
        governor.observe_tree((-1, -1, 0, 2), -1)
    assert governor.lengths([0.9], [8], 512) == [0]


def test_until_trees_are_known_one_sequence_at_a_time_has_one() -> None:
    governor = Governor(has_trees=True)
    for rows in FLAT:
        governor.observe(rows, 0.01)
    for turn in range(6):  # by turns: one that never gets a guess would else keep the others from any
        expected = [0] * 4
        expected[1 + turn % 3] = 8
        assert governor.lengths([0.9] * 4, [0, 8, 8, 8], 512) == expected
        governor.observe_tree((-1, 0, 1, 2), 3)
    governor.observe_tree((-1, 0, 1, 2), 3)
    assert min(governor.lengths([0.9] * 4, [8] * 4, 512)) >= 4


def test_a_trial_of_a_tree_is_small() -> None:
    governor = Governor(has_trees=True)
    for rows, milliseconds in FLAT.items():
        governor.observe(rows, milliseconds / 1000)
    for _ in range(50):
        governor.observe_tree((-1, -1, -1), -1)
    tried = [governor.lengths([0.9] * 32, [8] * 32, 512) for _ in range(32)]
    assert tried == [[0] * 32] * 31 + [[4] + [0] * 31]


def test_nobody_looks_for_trees_that_do_not_pay_and_they_are_tried_less_often() -> None:
    governor = Governor(has_trees=True)
    for rows, milliseconds in FLAT.items():
        governor.observe(rows, milliseconds / 1000)
    for _ in range(50):
        governor.observe_tree((-1, -1, -1), -1)

    def looked(steps: int, num_sequences: int) -> list[tuple[int, int]]:
        chances = [0.9] * num_sequences
        return [
            (step, sum(governor.lengths(chances, [8] * num_sequences, 512)))
            for step in range(1, steps + 1)
            if governor.is_worth_looking(chances, 8, 512)
        ]

    assert looked(480, 4) == [(32, 4), (96, 4), (224, 4), (352, 4), (480, 4)]
    assert looked(128, 5) == [(128, 4)]  # as many, or more: what was found holds
    assert looked(96, 3) == [(32, 4), (96, 4)]  # fewer


def test_of_trees_the_best_number_of_guesses_is_found() -> None:
    draw = random.Random(5)
    num_some = 0
    for _ in range(300):
        governor, seconds = Governor(has_trees=True), 0.01
        for rows in sorted(draw.sample(range(1, 100), 5)):
            seconds += draw.random() * rows / 5000
            governor.observe(rows, seconds)
        for rows in draw.sample(range(1, 20), draw.randint(0, 4)):
            governor.observe_pass(rows, 0.002 * rows * draw.random())
        right, likely = TreeChances(), draw.random()
        for _ in range(40):
            came = range(4) if draw.random() < likely else ()
            governor.observe_tree((-1, 0, 1, 2), 3 if came else -1)
            right.observe(4, came)
        limits, room = [draw.randint(0, 6) for _ in range(draw.randint(1, 20))], draw.randint(0, 60)
        values, least = right.values(6), 1.05
        rates = [rate(governor, limits, values, count) for count in range(min(room, sum(limits)) + 1)]
        expected = max(range(len(rates)), key=lambda count: rates[count] if count else least * rates[0])
        found = sum(governor.lengths([0.5] * len(limits), limits, room + len(limits)))
        assert isclose(rates[found], rates[expected])
        num_some += found > 0
    assert 50 < num_some < 290


def rate(governor: Governor, limits: list[int], values: list[float], count: int) -> float:
    """Tokens a second with so many guesses of trees, the first ones of all sequences first."""
    turns = [(turn, index) for turn in range(6) for index, limit in enumerate(limits) if turn < limit]
    taken = turns[:count]
    asked = len({index for _, index in taken})
    guessing_s = governor._pass_times.of(asked) if asked and not governor._pass_times.is_empty else 0.0
    tokens = len(limits) + sum(values[turn] for turn, _ in taken)
    return tokens / (governor._times.of(len(limits) + count) + guessing_s)


def test_slow_guessing_ends_in_a_full_batch_and_is_tried_again() -> None:
    governor = _governor(FLAT)
    for rows in (1, 8, 32):
        governor.observe_pass(rows, 0.002)
    tried = [sum(governor.lengths([0.5] * 32, [4] * 32, 512)) for _ in range(32)]
    assert tried == [0] * 31 + [4]
    assert governor.lengths([0.8], [4], 512) == [4]


def test_reading_has_to_be_won_back_by_what_is_left_to_write() -> None:
    governor = _governor(FLAT)
    for rows in (1, 2, 4, 8):
        governor.observe_pass(rows, 0.001)
    assert governor.lengths([0.9], [4], 512, [Unread(4000, 1)]) == [4]  # it is not known what reading takes
    governor.observe_reading(512, 0.513)  # a millisecond a token
    # Four guesses bring 4.1 tokens in 14 ms or so: each saves 6.6 ms against a step of its own.
    assert governor.lengths([0.9], [4], 512, [Unread(100, 20)]) == [4]
    assert governor.lengths([0.9], [4], 512, [Unread(100, 10)]) == [0]
    assert governor.lengths([0.9], [4], 512, [Unread(1000, 100)]) == [0]
    assert governor.lengths([0.9], [4], 512, [Unread(0, 1)]) == [4]


def test_one_that_is_not_read_leaves_its_rows_to_the_others() -> None:
    governor = _governor(dict.fromkeys(FLAT, 10.0))
    governor.observe_reading(512, 0.512)
    unread = [Unread(2000, 50), Unread(0, 50)]
    assert governor.lengths([0.9, 0.5], [8, 8], 6, unread) == [0, 4]
    assert governor.lengths([0.9, 0.5], [8, 8], 6) == [4, 0]


def test_what_is_too_long_to_pay_is_tried_when_that_is_little_of_the_time() -> None:
    """What reading takes, or guesses bring, may have changed since."""
    governor = _governor({1: 10.0, 8: 10.0})
    governor.observe_reading(512, 5.12)  # the first pass of a process is slow
    tried = []
    for step in range(4096):
        unread = [Unread(900, 30), Unread(200, 30)]
        if governor.lengths([0.9, 0.9], [4, 4], 512, unread) != [0, 0]:
            tried.append(step + 1)
        governor.observe(2, 0.1)
    # Two seconds of reading in a hundred without, at every 32nd step.
    assert tried == [1024, 2048, 3072, 4096]
