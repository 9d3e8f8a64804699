"""What the target computes along its answers: the hidden state from which each token of an answer came.

    prompt   p p p p
    answer           a b c d
    state          h h h h       row j of a text: after the final norm, and `head @ row` says its token j

One causal forward pass per batch of texts of about one length, by transformers in bfloat16. The rows of all
texts lie behind one another, in the order of the texts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import AutoModel

from workers.progress import Progress
from workers.training.writing import Text

_BATCH_TOKENS = 4096
_NAME, _KEY = "states", "texts_sha256"


def read_or_compute_states(
    file: Path, texts: Sequence[Text], *, folder: Path, progress: Progress
) -> torch.Tensor:
    """(answer tokens of all texts, hidden) in bfloat16: from the file when it belongs to these texts, else
    from the model in `folder`, and then the file has them. Raises OSError and what loading a model raises."""
    key = _digest(texts)
    if (found := _stored(file, key)) is not None:
        return found
    progress.start("loading the target")
    model = AutoModel.from_pretrained(
        folder, dtype=torch.bfloat16, local_files_only=True, trust_remote_code=False
    )
    states = compute_states(model, texts, progress)
    save_file({_NAME: states}, file, metadata={_KEY: key})
    return states


def compute_states(model: torch.nn.Module, texts: Sequence[Text], progress: Progress) -> torch.Tensor:
    """(answer tokens of all texts, hidden), by transformers' bare model."""
    starts = row_starts(texts)
    order = sorted(range(len(texts)), key=lambda index: len(_ids(texts[index])))
    states: torch.Tensor | None = None
    done = 0
    with torch.inference_mode():
        while done < len(order):
            longest = len(_ids(texts[order[min(done + 31, len(order) - 1)]]))
            batch = order[done : done + min(32, max(1, _BATCH_TOKENS // longest))]
            hidden = model(input_ids=padded([_ids(texts[index]) for index in batch]), use_cache=False)[0]
            if states is None:
                states = torch.empty(starts[-1], hidden.shape[2], dtype=torch.bfloat16)
            for row, index in enumerate(batch):
                first = len(texts[index].prompt_ids) - 1
                last = first + len(texts[index].answer_ids)
                states[starts[index] : starts[index + 1]] = hidden[row, first:last]
            done += len(batch)
            progress.start(f"hidden states: {done} of {len(order)} texts")
    assert states is not None, "no texts"
    return states


def row_starts(texts: Sequence[Text]) -> list[int]:
    """The first row of each text, and the number of rows."""
    starts = [0]
    for text in texts:
        starts.append(starts[-1] + len(text.answer_ids))
    return starts


def padded(rows: Sequence[Sequence[int]]) -> torch.Tensor:
    """(texts, longest): token ids, 0 behind the end, which nothing before it looks at."""
    ids = torch.zeros(len(rows), max(len(row) for row in rows), dtype=torch.long)
    for number, row in enumerate(rows):
        ids[number, : len(row)] = torch.tensor(row)
    return ids


def _stored(file: Path, key: str) -> torch.Tensor | None:
    """None when there is no file, it belongs to other texts, or its writing was interrupted."""
    try:
        with safe_open(file, framework="pt") as stored:
            if (stored.metadata() or {}).get(_KEY) == key:
                found: torch.Tensor = stored.get_tensor(_NAME)
                return found
    except (FileNotFoundError, SafetensorError):
        pass
    return None


def _ids(text: Text) -> tuple[int, ...]:
    """What the model has read when it says the last token of the answer."""
    return (*text.prompt_ids, *text.answer_ids[:-1])


def _digest(texts: Sequence[Text]) -> str:
    digest = hashlib.sha256()
    for text in texts:
        digest.update(repr((text.prompt_ids, text.answer_ids)).encode())
    return digest.hexdigest()
