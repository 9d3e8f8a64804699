"""A model folder written anew with its linear weights in few bits, as every start would quantize them.

    FOLDER/                        config.json with a quantization_config, the other small files, weight files
    .FOLDER.tmp-<process id>/      while it is being written; renamed when complete

One pass over the weight files, some rows of a matrix in memory at a time. Layers get the wanted form, the
head that of `Quantization.of_head`; embeddings, norms and biases are copied. A head that is the embedding
gets a quantized copy, as at load.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from workers.kernels import Quantization
from workers.model.checkpoint import Checkpoint
from workers.model.errors import CheckpointError
from workers.model.files import INDEX_FILE, SINGLE_FILE, resolve_inside
from workers.model.formats.declared import SECTION, TANDEM, TANDEM_VERSION
from workers.model.formats.layouts import TandemLayout
from workers.model.weights import WeightReader
from workers.quantizing.jobs import Job, jobs_of, plan_of
from workers.quantizing.matrices import MatrixLoss, MatrixQuantizer
from workers.quantizing.stream_writer import StreamWriter
from workers.regular_file import open_regular

# Beside config and weights: what transformers and the router read of a folder.
_COPIED = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "chat_template.jinja", "added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model", "README.md",
    "LICENSE",
)  # fmt: skip
_COPY_BYTES = 8 << 20

Report = Callable[[str], None]  # receives one line a phase


def quantize_folder(
    checkpoint: Checkpoint, form: Quantization, out: Path, report: Report
) -> list[MatrixLoss]:
    """Writes the folder `out`, which must not exist or be empty. The error of every matrix, in file order.

    Raises CheckpointError for weights that are not finite or not in the range of `form`, FileExistsError, and
    OSError as for a full disk; then nothing is left behind.
    """
    if isinstance(checkpoint.layout, TandemLayout):
        raise CheckpointError(
            f"{checkpoint.folder} is quantized already: give the folder that it was made of"
        )
    check_out(out)
    jobs = jobs_of(checkpoint, form)
    home = out.absolute().parent
    needed = sum(tensor.num_bytes for of_file in jobs.values() for tensor in plan_of(checkpoint, of_file))
    if (free := shutil.disk_usage(home).free) < needed:
        raise OSError(f"{out}: {needed / 1e9:.2f} GB will be written, {free / 1e9:.2f} GB are free there")
    temporary = home / f".{out.name}.tmp-{os.getpid()}"
    temporary.mkdir()
    try:
        _write_small_files(checkpoint, form, temporary)
        errors = _write_weights(checkpoint, jobs, temporary, report)
        temporary.rename(out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return errors


def check_out(out: Path) -> None:
    """Raises FileExistsError or FileNotFoundError for a folder that cannot be made."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise FileExistsError(f"{out} exists and is not an empty folder: name another, or remove it")
    if not out.absolute().parent.is_dir():
        raise FileNotFoundError(f"{out}: there is no folder {out.absolute().parent} to make it in")


def _write_weights(
    checkpoint: Checkpoint, jobs: Mapping[Path, list[Job]], folder: Path, report: Report
) -> list[MatrixLoss]:
    errors: list[MatrixLoss] = []
    weight_map: dict[str, str] = {}
    total = 0
    with WeightReader(checkpoint, torch.float32, torch.device("cpu")) as reader:
        quantizer = MatrixQuantizer(checkpoint, reader)
        for number, (file, of_file) in enumerate(jobs.items(), start=1):
            plan = plan_of(checkpoint, of_file)
            name = SINGLE_FILE if len(jobs) == 1 else f"model-{number:05d}-of-{len(jobs):05d}.safetensors"
            with StreamWriter(folder / name, plan) as writer:
                for job in of_file:
                    report(f"file {number} of {len(jobs)}: {job.entry.name}")
                    if job.copy is not None:
                        _copy(file, job, job.copy, writer)
                    if job.matrix is not None:
                        errors.append(quantizer.write(job.matrix, job.stem, job.form, writer))
            weight_map |= {tensor.name: name for tensor in plan}
            total += sum(tensor.num_bytes for tensor in plan)
    if len(jobs) > 1:
        _write_json(folder / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": weight_map})
    return errors


def _copy(file: Path, job: Job, name: str, writer: StreamWriter) -> None:
    remaining = job.entry.stop - job.entry.start
    with open_regular(file) as source:
        source.seek(job.entry.start)
        while remaining and (part := source.read(min(remaining, _COPY_BYTES))):
            writer.append_bytes(name, part)
            remaining -= len(part)
    if remaining:
        raise CheckpointError(f"{file}: tensor {job.entry.name} has become shorter while it was read")


def _write_small_files(checkpoint: Checkpoint, form: Quantization, folder: Path) -> None:
    section = {
        "quant_method": TANDEM,
        "version": TANDEM_VERSION,
        "layers": form.value,
        "head": form.of_head.value,
    }
    _write_json(folder / "config.json", {**checkpoint.config, SECTION: section})
    for name in _COPIED:
        if (checkpoint.folder / name).exists():
            source = resolve_inside(checkpoint.folder, name)
            with open_regular(source) as stream, (folder / name).open("wb") as target:
                shutil.copyfileobj(stream, target)


def _write_json(file: Path, value: Mapping[str, object]) -> None:
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
