"""How far an answer has come in a grammar, at the limits of llguidance."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from llguidance import LLMatcher, LLParserLimits

from tests.models.toy_tokenizers import byte_tokenizer
from workers.engine.grammars import AnswerEnd, GrammarRefused
from workers.engine.step import GrammarFailed
from workers.structured import matching
from workers.structured.matching import LlguidanceGrammar, LlguidanceState
from workers.structured.source import source_of
from workers.structured.vocabulary import read_vocabulary
from workers.types import Grammar, GrammarKind

VOCAB_SIZE = 259
NO_END = AnswerEnd(token_ids=(), min_tokens=0)


class Made:
    """A grammar whose lexer may have so many states, and how often it was compiled."""

    def __init__(
        self, folder: Path, text: str, max_states: int, kind: GrammarKind = GrammarKind.REGEX
    ) -> None:
        tokenizer = byte_tokenizer()
        tokenizer.save_pretrained(folder)
        self._vocabulary = read_vocabulary(folder, VOCAB_SIZE)
        self._source = source_of(Grammar(kind=kind, text=text))
        self._max_states = max_states
        self.count = 0
        self.compiled_s = 0.0  # CPU time, of a clock of its own
        self.ids = {letter: tokenizer.encode(letter)[-1] for letter in "abc"}
        self.grammar = LlguidanceGrammar(self._make, VOCAB_SIZE, 0)

    def _make(self) -> LLMatcher:
        self.count += 1
        self.compiled_s += 1.9
        limits = LLParserLimits(max_lexer_states=self._max_states, verbose_errors=False)
        return LLMatcher(self._vocabulary, self._source, log_level=0, limits=limits)

    def ids_of(self, letters: str) -> list[int]:
        return [self.ids[letter] for letter in letters]

    def allowed(self, state: LlguidanceState, drafts: str = "") -> list[str]:
        """After the state and after each draft, the letters that may follow."""
        state.fill(self.ids_of(drafts))
        rows = [state.bits(number) for number in range(len(drafts) + 1)]
        assert None not in rows
        return [
            "".join(letter for letter, i in self.ids.items() if row and row[i >> 3] >> (i & 7) & 1)
            for row in rows
        ]


def test_a_limit_that_is_reached_while_a_token_is_accepted_is_said_by_the_next_mask(tmp_path: Path) -> None:
    """Whether anything may follow is looked for there when no end id would tell."""
    made = Made(tmp_path, "[ab]*|[ab]*a[ab]{30}c", 25)
    state = made.grammar.begin(NO_END, ())
    for token_id in made.ids_of("abababababab"):
        state.accept(token_id)
    state.fill(())
    with pytest.raises(GrammarFailed, match="after 7 tokens: lexer error: too many states"):
        state.bits(0)
    assert not state.is_complete


# Of the last six letters each combination is a state: 64 and some, of which an answer of eight has a few.
COMBINATIONS, ENOUGH_FOR_ONE = "[ab]*a[ab]{5}c", 40
WORDS = [f"{number:08b}".replace("0", "a").replace("1", "b") for number in range(256)]


def test_states_that_others_have_used_up_are_no_limit(tmp_path: Path) -> None:
    made = Made(tmp_path, COMBINATIONS, ENOUGH_FOR_ONE)
    for word in WORDS:
        state = made.grammar.begin(AnswerEnd(token_ids=(2,), min_tokens=0), ())
        for length, letter in enumerate(word, 1):
            state.accept(made.ids[letter])
            ends = length > 5 and word[length - 6] == "a"
            assert made.allowed(state) == ["abc" if ends else "ab"], word[:length]
        state.accept(made.ids["c"]) if word[2] == "a" else None
        assert state.is_complete is (word[2] == "a"), word
    assert 5 < made.count < 128


def test_a_new_lexer_is_not_at_the_cost_of_the_answer_that_finds_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiling takes 1.9 s here and everything else nothing; an answer has half a second."""
    made = Made(tmp_path, COMBINATIONS, ENOUGH_FOR_ONE)
    monkeypatch.setattr(matching, "time", SimpleNamespace(thread_time=lambda: made.compiled_s))
    for word in WORDS[:64]:
        state = made.grammar.begin(AnswerEnd(token_ids=(2,), min_tokens=0), ())
        for letter in word:
            state.accept(made.ids[letter])
            assert made.allowed(state)[0].startswith("ab")
            assert state.cost_s == 0
    assert made.count > 2


def test_answers_on_their_way_go_on_with_a_new_lexer(tmp_path: Path) -> None:
    """Side by side, each finds the states used up that it had; so do drafts and what others have begun."""
    made = Made(tmp_path, COMBINATIONS, ENOUGH_FOR_ONE)
    states = [made.grammar.begin(AnswerEnd(token_ids=(2,), min_tokens=0), ()) for _ in WORDS]
    for place in range(8):
        for word, state in zip(WORDS, states, strict=True):
            state.accept(made.ids[word[place]])
            assert made.allowed(state)[0].startswith("ab")
    for word in WORDS:
        state = made.grammar.begin(AnswerEnd(token_ids=(2,), min_tokens=0), made.ids_of(word[:4]))
        found = made.allowed(state, word[4:])
        assert ["c" in each for each in found] == [False, False, *(each == "a" for each in word[:3])]
        assert state.num_allowed(made.ids_of("ab")) == 2
    with pytest.raises(GrammarRefused, match="do not fit its grammar"):
        made.grammar.begin(NO_END, made.ids_of("c"))


@pytest.mark.parametrize("guess", ["bb", "aabb"])
def test_guesses_that_lead_to_too_many_states_end_no_answer(tmp_path: Path, guess: str) -> None:
    """Thirty are enough for what it says, and not for what may follow the guesses."""
    made = Made(tmp_path, "[ab]*|[ab]*a[ab]{30}c", 30)
    drafts, failed = made.ids_of(guess), 0
    state = made.grammar.begin(NO_END, ())
    for token_id in made.ids_of("abababababab"):
        num_guessed = state.num_allowed(drafts)
        state.fill(drafts[:num_guessed])
        assert state.bits(0) is not None
        try:
            state.bits(num_guessed)
        except GrammarFailed as error:
            assert "What may follow these guesses was not found." in str(error)
            failed += 1
        state.accept(token_id)
    assert failed == 1
    assert state.num_allowed(drafts) == 0


def test_what_follows_guesses_is_not_at_the_cost_of_the_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mask takes 4 ms here. Ten that are allowed for a token are enough for it and one guess, again and
    again; but not for the masks after eight."""
    made = Made(tmp_path, "[ab]*", 1000)
    masks_s = 0.0

    class Slow(LlguidanceState):
        def _row(self, num_drafts: int) -> bytes | None:
            nonlocal masks_s
            masks_s += 0.004
            return super()._row(num_drafts)

    monkeypatch.setattr(matching, "time", SimpleNamespace(thread_time=lambda: masks_s))
    state = Slow(made.grammar, VOCAB_SIZE, NO_END, (), 0.0)
    for number in range(300):
        drafts = made.ids_of("abababab")
        num_guessed = state.num_allowed(drafts)
        assert num_guessed == (1 if number else 8)
        state.fill(drafts[:num_guessed])
        assert state.bits(num_guessed) is not None
        assert state.cost_s == pytest.approx(0.004)
        state.accept(made.ids["a"])


@pytest.mark.parametrize(
    "text",
    [
        "start: x\nx[max_tokens=5]: /[ab]*/",
        'start: x\nx[stop="c"]: /[ab]*/',
        'start: x\nx[suffix="c"]: /[ab]*/',
    ],
)
def test_grammars_from_whose_guesses_there_is_no_way_back_have_none(tmp_path: Path, text: str) -> None:
    made = Made(tmp_path, text, 1000, GrammarKind.LARK)
    asked, given, plain = (made.grammar.begin(NO_END, ()) for _ in range(3))
    drafts = made.ids_of("ba")
    for token_id in made.ids_of("abab"):
        plain.fill(())
        asked.num_allowed(drafts)
        asked.fill(())
        given.fill(drafts)
        assert asked.bits(0) == given.bits(0) == plain.bits(0)
        for state in (asked, given, plain):
            state.accept(token_id)
    assert given.num_allowed(drafts) == (2 if "suffix" in text else 0)
