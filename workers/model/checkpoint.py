"""A model folder in Hugging Face layout: config, end ids, and which tensor lies in which safetensors file.

Opening one reads JSON and headers, and of tensors those alone whose content decides whether they count: two
that may be one, biases that may be zero. All is checked as hostile input. No torch, no pickle, and never code
from the folder. Weights are read by `workers.model.weights`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from workers.model.architecture import ModelSpec
from workers.model.config_fields import ConfigFields
from workers.model.errors import CheckpointError
from workers.model.expected import expected_tensors
from workers.model.files import read_json, read_weight_headers
from workers.model.formats.declared import layout_from_config
from workers.model.formats.expected import expected_parts, problem_with, stem_in
from workers.model.formats.layouts import Entries, Layout
from workers.model.joined_experts import single_matrices
from workers.model.lending import (
    DRAFT_TOKEN_IDS,
    lent_tensors,
    problem_with_ids,
    warn_of_another_target,
)
from workers.model.names import WeightNames
from workers.model.safetensors_header import SafetensorsHeader, TensorEntry
from workers.model.spec import spec_from_config
from workers.regular_file import open_regular
from workers.weight_forms import Quantization, WeightForms

_log = logging.getLogger(__name__)
_MAX_TOKEN_ID = (1 << 31) - 1
_MOST_TOLD = 40  # of differences; a model with experts may miss thousands of tensors
_SAMPLES, _SAMPLE_BYTES = 4, 4096  # of a tensor, for model_hash


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """Where a tensor of the model lies."""

    file: Path
    entry: TensorEntry


class Checkpoint:
    """An opened and checked model folder.

    Raises CheckpointError from the constructor when the folder cannot be served: unsupported or insane
    config, pickle-only weights, a damaged file, tensors missing, left over, doubled or of another shape.
    """

    def __init__(self, folder: str | Path, lender: Checkpoint | None = None) -> None:
        """lender: the model that this one guesses for (`workers.model.lending`); None: it stands alone."""
        self.folder = Path(folder).expanduser()
        if not self.folder.is_dir():
            raise CheckpointError(f"{self.folder}: no such model folder")
        self.config = read_json(self.folder, "config.json")
        if self.config.get("auto_map") is not None:
            _log.warning("%s: auto_map is ignored; code from a model folder never runs", self.folder)
        self.spec: ModelSpec = spec_from_config(self.config)
        self.layout: Layout | None = layout_from_config(self.config)
        self.generation_config = (
            read_json(self.folder, "generation_config.json")
            if (self.folder / "generation_config.json").exists()
            else {}
        )
        self.eos_token_ids = self._end_ids()
        self._headers = read_weight_headers(self.folder)
        own = _collect(self._headers, self.spec.weights)
        self.has_draft_token_ids = lender is not None and DRAFT_TOKEN_IDS in own
        if lender is not None:
            fields = ConfigFields(self.config, str(self.folder / "config.json"))
            warn_of_another_target(self.folder, fields, lender)
        lent = {} if lender is None else lent_tensors(self.folder, self.spec, self.layout, own, lender)
        self.tensors: Mapping[str, StoredTensor] = {**own, **lent}
        self.entries: Entries = {name: stored.entry for name, stored in self.tensors.items()}
        self.prefix = self._stored_prefix()
        # Of all tensors of a plain checkpoint, by their names in the files.
        self.shapes: Mapping[str, tuple[int, ...]] = {
            self.stored_name(name): shape for name, shape in expected_tensors(self.spec).items()
        }
        self.is_tied, self.embedding_name, self.head_name = self._head_and_embedding()
        self._check_tensors()

    @property
    def max_model_len(self) -> int:
        return self.spec.max_model_len

    @property
    def vocab_size(self) -> int:
        return self.spec.vocab_size

    @property
    def files(self) -> list[Path]:
        """That hold tensors."""
        return [header.file for header in self._headers]

    @property
    def weight_bytes(self) -> int:
        """Size of all tensor files."""
        return sum(header.file_bytes for header in self._headers)

    @property
    def kept(self) -> WeightForms | None:
        """The forms in which `quantization: auto` holds what the files have in few bits, of the layers and a
        head; None: plain."""
        return None if self.layout is None else self.layout.kept

    def quantization(self, setting: str) -> str:
        """`ModelConfig.quantization` for this checkpoint: `auto` is `none` where nothing is in few bits."""
        return "none" if setting == "auto" and self.kept is None else setting

    def forms(self, setting: str, dtype: str) -> WeightForms:
        """In which most of the layers and the head are held under `ModelConfig.quantization`, where the model
        computes in `dtype`. In float32 `auto` holds values (`workers.model.loader`)."""
        if setting != "auto":
            return WeightForms.made(Quantization(setting))
        if self.kept is None or dtype == "float32":
            return WeightForms()
        has_head = self.stem(self.head_name) is not None  # mostly it is left out
        return self.kept if has_head else WeightForms(self.kept.layers)

    def stem(self, name: str) -> str | None:
        """Of a matrix that a plain checkpoint has as `name`, where this one stores it in few bits."""
        return stem_in(name, self.layout, self.entries)

    def is_of_layer(self, name: str) -> bool:
        """Whether a tensor, by its name in the files, belongs to one of the layers."""
        names = self.spec.weights
        return name.startswith(self.stored_name(names.prefix + names.layer.partition("{")[0]))

    def is_inputs_first(self, name: str) -> bool:
        """A matrix that lies as (inputs, outputs) where it is plain."""
        return self.spec.weights.inputs_first and self.is_of_layer(name)

    def matrix_shape(self, name: str) -> tuple[int, int]:
        """(outputs, inputs) of a matrix, by its name in the files."""
        first, second = self.shapes[name]
        return (second, first) if self.is_inputs_first(name) else (first, second)

    def is_idle(self, name: str) -> bool:
        """A tensor without effect: old buffers, scales of activations, biases of zero that belong to none."""
        return name not in self._expected and name != DRAFT_TOKEN_IDS

    def model_hash(self, quantization: str = "auto") -> str:
        """Digest of config, tensor headers, file sizes, and four samples of up to 4 KiB of every tensor, from
        its begin to its end: a few MB of most models, 0.3 GB of one with 18,000 tensors of experts. Another
        one for each form of quantized weights (`ModelConfig.quantization`): their keys and values differ.

        Tells trainings of one shape apart, down to a single tensor that was trained; an edit inside a tensor
        that falls between the samples is not seen (`content_hash` sees it).
        """
        digest = sha256((self.folder / "config.json").read_bytes())
        for header in self._headers:
            digest.update(header.file_bytes.to_bytes(8, "little") + header.digest_input)
            with open_regular(header.file) as stream:
                for name in sorted(header.tensors):
                    entry = header.tensors[name]
                    last = max(entry.start, entry.stop - _SAMPLE_BYTES)
                    for part in range(_SAMPLES):
                        stream.seek(entry.start + (last - entry.start) * part // (_SAMPLES - 1))
                        digest.update(stream.read(min(_SAMPLE_BYTES, entry.stop - entry.start)))
        if (form := self.quantization(quantization)) != "none":
            digest.update(form.encode())
        return digest.hexdigest()

    def content_hash(self) -> str:
        """Digest of config and every byte of the weight files; reads all of them."""
        digest = sha256((self.folder / "config.json").read_bytes())
        for header in self._headers:
            with open_regular(header.file) as stream:
                while chunk := stream.read(1 << 20):
                    digest.update(chunk)
        return digest.hexdigest()

    def stored_name(self, name: str) -> str:
        """The name in the files of a tensor that `expected_tensors` calls `name`."""
        prefix = self.spec.weights.prefix
        return self.prefix + name[len(prefix) :] if name.startswith(prefix) else name

    def _end_ids(self) -> tuple[int, ...]:
        """generation_config.json decides where it names end ids, else config.json, as in transformers."""
        for values, where in (
            (self.generation_config, "generation_config.json"),
            (self.config, "config.json"),
        ):
            fields = ConfigFields(values, str(self.folder / where))
            if fields.has("eos_token_id"):
                found = fields.integers("eos_token_id", low=0, high=_MAX_TOKEN_ID)
                inside = tuple(dict.fromkeys(i for i in found if i < self.spec.vocab_size))
                if len(inside) < len(set(found)):
                    _log.warning("%s: end ids beyond the vocabulary are ignored: %s", where, found)
                return inside
        return ()

    def _stored_prefix(self) -> str:
        """Files saved from the bare model carry no prefix."""
        prefix = self.spec.weights.prefix
        return prefix if any(name.startswith(prefix) for name in self.tensors) else ""

    def _head_and_embedding(self) -> tuple[bool, str, str]:
        """(tied, name of the embedding, name of the head), by the rules of transformers 5.

        A tied config is believed when one of the two is missing or both are equal; with two different tensors
        in the files both are used.
        """
        names: WeightNames = self.spec.weights
        embedding = f"{self.prefix}{names.embedding}.weight"
        head = f"{names.head}.weight"
        if not self.spec.tie_word_embeddings:
            return False, embedding, head
        if self.stem(head) is not None:  # a copy of its own, in few bits
            return False, embedding, head
        if head not in self.tensors:
            return True, embedding, embedding
        if embedding not in self.tensors:
            return True, head, head
        if self._same_content(embedding, head):
            return True, embedding, embedding
        _log.warning("%s: tie_word_embeddings is set but %s differs: both are used", self.folder, head)
        return False, embedding, head

    def _same_content(self, first: str, second: str) -> bool:
        a, b = self.tensors[first], self.tensors[second]
        if a.entry.dtype != b.entry.dtype or a.entry.shape != b.entry.shape:
            return False
        with open_regular(a.file) as left, open_regular(b.file) as right:
            left.seek(a.entry.start)
            right.seek(b.entry.start)
            remaining = a.entry.stop - a.entry.start
            while remaining > 0:
                size = min(remaining, 1 << 20)
                if left.read(size) != right.read(size):
                    return False
                remaining -= size
        return True

    def _check_tensors(self) -> None:
        """Compares what the files hold with what the config needs; all differences in one message."""
        wanted = dict(self.shapes)
        if self.is_tied:
            names = self.spec.weights
            tied = {f"{self.prefix}{names.embedding}.weight", f"{names.head}.weight"}
            for name in tied - {self.embedding_name, *self.tensors}:
                wanted.pop(name)
        parts = expected_parts(wanted, self.layout, self.entries, self.is_inputs_first)
        found = (problem_with(name, part, self.entries.get(name)) for name, part in parts.items())
        problems = [problem for problem in found if problem is not None]
        if self.has_draft_token_ids and (
            problem := problem_with_ids(self.tensors[DRAFT_TOKEN_IDS].entry, self.vocab_size)
        ):
            problems.append(problem)
        self._expected = frozenset(parts)
        beside = {DRAFT_TOKEN_IDS} if self.has_draft_token_ids else set()
        for name in self.tensors:
            if name not in parts and name not in beside and not self._may_be_idle(name):
                problems.append(f"not part of this model: {name}")
        if problems:
            told, half = problems, _MOST_TOLD // 2
            if len(problems) > _MOST_TOLD:
                told = [*problems[:half], f"(and {len(problems) - 2 * half} more)", *problems[-half:]]
            raise CheckpointError(
                f"{self.folder}: {len(problems)} differences between config.json and the weight files:\n  "
                + "\n  ".join(told)
            )

    def _may_be_idle(self, name: str) -> bool:
        """A tensor without effect: old buffers, scales of activations, and the biases of zero that AutoGPTQ
        writes for every matrix."""
        if self.spec.weights.is_buffer(name) or (self.layout is not None and self.layout.is_ignored(name)):
            return True
        stem, stored = name.removesuffix(".bias"), self.tensors[name]
        matrix = f"{stem}.weight"
        if stem == name or matrix not in self.shapes or self.stem(matrix) is None:
            return False
        if stored.entry.shape != self.matrix_shape(matrix)[:1]:  # of any size: nothing to read
            return False
        with open_regular(stored.file) as stream:
            stream.seek(stored.entry.start)
            return not any(stream.read(stored.entry.stop - stored.entry.start))


def _collect(headers: list[SafetensorsHeader], names: WeightNames) -> dict[str, StoredTensor]:
    found: dict[str, StoredTensor] = {}
    doubled = []
    for header in headers:
        for stored, whole in header.tensors.items():
            for name, entry in single_matrices(names, names.name_of(stored), whole):
                if name in found:
                    doubled.append(f"{name} in {found[name].file.name} and {header.file.name}")
                found[name] = StoredTensor(file=header.file, entry=entry)
    if doubled:
        raise CheckpointError("tensors stored twice:\n  " + "\n  ".join(doubled))
    return found
