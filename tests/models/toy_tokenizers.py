"""Small tokenizers with known ids, for checkpoints that are served over HTTP."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

BOS, EOS, EOT = "<s>", "</s>", "<eot>"
SPECIALS = (BOS, EOS, EOT)  # ids 0, 1, 2 in every tokenizer of this file

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}<eot>"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


def byte_tokenizer(chat_template: str | None = CHAT_TEMPLATE) -> PreTrainedTokenizerFast:
    """BYTETOK: one token a byte, no merges, 259 ids. Every non-ASCII character is 2 to 4 tokens."""
    symbols = [*SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(symbols)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _wrap(tokenizer, chat_template)


def ascii_tokenizer(
    chat_template: str | None = CHAT_TEMPLATE, *, adds_bos: bool = True
) -> PreTrainedTokenizerFast:
    """One token a printable ASCII character, 98 ids: fits the 128 of the tiny models.

    With `adds_bos` its post-processor writes <s> before every text, as Llama's does, while the chat template
    writes it too: a server that does both has it twice.
    """
    symbols = [*SPECIALS, *(chr(code) for code in range(32, 127))]
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(symbols)}, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, 0)]
        )
    return _wrap(tokenizer, chat_template)


def metaspace_tokenizer(chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """SentencePiece-like: spaces are ▁, and decoding a text drops its first space.

    Words `▁the ▁cat ▁sat down ▁!` have ids 3 to 7 (reached by id only: there are no merges).
    """
    words = ["▁the", "▁cat", "▁sat", "down", "▁!"]
    characters = ["▁", *(chr(code) for code in range(33, 127))]
    symbols = [*SPECIALS, *words, *characters]
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(symbols)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return _wrap(tokenizer, chat_template)


def _wrap(tokenizer: Tokenizer, chat_template: str | None) -> PreTrainedTokenizerFast:
    tokenizer.add_special_tokens([AddedToken(symbol, special=True, normalized=False) for symbol in SPECIALS])
    wrapped = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]  # transformers'
        tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, clean_up_tokenization_spaces=False
    )
    wrapped.chat_template = chat_template
    return wrapped
