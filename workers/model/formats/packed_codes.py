"""Codes of 4 or 8 bits out of the integers that hold several of them."""

from __future__ import annotations

import torch

AWQ_NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)  # where each of eight outputs lies, in nibbles from the lowest


def unpack_columns(packed: torch.Tensor, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """packed (n, m) int32 -> (n, m * 32 / bits) uint8; order: the place of each code in its integer."""
    places = torch.tensor(order if order is not None else range(32 // bits), dtype=torch.int32)
    codes = (packed[:, :, None] >> (places * bits)) & ((1 << bits) - 1)
    return codes.to(torch.uint8).flatten(1)


def unpack_rows(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """packed (n, m) int32 -> (n * 32 / bits, m) uint8."""
    shifts = torch.arange(32 // bits, dtype=torch.int32) * bits
    codes = (packed[:, None, :] >> shifts[:, None]) & ((1 << bits) - 1)
    return codes.to(torch.uint8).flatten(0, 1)


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """codes (n, m) uint8, 0..15 -> (n, ceil(m / 2)) uint8, the first of each pair in the lower half."""
    if codes.shape[1] % 2:
        codes = torch.cat((codes, codes.new_zeros(codes.shape[0], 1)), dim=1)
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


def unpack_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """packed (n, m) uint8 -> (n, 2 m) uint8, 0..15."""
    return torch.stack((packed & 15, packed >> 4), dim=2).flatten(1)


def touching(span: range, per: int) -> range:
    """The integers that hold the codes of `span`."""
    return range(span.start // per, -(-span.stop // per))


def inside(span: range, per: int) -> slice:
    """Where `span` lies in the codes of `touching(span, per)`."""
    first = span.start // per * per
    return slice(span.start - first, span.stop - first)
