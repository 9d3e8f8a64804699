"""Rotary position embedding (Su et al. 2021): cosines and sines in float32, for all layers of a step.

Any stretching is only a different vector of frequencies. The table of all positions grows with the longest
context that has been seen, which the decoder bounds by what its KV pool holds: a length that a checkpoint
claims sizes nothing.
"""

from __future__ import annotations

import math

import torch

from workers.kernels import StepBatch, Turn
from workers.model.architecture import RotaryKind, RotarySpec

_FIRST_POSITIONS = 1024  # of the table


class Rotary:
    """One rotary embedding, of all layers that turn alike.

    DYNAMIC and LONGROPE depend on the length of the sequence, with what of it is still to come: so a prompt
    gives transformers' numbers however it is read. A key keeps the frequencies that it was written with. As
    in transformers' `generate`, DYNAMIC lets that be when a sequence grows past the trained length; with
    LONGROPE the engine has all of it computed again there, once (`workers.engine.computed`).
    """

    def __init__(self, spec: RotarySpec, device: torch.device) -> None:
        self._spec = spec
        self._frequencies = frequencies(spec).to(device)  # (dim / 2,), up to the trained length
        self._exponents = _exponents(spec.dim).to(device)  # here: a step that is recorded copies nothing
        self._long_frequencies: torch.Tensor | None = None  # LONGROPE: beyond it
        if spec.kind is RotaryKind.LONGROPE:
            self._long_frequencies = _divided(spec, spec.long_factors).to(device)
        self._num_positions = _FIRST_POSITIONS  # in the table
        self._table = self._turn(torch.arange(_FIRST_POSITIONS, device=device)[:, None] * self._frequencies)

    def table(self, longest_context: int) -> Turn | None:
        """(cos, sin) by position, both (at least `longest_context`, dim / 2), valid for good.

        None where a row turns by more than its position: then only `rows` knows.
        """
        if self._spec.depends_on_length(longest_context):
            return None
        if longest_context > self._num_positions:
            self._num_positions = max(longest_context, 2 * self._num_positions)
            positions = torch.arange(self._num_positions, device=self._frequencies.device)
            self._table = self._turn(positions[:, None] * self._frequencies)
        return self._table

    def rows(self, batch: StepBatch) -> Turn:
        """(cos, sin), both (T, dim / 2) float32."""
        positions = batch.positions[:, None].float()
        if self._spec.depends_on_length(batch.max_length or batch.max_context_len):
            return self._turn(positions * self._frequencies_by_length(batch))
        return self._turn(positions * self._frequencies)

    def _turn(self, angles: torch.Tensor) -> Turn:
        cos, sin = angles.cos(), angles.sin()
        if self._spec.attention_factor != 1.0:
            cos, sin = cos * self._spec.attention_factor, sin * self._spec.attention_factor
        return cos, sin

    def _frequencies_by_length(self, batch: StepBatch) -> torch.Tensor:
        """(T, dim / 2): every row by the length of its sequence."""
        query_lens = batch.query_starts.diff().long()
        each = batch.context_lens if batch.lengths is None else batch.lengths
        lengths = each.long().repeat_interleave(query_lens, output_size=len(batch.positions))
        lengths = lengths[:, None]
        beyond = self._long_frequencies
        if beyond is None:
            beyond = dynamic_frequencies(self._spec, lengths, self._exponents)
        return torch.where(lengths <= self._spec.trained_positions, self._frequencies, beyond)


def frequencies(spec: RotarySpec) -> torch.Tensor:
    """Radians per position of every pair, (dim / 2,) float32; up to the trained length if it matters."""
    plain = 1.0 / (spec.theta ** _exponents(spec.dim))
    if spec.kind is RotaryKind.LINEAR:
        return plain / spec.factor
    if spec.kind is RotaryKind.LLAMA3:
        return _llama3(spec, plain)
    if spec.kind is RotaryKind.YARN:
        return _yarn(spec)
    if spec.kind is RotaryKind.LONGROPE:
        return _divided(spec, spec.short_factors)
    return plain


def dynamic_frequencies(spec: RotarySpec, lengths: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """NTK-aware frequencies for contexts of `lengths` (T, 1) tokens: (T, dim / 2). exponents: 2 i / dim.

    By logarithms: the bits of torch's powers depend on where in a tensor they are, so on the other rows.
    """
    stretch = spec.factor * lengths.double() / spec.trained_positions - (spec.factor - 1)
    log_base = math.log(spec.theta) + stretch.log() * (spec.dim / (spec.dim - 2))
    return (log_base * -exponents).exp().float()


def _divided(spec: RotarySpec, factors: tuple[float, ...]) -> torch.Tensor:
    """factors: what slows down each pair (Ding et al. 2024, equation 2)."""
    return 1.0 / (torch.tensor(factors, dtype=torch.float32) * spec.theta ** _exponents(spec.dim))


def _exponents(dim: int) -> torch.Tensor:
    return torch.arange(0, dim, 2, dtype=torch.float32) / dim


def _llama3(spec: RotarySpec, plain: torch.Tensor) -> torch.Tensor:
    """Wavelengths above trained / low are divided, below trained / high kept, a smooth mix between."""
    wavelengths = 2 * math.pi / plain
    divided = torch.where(
        wavelengths > spec.trained_positions / spec.low_freq_factor, plain / spec.factor, plain
    )
    span = spec.high_freq_factor - spec.low_freq_factor
    smooth = (spec.trained_positions / wavelengths - spec.low_freq_factor) / span
    mixed = (1 - smooth) * divided / spec.factor + smooth * divided
    is_short = wavelengths < spec.trained_positions / spec.high_freq_factor
    is_long = wavelengths > spec.trained_positions / spec.low_freq_factor
    return torch.where(is_short | is_long, divided, mixed)


def _yarn(spec: RotarySpec) -> torch.Tensor:
    """Dimensions that turn often are kept, those that turn rarely divided, a ramp between (section 3.2)."""

    def dimension_of(rotations: float) -> float:
        turns = spec.trained_positions / (rotations * 2 * math.pi)
        return spec.dim * math.log(turns) / (2 * math.log(spec.theta))

    low, high = dimension_of(spec.beta_fast), dimension_of(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(spec.dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp
    wavelengths = spec.theta ** _exponents(spec.dim)
    return (1.0 / (spec.factor * wavelengths)) * (1 - kept) + (1.0 / wavelengths) * kept
