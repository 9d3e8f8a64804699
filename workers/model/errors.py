"""What can be wrong with a checkpoint or with the way it is to be split."""

from __future__ import annotations


class CheckpointError(Exception):
    """A model folder that cannot be served as it is. The message names file, tensor or key."""


class TensorParallelError(ValueError):
    """A group size that this model cannot be split into. The message lists the sizes that work."""
