"""A folder of Medusa heads: `config.json` and `heads.safetensors`, checked against the model they look into.

    config.json         model_type "tandem_medusa", hidden_size, inner_size, num_heads, vocab_size,
                        target_model_hash
    heads.safetensors   heads.{i}.weight (inner, 2 * hidden), heads.{i}.bias (inner,),
                        heads.{i}.out (hidden, inner)
                        draft_token_ids (V',) int32, rising: the tokens that they guess

Head 0 makes of a last hidden state h, behind the final norm, and the token that came after it one that is a
place further on, h + out silu(W [h, token] + b), and the model's own head reads it; head i goes on from what
head i - 1 made and a token that was guessed from that. A token is its row of the model's head with a mean
square of 1; one that is never guessed is zeros. Sources: Cai et al., "Medusa: Simple LLM Inference
Acceleration Framework with Multiple Decoding Heads", 2024; Ankner et al., "Hydra: Sequentially-Dependent
Draft Heads for Medusa Decoding", 2024.
"""

from __future__ import annotations

from pathlib import Path

from workers.model.checkpoint import Checkpoint
from workers.model.config_fields import ConfigFields
from workers.model.errors import CheckpointError
from workers.model.files import read_json, resolve_inside
from workers.model.formats.expected import FLOATS
from workers.model.lending import DRAFT_TOKEN_IDS, problem_with_ids, warn_of_another_target
from workers.model.safetensors_header import read_header

_MODEL_TYPE = "tandem_medusa"
_MAX_HEADS = 64
_MAX_SIZE = 1 << 24


class MedusaFolder:
    """An opened and checked folder; of the tensors only the headers are read.

    Raises CheckpointError from the constructor when it is damaged or does not fit the model.
    """

    def __init__(self, folder: str | Path, model: Checkpoint) -> None:
        self.folder = Path(folder).expanduser()
        if not self.folder.is_dir():
            raise CheckpointError(f"{self.folder}: no such folder of Medusa heads")
        fields = ConfigFields(read_json(self.folder, "config.json"), str(self.folder / "config.json"))
        if (kind := fields.text("model_type")) != _MODEL_TYPE:
            raise CheckpointError(f"{self.folder}: model_type is {kind[:40]!r}, it must be {_MODEL_TYPE!r}")
        self.num_heads = fields.integer("num_heads", high=_MAX_HEADS)
        self.model = model
        for name, ours in (("hidden_size", model.spec.hidden_size), ("vocab_size", model.spec.vocab_size)):
            if (theirs := fields.integer(name, high=_MAX_SIZE)) != ours:
                raise CheckpointError(
                    f"{self.folder}: {name} is {theirs}, that of {model.folder} is {ours}: heads fit the "
                    "model that they were trained with"
                )
        warn_of_another_target(self.folder, fields, model)
        self.file = resolve_inside(self.folder, "heads.safetensors")
        inner = fields.integer("inner_size", high=_MAX_SIZE)
        self._check_tensors(model.spec.hidden_size, inner, model.spec.vocab_size)

    def _check_tensors(self, hidden: int, inner: int, vocab_size: int) -> None:
        tensors = read_header(self.file).tensors
        wanted: dict[str, tuple[int, ...]] = {}
        for i in range(self.num_heads):
            shapes = ((inner, 2 * hidden), (inner,), (hidden, inner))
            wanted |= dict(zip(head_names(i), shapes, strict=True))
        problems = [f"not part of it: {name}" for name in tensors if name not in {*wanted, DRAFT_TOKEN_IDS}]
        for name, shape in wanted.items():
            entry = tensors.get(name)
            if entry is None:
                problems.append(f"missing {name} {list(shape)}")
            elif entry.shape != shape or entry.dtype not in FLOATS:
                found = f"{entry.dtype} {list(entry.shape)}"
                problems.append(f"{name} is {found}, it must be {list(shape)} in {', '.join(FLOATS)}")
        if problem := problem_with_ids(tensors.get(DRAFT_TOKEN_IDS), vocab_size):
            problems.append(problem)
        if problems:
            raise CheckpointError(f"{self.file}: " + "; ".join(problems))


def head_names(head: int) -> tuple[str, str, str]:
    """Of the tensors of a head, in the order of their use."""
    return f"heads.{head}.weight", f"heads.{head}.bias", f"heads.{head}.out"
