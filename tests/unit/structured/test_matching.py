"""How far an answer has come in a grammar, at the limits of llguidance."""

from __future__ import annotations

from pathlib import Path

import pytest
from llguidance import LLMatcher, LLParserLimits

from tests.models.toy_tokenizers import byte_tokenizer
from workers.engine.grammars import AnswerEnd
from workers.engine.step import GrammarFailed
from workers.structured.matching import LlguidanceGrammar
from workers.structured.source import source_of
from workers.structured.vocabulary import read_vocabulary
from workers.types import Grammar, GrammarKind

VOCAB_SIZE = 259


def test_a_limit_that_is_reached_while_a_token_is_accepted_is_said_by_the_next_mask(tmp_path: Path) -> None:
    """Whether anything may follow is looked for there when no end id would tell."""
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    source = source_of(Grammar(kind=GrammarKind.REGEX, text="[ab]*|[ab]*a[ab]{30}c"))
    limits = LLParserLimits(max_lexer_states=40, verbose_errors=False)
    matcher = LLMatcher(read_vocabulary(tmp_path, VOCAB_SIZE), source, log_level=0, limits=limits)
    state = LlguidanceGrammar(matcher, VOCAB_SIZE, 0.0).begin(AnswerEnd(token_ids=(), min_tokens=0), ())
    for letter in "abababababab":
        state.accept(tokenizer.encode(letter)[-1])
    state.fill(())
    with pytest.raises(GrammarFailed, match="after 12 tokens: lexer error: too many states"):
        state.bits(0)
    assert not state.is_complete
