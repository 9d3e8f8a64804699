"""Weights as codes on a grid: value = scale * (code - zero), scale and zero shared by groups of inputs."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from workers.kernels import QuantizedWeight
from workers.weight_forms import GROUP

_LARGEST_ZERO = 15  # of 4 bits


@dataclass(frozen=True, slots=True, kw_only=True)
class GridWeight:
    """A part of a matrix, (out, in)."""

    codes: torch.Tensor  # (out, in) uint8
    scales: torch.Tensor  # (out, groups), as stored: half precision or more
    zeros: torch.Tensor  # (out, groups) uint8
    group_of: torch.Tensor  # (in,) int64: the group of each input
    first_input: int  # of the part, in the matrix
    can_keep: bool  # whether INT4 holds the whole matrix: see `can_keep` below

    def values(self) -> torch.Tensor:
        """(out, in) float32."""
        scales, zeros = self.scales.float()[:, self.group_of], self.zeros.float()[:, self.group_of]
        return (self.codes.float() - zeros).mul_(scales)

    def kept(self) -> QuantizedWeight | None:
        """The same codes in INT4, a group of the file being several of ours; None where that cannot be.

        Scales come over exactly, minima (-scale * zero) as the nearest in half precision: exactly where the
        zero is a power of two, as in symmetric grids, else with an error of at most 1/128 of a step.
        """
        if not self.can_keep:
            return None
        offset = self.first_input % GROUP
        firsts = self.group_of[[max(0, at - offset) for at in range(0, offset + len(self.group_of), GROUP)]]
        minima = (-self.scales.float() * self.zeros.float()).half()
        return QuantizedWeight(
            codes=self.codes,
            scales=self.scales.half()[:, firsts].contiguous(),
            minima=minima[:, firsts].contiguous(),
            offset=offset,
        )


def can_keep(scales: torch.Tensor, group_of: torch.Tensor, bits: int) -> bool:
    """Whether INT4 holds a matrix with these scales, of any shape, and groups of its inputs, (in,).

    It does not with more bits, where inputs that are neighbours belong to different groups, or with scales
    that half precision does not hold. Asked of the whole matrix, so that all ranks hold their parts alike.
    """
    padded = torch.cat((group_of, group_of[-1:].expand(-len(group_of) % GROUP))).view(-1, GROUP)
    lowest = scales.float().abs().amax() * _LARGEST_ZERO
    return (
        bits == 4
        and bool((padded == padded[:, :1]).all())
        and bool((scales.half().float() == scales.float()).all())
        and bool(lowest.half().isfinite())
    )
