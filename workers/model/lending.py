"""What a draft model takes from the model that it makes guesses for, and what it has beside its weights.

Its folder may leave out the embedding, the final norm and the head: then it has those of the model. A tensor
`draft_token_ids` (int32, rising) names the tokens that it guesses at all, the most frequent ones: its head
then computes these rows alone (Zhao et al., "FR-Spec: Accelerating Large-Vocabulary Language Models via
Frequency-Ranked Speculative Sampling", 2025).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from workers.model.architecture import ModelSpec, NormKind
from workers.model.config_fields import ConfigFields
from workers.model.errors import CheckpointError
from workers.model.formats.expected import stem_in
from workers.model.formats.layouts import Layout
from workers.model.safetensors_header import TensorEntry

if TYPE_CHECKING:
    from workers.model.checkpoint import Checkpoint, StoredTensor

DRAFT_TOKEN_IDS = "draft_token_ids"
TARGET_HASH = "target_model_hash"  # in config.json: `Checkpoint.model_hash` of the model it was trained for
_log = logging.getLogger(__name__)


def lent_tensors(
    folder: Path,
    spec: ModelSpec,
    layout: Layout | None,
    own: Mapping[str, StoredTensor],
    lender: Checkpoint,
) -> dict[str, StoredTensor]:
    """What the folder leaves out and `lender` has, by the names that the folder would use. layout: of the
    folder's matrices in few bits.

    Raises CheckpointError when the two have other vocabularies, or other hidden sizes where one is lent, and
    for a matrix that the lender has in few bits.
    """
    if spec.vocab_size != lender.spec.vocab_size:
        raise CheckpointError(
            f"{folder}: vocab_size is {spec.vocab_size}, that of {lender.folder} is "
            f"{lender.spec.vocab_size}: a draft model needs the vocabulary of the model"
        )
    names, prefix = spec.weights, spec.weights.prefix
    if own and not any(name.startswith(prefix) for name in own):
        prefix = ""
    embedding, norm = f"{prefix}{names.embedding}.weight", f"{prefix}{names.final_norm}.weight"
    head = f"{names.head}.weight"
    has_tie = spec.tie_word_embeddings and (embedding in own or head in own)  # one is enough
    entries = {name: stored.entry for name, stored in own.items()}
    found: dict[str, StoredTensor] = {}
    for name, theirs in ((embedding, lender.embedding_name), (head, lender.head_name)):
        if name in own or has_tie or stem_in(name, layout, entries) is not None:
            continue
        if lender.stem(theirs) is not None:
            raise CheckpointError(
                f"{folder} has no {name}, and that of {lender.folder} is stored in few bits, which is not "
                f"lent: a draft model needs {name} of its own there"
            )
        found[name] = lender.tensors[theirs]
    if norm not in own and _norm_of(spec) == _norm_of(lender.spec):
        of_lender = lender.spec.weights
        their_norm = lender.stored_name(f"{of_lender.prefix}{of_lender.final_norm}.weight")
        found[norm] = lender.tensors[their_norm]
        if spec.norm_bias:
            bias = their_norm.removesuffix("weight") + "bias"
            found[norm.removesuffix("weight") + "bias"] = lender.tensors[bias]
    if found and spec.hidden_size != lender.spec.hidden_size:
        raise CheckpointError(
            f"{folder}: hidden_size is {spec.hidden_size}, that of {lender.folder} is "
            f"{lender.spec.hidden_size}: a draft model of another size needs {', '.join(found)} of its own"
        )
    return found


def warn_of_another_target(folder: Path, fields: ConfigFields, model: Checkpoint) -> None:
    """Says so when the folder, whose config `fields` reads, was trained to guess for another model than this
    one. It is no error: answers are the model's own, whatever is guessed, and a copy of the model in fewer
    bits is another one too. Raises CheckpointError for a hash that is no text."""
    if not fields.has(TARGET_HASH):
        return
    trained_for, served = fields.text(TARGET_HASH), model.model_hash()
    if trained_for != served:
        _log.warning(
            "%s was trained to guess for the model with the hash %s, that of %s is %s: guesses will be right "
            "less often",
            folder,
            trained_for[:64],
            model.folder,
            served,
        )


def _norm_of(spec: ModelSpec) -> tuple[NormKind, bool, float]:
    return spec.norm, spec.norm_bias, spec.norm_offset


def problem_with_ids(entry: TensorEntry | None, vocab_size: int) -> str | None:
    """What is wrong with the form of `draft_token_ids`, as the header says it."""
    if entry is None:
        return f"missing {DRAFT_TOKEN_IDS}"
    if entry.dtype != "I32" or len(entry.shape) != 1 or not 1 <= entry.shape[0] <= vocab_size:
        found = f"{entry.dtype} {list(entry.shape)}"
        return f"{DRAFT_TOKEN_IDS} is {found}, it must be I32 with 1 to {vocab_size} ids"
    return None


def check_ids(file: Path, ids: Sequence[int], vocab_size: int) -> None:
    """Raises CheckpointError unless they are token ids in rising order."""
    is_rising = all(before < after for before, after in pairwise(ids))
    if not is_rising or ids[0] < 0 or ids[-1] >= vocab_size:
        raise CheckpointError(
            f"{file}: {DRAFT_TOKEN_IDS} must be token ids from 0 to {vocab_size - 1} in rising order"
        )
