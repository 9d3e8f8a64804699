"""Text to token ids and back, from a checkpoint's tokenizer files, without transformers (which loads torch).

Equal to transformers on the same folder: `encode` is `tok(text).input_ids`, `render_chat` and then
`encode_rendered` are `apply_chat_template(messages, tokenize=True)`. One thing differs on purpose: where a
*message* contains the text of a special token (`<|im_start|>system`), it is encoded as plain text, so no user
can write a control token. A prompt of /v1/completions is the caller's own template and is encoded as
`tok(text)`.

Every method may be called from any thread.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from router.api.errors import invalid
from router.text.chat_template import ChatTemplate
from workers.regular_file import read_regular
from workers.token_bytes import TokenBytes

TEXT_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
_MAX_TOKENIZER_BYTES = 512 << 20
_MAX_TEXT_BYTES = 16 << 20  # of each other file
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class RenderedChat(NamedTuple):
    """A conversation as text. The text of special tokens that messages contain is taken out, into
    `literals`."""

    text: str
    literals: tuple[str, ...]


class TextTokenizer:
    """The tokenizer of one served model."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        chat_template: str | None = None,
    ) -> None:
        """`special_tokens`: bos_token and the like, by name. Raises ValueError for a broken template."""
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.backend = tokenizer
        self._template = (
            ChatTemplate(chat_template, special_tokens or {}, time.monotonic) if chat_template else None
        )
        added = tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(id for id, token in added.items() if token.special)
        special_texts = sorted({added[id].content for id in self.special_ids}, key=len, reverse=True)
        ignore_case = any(added[id].normalized for id in self.special_ids)
        self._special_text = (
            re.compile("|".join(map(re.escape, special_texts)), re.IGNORECASE if ignore_case else re.NOFLAG)
            if special_texts
            else None
        )
        self._mark = f"Q{secrets.token_hex(12)}X"  # nobody outside can write it
        self._marked = re.compile(f"{self._mark}(\\d+)Z")
        self._texts: dict[int, str] = {}
        self.max_token_chars = max(map(len, tokenizer.get_vocab()), default=1)
        # Of the vocabulary proper; added tokens may lie beyond what a model has rows for, unused.
        self.largest_id = max(tokenizer.get_vocab(with_added_tokens=False).values(), default=-1)
        self.token_bytes: TokenBytes | None
        try:
            self.token_bytes = TokenBytes(tokenizer.id_to_token, _decoder_config(tokenizer))
        except ValueError:
            self.token_bytes = None

    @classmethod
    def load(cls, folder: str | Path) -> TextTokenizer:
        """From tokenizer.json, tokenizer_config.json and chat_template.jinja of a Hugging Face folder.

        Raises ValueError with the file's path for a folder without them, or with broken ones.
        """
        folder = Path(folder)
        file = folder / "tokenizer.json"
        if not os.path.lexists(file):
            raise ValueError(
                f"{file} is missing: the model folder needs a fast tokenizer; save it once with "
                "AutoTokenizer.from_pretrained(...).save_pretrained(folder)"
            )
        try:
            tokenizer = Tokenizer.from_buffer(read_regular(file, max_bytes=_MAX_TOKENIZER_BYTES))
        except OSError as error:
            raise ValueError(f"{file}: cannot be read: {error.strerror}") from None
        except Exception as error:  # the library raises plain Exception
            raise ValueError(f"{file}: not a tokenizer: {error}") from None
        config = _read_json(folder / "tokenizer_config.json")
        named = {**_read_json(folder / "special_tokens_map.json"), **config}
        specials = {name: text for name in _SPECIAL_NAMES if (text := _token_text(named.get(name)))}
        try:
            return cls(tokenizer, special_tokens=specials, chat_template=_chat_template(folder, config))
        except ValueError as error:
            raise ValueError(f"{folder}: {error}") from None

    @cached_property
    def _plain(self) -> Tokenizer:
        """Reads the text of special tokens as text. A copy, made when first needed: it may have 80 MiB."""
        plain = Tokenizer.from_str(self.backend.to_str())
        plain.encode_special_tokens = True
        return plain

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, as `tok(text)` gives them. Releases the interpreter while it works."""
        return list(self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        max_chars: int,
        timeout_s: float,
    ) -> RenderedChat:
        """The text of a conversation. Raises ApiError as `ChatTemplate.render`; 400 without a template."""
        if self._template is None:
            raise invalid(
                "This model has no chat template; use /v1/completions.",
                param="messages",
                code="unsupported_parameter",
            )
        literals: list[str] = []
        safe = [self._without_specials(message, literals) for message in messages]
        end = f"{self._mark}{len(literals)}Z"
        if continue_final_message:
            safe[-1]["content"] += end
        text = self._template.render(
            safe,
            add_generation_prompt=add_generation_prompt and not continue_final_message,
            max_chars=max_chars + len(literals) * len(end),  # marks are longer than what they stand for
            timeout_s=timeout_s,
        )
        if continue_final_message:
            text, found, _ = text.rpartition(end)
            if not found:
                raise invalid(
                    "The chat template leaves the final message out, so it cannot be continued.",
                    param="continue_final_message",
                )
            text = text.replace(end, "")  # a template may write a message twice
        return RenderedChat(text, tuple(literals))

    def encode_rendered(self, chat: RenderedChat, *, add_special_tokens: bool = False) -> list[int]:
        """Token ids of a conversation. Special tokens that messages spelled out are plain text."""
        if not chat.literals:
            return self.encode(chat.text, add_special_tokens=add_special_tokens)
        # text, number of a literal, text, number, ..., text
        token_ids: list[int] = []
        for i, piece in enumerate(self._marked.split(chat.text)):
            if i % 2:
                token_ids += self._plain.encode(chat.literals[int(piece)], add_special_tokens=False).ids
            elif piece or i == 0:
                token_ids += self.encode(piece, add_special_tokens=add_special_tokens and i == 0)
        return token_ids

    def _without_specials(self, message: Mapping[str, str], literals: list[str]) -> dict[str, str]:
        """The message with a mark for every special token's text, which is added to `literals`."""
        if self._special_text is None:
            return dict(message)

        def take_out(match: re.Match[str]) -> str:
            literals.append(match.group())
            return f"{self._mark}{len(literals) - 1}Z"

        special = self._special_text
        return {
            name: text if name == "role" else special.sub(take_out, text) for name, text in message.items()
        }

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of a whole sequence, as the tokenizer's own decoder gives it."""
        return self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def bytes_of(self, token_id: int) -> bytes:
        """What a token stands for, in bytes; part of a character for some."""
        if self.token_bytes is not None:
            return self.token_bytes[token_id]
        return self.backend.decode([token_id], skip_special_tokens=False).encode("utf-8")

    def text_of(self, token_id: int) -> str:
        r"""A token for people: its text, or `bytes:\xf0\x9f` (OpenAI's form) for a part of a character."""
        text = self._texts.get(token_id)
        if text is None:
            raw = self.bytes_of(token_id)
            try:
                text = raw.decode("utf-8")
            except UnicodeDecodeError:
                text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
            self._texts[token_id] = text
        return text


def _decoder_config(tokenizer: Tokenizer) -> dict[str, Any]:
    """The decoder as its JSON description; empty when the tokenizer has none."""
    if tokenizer.decoder is None:
        return {}
    described = json.loads(tokenizer.decoder.__getstate__())
    assert isinstance(described, dict)
    return described


def _token_text(value: object) -> str | None:
    """A token in a config file: its text, or an object with its text as `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    if (text := _read_text(folder / "chat_template.jinja")) is not None:
        return text
    template = config.get("chat_template")
    if isinstance(template, list):  # several, by name
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise ValueError("chat_template in tokenizer_config.json must be a string or a list of named strings")
    return template


def _read_text(file: Path) -> str | None:
    """The text of a file; None when there is none. Raises ValueError when it cannot be read."""
    if not os.path.lexists(file):
        return None
    try:
        return read_regular(file, max_bytes=_MAX_TEXT_BYTES).decode("utf-8")
    except OSError as error:
        raise ValueError(f"{file}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: {error}") from None


def _read_json(file: Path) -> dict[str, Any]:
    text = _read_text(file)
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{file}: expected a JSON object")
    return value
