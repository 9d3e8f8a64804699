"""The counter hash against the published vectors, and the numbers that running requests depend on."""

from __future__ import annotations

import pytest

from workers.runtime.philox import philox_4x32, uniform


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        # Known answers of Random123 1.14, philox4x32 with 10 rounds.
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_known_answers(counter, key, expected):
    assert philox_4x32(counter, key) == expected


@pytest.mark.parametrize(
    ("seed", "position", "choice", "expected"),
    [
        (0, 0, 0, 0.399046472315),
        (7, 17, 0, 0.554346598069),
        (7, 17, 1, 0.647860973591),
        (-1, 17, 0, 0.433380363299),
        ((1 << 63) - 1, 100_000, 3, 0.311897345503),
    ],
)
def test_uniform_is_fixed_for_ever(seed, position, choice, expected):
    """A group of another version must continue a request with the tokens it would have had."""
    assert uniform(seed, position, choice) == pytest.approx(expected, abs=1e-12)


def test_seed_position_and_choice_all_count():
    numbers = {
        uniform(seed, position, choice)
        for seed in (-3, 0, 5, 1 << 40)
        for position in range(50)
        for choice in range(4)
    }
    assert len(numbers) == 4 * 50 * 4
    assert all(0.0 <= number < 1.0 for number in numbers)
