"""What steps and reading take."""

from __future__ import annotations

import pytest

from workers.decoding.times import ReadingTime, StepTimes


def test_times_lie_between_what_was_measured() -> None:
    times = StepTimes()
    assert times.is_empty
    times.observe(10, 1.0)
    times.observe(30, 3.0)
    assert times.of(20) == pytest.approx(2.0)
    assert times.of(1) == 1.0
    assert times.of(37) == 3.0 and times.of(75) == pytest.approx(6.0)
    alone = StepTimes()
    alone.observe(1, 1.0)
    assert alone.of(4) == 1.0 and alone.of(8) == pytest.approx(2.0)


def test_fewer_rows_never_seem_longer_and_news_count() -> None:
    times = StepTimes()
    times.observe(4, 2.0)
    times.observe(8, 1.0)
    assert times.of(4) == times.of(6) == times.of(8) == 1.0
    for _ in range(40):
        times.observe(8, 5.0)
    assert times.of(8) == pytest.approx(5.0, rel=0.01)
    assert times.of(4) == 2.0


def test_what_disturbs_a_step_counts_little() -> None:
    times = StepTimes()
    for seconds in (9.0, 1.0, 5.0):  # the first ones
        times.observe(4, seconds)
    assert times.of(4) == 1.0
    times.observe(4, 10.0)
    assert times.of(4) == pytest.approx(1.1)


def test_the_time_of_reading_is_that_of_the_tokens_read_last() -> None:
    reading = ReadingTime()
    assert reading.of(1000) == 0.0
    reading.observe(512, 0.512)
    assert reading.of(1000) == pytest.approx(1.0)
    reading.observe(3, 0.3)  # a hiccup
    assert reading.of(1000) < 2.2
    for _ in range(8):
        reading.observe(512, 0.0512)
    assert reading.of(1000) == pytest.approx(0.1, rel=0.02)
    reading.observe(512, -0.1)
    assert 0.0 < reading.of(1000) < 0.05
