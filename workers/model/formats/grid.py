"""Weights as codes on a grid: value = scale * (code - zero), scale and zero shared by groups of inputs."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from workers.kernels import QuantizedWeight
from workers.kernels.quantized import GROUP


@dataclass(frozen=True, slots=True, kw_only=True)
class GridWeight:
    """A part of a matrix, (out, in)."""

    codes: torch.Tensor  # (out, in) uint8
    scales: torch.Tensor  # (out, groups), as stored: half precision or more
    zeros: torch.Tensor  # (out, groups) uint8
    group_of: torch.Tensor  # (in,) int64: the group of each input
    bits: int

    def values(self) -> torch.Tensor:
        """(out, in) float32."""
        scales, zeros = self.scales.float()[:, self.group_of], self.zeros.float()[:, self.group_of]
        return (self.codes.float() - zeros).mul_(scales)

    def kept(self) -> QuantizedWeight | None:
        """The same codes in INT4, a group of the file being several of ours; None where that cannot be.

        Scales come over exactly, minima (-scale * zero) as the nearest in half precision: exactly where the
        zero is a power of two, as in symmetric grids, else with an error of at most 1/128 of a step.
        It cannot be with more bits, where inputs that are neighbours belong to different groups, where a rank
        begins inside a group of ours, or with scales that half precision does not hold.
        """
        if self.bits != 4 or (firsts := self._groups_of_32()) is None:
            return None
        scales = self.scales.half()
        minima = (-self.scales.float() * self.zeros.float()).half()
        if not bool((scales.float() == self.scales.float()).all() and minima.isfinite().all()):
            return None
        return QuantizedWeight(
            codes=self.codes, scales=scales[:, firsts].contiguous(), minima=minima[:, firsts].contiguous()
        )

    def _groups_of_32(self) -> torch.Tensor | None:
        """The group of every 32 inputs, (in / 32,), where all of them share one."""
        padding = self.group_of[-1:].expand(-self.group_of.shape[0] % GROUP)
        windows = torch.cat((self.group_of, padding)).view(-1, GROUP)
        return windows[:, 0] if bool((windows == windows[:, :1]).all()) else None
