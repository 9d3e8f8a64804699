"""What becomes of each tensor of a checkpoint whose linear weights are quantized."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from workers.kernels import Quantization
from workers.model.checkpoint import Checkpoint
from workers.model.errors import CheckpointError
from workers.model.safetensors_header import TensorEntry
from workers.quantizing.matrices import planned_parts
from workers.quantizing.stream_writer import PlannedTensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One tensor of the source: copied, or the first part of a matrix that is quantized, or both."""

    entry: TensorEntry
    copy: str | None = None  # the name of the copy
    matrix: str | None = None  # what a plain checkpoint calls the matrix
    stem: str = ""  # of its parts
    form: Quantization = Quantization.NONE


def jobs_of(checkpoint: Checkpoint, form: Quantization) -> dict[Path, list[Job]]:
    """By file of the source, in their order there. Tensors without effect are left out.

    Raises CheckpointError for matrices in few bits that what is written has as values: embeddings, and those
    that choose experts.
    """
    names = checkpoint.spec.weights
    _check_copied(checkpoint)
    head, embedding = f"{names.head}.weight", f"{checkpoint.prefix}{names.embedding}.weight"
    owners = {part: name for name in _linear(checkpoint) for part in _parts(checkpoint, name)}
    spare = {head, embedding} - {checkpoint.embedding_name} if checkpoint.is_tied else set()
    found: dict[Path, list[Job]] = {}
    begun: set[str] = set()
    # By the model's names: those in the files may be other ones (`WeightNames.renamed`).
    in_order = sorted(checkpoint.tensors.items(), key=lambda item: (item[1].file, item[1].entry.start))
    for name, stored in in_order:
        entry, jobs = stored.entry, found.setdefault(stored.file, [])
        if name in spare or checkpoint.is_idle(name):
            continue
        matrix = owners.get(name)
        # A head that stands for the embedding too is copied under the embedding's name.
        copy = embedding if name == checkpoint.embedding_name else name
        if matrix is None:
            jobs.append(Job(entry=entry, copy=copy))
        elif matrix not in begun:
            begun.add(matrix)
            is_head = matrix == checkpoint.head_name
            jobs.append(
                Job(
                    entry=entry,
                    copy=copy if copy == embedding else None,
                    matrix=matrix,
                    stem=(head if is_head else matrix).removesuffix(".weight"),
                    form=form.of_head if is_head else form,
                )
            )
    return found


def plan_of(checkpoint: Checkpoint, jobs: Sequence[Job]) -> list[PlannedTensor]:
    """The tensors that the jobs of a file write."""
    plan: list[PlannedTensor] = []
    for job in jobs:
        if job.copy is not None:
            plan.append(PlannedTensor(name=job.copy, dtype=job.entry.dtype, shape=job.entry.shape))
        if job.matrix is not None:
            plan += planned_parts(job.stem, checkpoint.matrix_shape(job.matrix), job.form)
    return plan


def _linear(checkpoint: Checkpoint) -> list[str]:
    """The matrices of linear layers and the head, as a plain checkpoint calls them."""
    return [*_linear_of_layers(checkpoint), checkpoint.head_name]


def _linear_of_layers(checkpoint: Checkpoint) -> list[str]:
    """Without what chooses experts: that is never in few bits."""
    names = checkpoint.spec.weights
    return [
        name
        for name, shape in checkpoint.shapes.items()
        if len(shape) == 2 and checkpoint.is_of_layer(name) and not names.is_router(name)
    ]


def _check_copied(checkpoint: Checkpoint) -> None:
    """Raises CheckpointError for a matrix that would be copied as it is, in few bits."""
    quantized = {*_linear_of_layers(checkpoint), f"{checkpoint.spec.weights.head}.weight"}
    for name, shape in checkpoint.shapes.items():
        if len(shape) == 2 and name not in quantized and checkpoint.stem(name) is not None:
            raise CheckpointError(
                f"{checkpoint.folder}: {name} is stored in few bits, which cannot be written: "
                "quantize the folder that it was made of"
            )


def _parts(checkpoint: Checkpoint, name: str) -> list[str]:
    """The tensors that hold a matrix."""
    stem = checkpoint.stem(name)
    if checkpoint.layout is None or stem is None:
        return [name]
    return list(checkpoint.layout.parts(stem, *checkpoint.matrix_shape(name), checkpoint.entries))
