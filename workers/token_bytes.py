"""The bytes that each token id stands for, where the tokenizer's decoder works token by token.

Joining these bytes and decoding them as UTF-8 equals the tokenizer's own decoding, except for the one space
that SentencePiece-like decoders drop at the very beginning of a text (`strips_first_space`). That makes
incremental decoding a table look-up: a token never changes the text before it.

Covered: ByteLevel, Metaspace, byte fallback in the Llama manner, and plain concatenation (Fuse). Other
decoders (WordPiece, CTC ...) have no such table.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_META = "▁"  # U+2581, SentencePiece's space


def byte_of_symbol() -> dict[str, int]:
    """GPT-2's table: every byte as a printable character (Radford et al. 2019, `bytes_to_unicode`)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {chr(byte): byte for byte in printable}
    hidden = [byte for byte in range(256) if byte not in set(printable)]
    table.update({chr(256 + i): byte for i, byte in enumerate(hidden)})
    return table


class TokenBytes:
    """Token id -> bytes, filled as ids are asked for. Any thread may read it: it only ever adds entries."""

    def __init__(self, token_of: Callable[[int], str | None], decoder: Mapping[str, Any]) -> None:
        """`token_of` gives a token as the vocabulary has it, None for an unknown id; `decoder` is the
        tokenizer's as tokenizer.json has it, {} for none. Raises ValueError when that does not work token by
        token."""
        self._token_of = token_of
        steps = list(decoder.get("decoders", [decoder]))
        kinds = [step.get("type") for step in steps]
        self._byte_level = byte_of_symbol() if kinds == ["ByteLevel"] else None
        self._byte_fallback = "ByteFallback" in kinds
        self._meta: str | None = None
        self.strips_first_space = False
        for step in steps:
            kind = step.get("type")
            if kind == "Metaspace":
                self._meta = step.get("replacement", _META)
                self.strips_first_space = step.get("prepend_scheme", "always") != "never"
            elif kind == "Replace" and step.get("content") == " " and _META in str(step.get("pattern")):
                self._meta = _META
            elif kind == "Strip" and step.get("content") == " ":
                self.strips_first_space = step.get("start", 0) > 0
            elif kind not in ("ByteLevel", "ByteFallback", "Fuse") or (
                kind == "ByteLevel" and self._byte_level is None
            ):
                raise ValueError(f"decoder step {kind} does not work token by token")
        self._table: dict[int, bytes] = {}

    def __getitem__(self, token_id: int) -> bytes:
        """The bytes of a token, special ones as their text. Empty for an id that the tokenizer does not
        know."""
        found = self._table.get(token_id)
        if found is None:
            found = self._table[token_id] = self._compute(token_id)
        return found

    def _compute(self, token_id: int) -> bytes:
        token = self._token_of(token_id)
        if token is None:
            return b""
        if self._byte_level is not None:
            values = [self._byte_level.get(symbol) for symbol in token]
            known = [value for value in values if value is not None]
            return bytes(known) if len(known) == len(values) else token.encode("utf-8")
        if self._byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        if self._meta is not None:
            token = token.replace(self._meta, " ")
        return token.encode("utf-8")
