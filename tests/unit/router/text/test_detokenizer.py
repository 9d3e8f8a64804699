from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from router.text.detokenizer import detokenizer
from router.text.tokenizer import TextTokenizer
from tests.unit.router.fakes import byte_tokenizer

TEXT = "ok 🦙 żółć 漢字 👩‍🚀 fin"


def decode(tokenizer: TextTokenizer, ids: list[int], prompt: list[int], *, skip: bool = True) -> list[str]:
    decoder = detokenizer(tokenizer, prompt, skip_special_tokens=skip)
    return [*(decoder.add(id) for id in ids), decoder.finish()]


def metaspace() -> TextTokenizer:
    words = ["▁the", "▁cat", "▁sat", "down", "▁!"]
    symbols = ["<s>", "</s>", *words, "▁", *(chr(code) for code in range(33, 127))]
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(symbols)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return TextTokenizer(tokenizer)


def llama_like() -> TextTokenizer:
    symbols = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁hi", "a", "b"]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={symbol: i for i, symbol in enumerate(symbols)},
            merges=[],
            byte_fallback=True,
            unk_token="<unk>",
        )
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return TextTokenizer(tokenizer)


def wordpiece() -> TextTokenizer:
    """A decoder that does not work token by token."""
    symbols = ["[UNK]", "[SEP]", "un", "##aff", "##able", "."]
    tokenizer = Tokenizer(
        models.WordPiece(vocab={symbol: i for i, symbol in enumerate(symbols)}, unk_token="[UNK]")
    )
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(["[UNK]", "[SEP]"])
    return TextTokenizer(tokenizer)


def test_no_half_characters() -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode(TEXT)
    pieces = decode(tokenizer, ids, [5])
    assert "".join(pieces) == TEXT
    assert not any("\ufffd" in piece for piece in pieces)
    for count in range(1, len(ids)):
        cut = "".join(decode(tokenizer, ids[:count], [5]))
        assert cut == tokenizer.decode(ids[:count])
        assert cut.count("\ufffd") <= 1 and "\ufffd" not in cut[:-1]


def test_special_tokens_are_text_only_on_request() -> None:
    tokenizer = byte_tokenizer()
    ids = [75, 1, 75]
    assert "".join(decode(tokenizer, ids, [5])) == tokenizer.decode(ids, skip_special_tokens=True) == "ii"
    assert "".join(decode(tokenizer, ids, [5], skip=False)) == "i</s>i"


def test_prompt_that_ends_inside_a_character() -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode("a🦙b")
    assert "".join(decode(tokenizer, ids[3:], ids[:3])) == "🦙b"


@pytest.mark.parametrize("make", [metaspace, llama_like, wordpiece])
def test_text_continues_the_prompt(make: type[TextTokenizer]) -> None:
    tokenizer: TextTokenizer = make()  # type: ignore[call-arg]
    ids = list(range(2, tokenizer.backend.get_vocab_size()))
    if make is llama_like:  # bytes that are valid UTF-8
        ids = [3 + byte for byte in "é🦙".encode()] + [259, 260, 261, 262]
    whole = tokenizer.decode(ids, skip_special_tokens=True)
    for cut in (1, 2, 3, len(ids) - 1):
        prompt = tokenizer.decode(ids[:cut], skip_special_tokens=True)
        text = "".join(decode(tokenizer, ids[cut:], ids[:cut]))
        if make is llama_like and cut < 7:  # inside a character: the prompt's own decoding has U+FFFD
            assert whole.endswith(text)
        else:
            assert prompt + text == whole
    assert "".join(decode(tokenizer, ids, [])) == whole


def test_first_space_is_kept_after_a_prompt() -> None:
    tokenizer = metaspace()
    assert "".join(decode(tokenizer, [2, 3, 4, 5, 6], tokenizer.encode("Who:"))) == " the cat satdown !"
    assert "".join(decode(tokenizer, [2, 3], [])) == "the cat"


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 258), max_size=30), st.lists(st.integers(3, 258), min_size=1, max_size=4))
def test_any_bytes_decode_as_the_tokenizer_does(ids: list[int], prompt: list[int]) -> None:
    tokenizer = byte_tokenizer()
    prompt[-1] = 75  # a whole character ends the prompt
    text = "".join(decode(tokenizer, ids, prompt))
    whole = tokenizer.decode(prompt + ids, skip_special_tokens=True)
    assert tokenizer.decode(prompt, skip_special_tokens=True) + text == whole
    text.encode("utf-8")  # no surrogates


def test_ids_beyond_the_tokenizer_are_empty() -> None:
    assert decode(byte_tokenizer(), [75, 300], [5]) == ["i", "", ""]
