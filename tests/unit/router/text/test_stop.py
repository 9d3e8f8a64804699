from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.text.stop import StopMatcher


def run(stops: list[str], pieces: list[str], *, include_stop: bool = False) -> tuple[list[str], str | None]:
    matcher = StopMatcher(stops, include_stop=include_stop)
    out = []
    for piece in pieces:
        match = matcher.add(piece)
        out.append(match.text)
        if match.stop is not None:
            return out, match.stop
    out.append(matcher.finish())
    return out, None


@pytest.mark.parametrize(
    ("stops", "pieces", "expected", "stop"),
    [
        (["beta gam"], list("alpha beta gamma"), "alpha ", "beta gam"),
        (["beta gamma zeta"], list("alpha beta gamma delta"), "alpha beta gamma delta", None),
        (["end!"], list("the end"), "the end", None),
        (["alpha"], list("alpha beta"), "", "alpha"),
        (["ab", "b"], ["ab"], "", "ab"),  # complete at the same character: the longer one
        (["abcdef", "cd"], list("xabcdef"), "xab", "cd"),  # complete first
        (["aab"], list("aaab"), "a", "aab"),
        (["\n\n"], ["line\n", "next\n", "\nafter"], "line\nnext", "\n\n"),
    ],
)
def test_cuts_before_the_stop(stops: list[str], pieces: list[str], expected: str, stop: str | None) -> None:
    out, found = run(stops, pieces)
    assert ("".join(out), found) == (expected, stop)


def test_holds_back_only_what_could_become_a_stop() -> None:
    out, _ = run(["beta gam"], ["alpha b", "e", "ta", " delta", " b"])
    assert out == ["alpha ", "", "", "beta delta", " ", "b"]


def test_can_include_the_stop() -> None:
    out, stop = run(["ta g"], list("beta gamma"), include_stop=True)
    assert ("".join(out), stop) == ("beta g", "ta g")


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.text("abc", max_size=3), max_size=12),
)
def test_pieces_do_not_matter(stops: list[str], pieces: list[str]) -> None:
    whole = "".join(pieces)
    by_piece, stop = run(stops, pieces)
    by_character, other = run(stops, list(whole))
    assert ("".join(by_piece), stop) == ("".join(by_character), other)
    # What is given out is always a prefix of the right text, and without a stop string inside.
    right = "".join(by_character)
    given_out = ""
    for piece in by_piece:
        given_out += piece
        assert right.startswith(given_out)
    assert not any(entry in right for entry in stops)
    if stop is None:
        assert right == whole
