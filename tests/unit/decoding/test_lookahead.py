"""What is guessed from the model's answers to earlier guesses."""

from __future__ import annotations

from workers.decoding.lookahead import MAX_KEPT, Lookahead


def _told(*token_ids: int) -> Lookahead:
    lookahead = Lookahead()
    lookahead.extend(token_ids)
    return lookahead


def test_nothing_is_known_at_first() -> None:
    assert Lookahead().propose(4) == ()
    assert _told(7).propose(3) == (7, 7, 7)  # something to begin with


def test_the_sequence_itself_is_a_start() -> None:
    assert _told(1, 2, 3, 1).propose(3) == (2, 3, 1)


def test_what_was_said_after_a_guess_is_the_next_guess_for_its_place() -> None:
    lookahead = _told(1)
    lookahead.note_checked((5, 6, 7), (2, 8, 9, 4))  # 2 instead of 5; 8 after 5, 9 after 6, 4 after 7
    lookahead.extend((2,))
    assert lookahead.propose(4) == (8, 9, 4, 4)


def test_what_was_said_after_the_same_tokens_comes_first() -> None:
    lookahead = _told(1)
    lookahead.note_checked((2, 6), (2, 3, 4))  # 3 after 1 2 (right), 4 after 2 6 (wrong)
    lookahead.extend((2, 3))
    lookahead.note_checked((9,), (2, 5))
    lookahead.extend((2,))
    assert lookahead.propose(2) == (3, 2)  # nothing is known of 3 2, so 3 as after 2, though 5 was said here


def test_no_more_is_kept_than_allowed() -> None:
    lookahead = _told(*range(3 * MAX_KEPT))
    assert len(lookahead._after) == MAX_KEPT
    assert lookahead.num_tokens == 3 * MAX_KEPT
