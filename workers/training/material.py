"""Everything that a training needs: the target's texts, states and head, and the draft vocabulary.

The draft vocabulary is the part of the vocabulary that guesses are made of: the tokens that are most frequent
in the self-written text, filled up with those that are frequent anywhere (the idea: Zhao et al., "FR-Spec:
Accelerating Large-Vocabulary Language Models via Frequency-Ranked Speculative Sampling", 2025). Reading its
rows of the head instead of all is what makes a guess cheap. Tokens beside it are never guessed.

What is learnt is the target's distribution, cut to its few most likely tokens in the draft vocabulary, rather
than the one token that it said (Zhou et al., "DistillSpec", 2023): each place of the text tells more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open

from workers.model.checkpoint import Checkpoint
from workers.progress import Progress
from workers.training.prompts import Part, make_prompts
from workers.training.states import read_or_compute_states, row_starts
from workers.training.writing import Header, Text, write_texts

NUM_LIKELY = 8  # tokens of a distribution that are kept
_SEEN = 3  # times, for a count to tell how frequent a token is
_CHUNK = 2048  # rows of the head's product at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Which text is written, and how much of the vocabulary is guessed."""

    folder: Path  # of the target
    work: Path  # where text and states are kept
    seed: int
    num_prompts: int  # made from templates
    num_asked: int  # times that the model is asked for a prompt
    max_tokens: int
    vocabulary: int  # tokens of the draft vocabulary
    threads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Lessons:
    """What there is to learn at each row of the states."""

    places: torch.Tensor  # (rows, NUM_LIKELY) int64: likely tokens, as places in the draft vocabulary
    shares: torch.Tensor  # (rows, NUM_LIKELY) float32: their probabilities; a row adds up to 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Material:
    """Of one target. Rows belong to answer tokens, as `workers.training.states` has them."""

    target_hash: str  # `Checkpoint.model_hash`
    target_bytes: int  # of its weights
    texts: Sequence[Text]
    starts: Sequence[int]  # the first row of each text, and the number of rows
    states: torch.Tensor  # (rows, hidden) bfloat16
    draft_token_ids: torch.Tensor  # (V',) int64, ascending
    head: torch.Tensor  # (V', hidden) bfloat16: rows of the target's head
    embedding: torch.Tensor  # (V, hidden) bfloat16
    answers: torch.Tensor  # (rows,) int64: the token of each row, as its place in the draft vocabulary, or -1

    def of(self, part: Part) -> list[int]:
        """Numbers of the texts of a part."""
        return [number for number, text in enumerate(self.texts) if text.part is part]

    @property
    def evaluated(self) -> list[Part]:
        """Parts that are not trained on; of few prompts none is held out."""
        return [part for part in (Part.HELD_OUT, Part.QUESTIONS) if self.of(part)]

    def rows_of(self, part: Part) -> torch.Tensor:
        """Rows of the texts of a part."""
        spans = [torch.arange(self.starts[number], self.starts[number + 1]) for number in self.of(part)]
        return torch.cat(spans) if spans else torch.empty(0, dtype=torch.long)

    def coverage(self, part: Part) -> float:
        """Share of the answer tokens of a part that are in the draft vocabulary."""
        rows = self.rows_of(part)
        return float((self.answers[rows] >= 0).double().mean()) if len(rows) else 1.0


def prepare(plan: Plan, progress: Progress) -> Material:
    """Writes and computes what is not there yet. Raises CheckpointError, TextError, ValueError, OSError."""
    checkpoint = Checkpoint(plan.folder)
    target_hash = checkpoint.model_hash()
    plan.work.mkdir(parents=True, exist_ok=True)
    header = Header(
        target_hash=target_hash,
        seed=plan.seed,
        count=plan.num_prompts,
        asked=plan.num_asked,
        max_tokens=plan.max_tokens,
    )
    texts = write_texts(
        plan.work / "text.jsonl",
        header,
        make_prompts(plan.num_prompts, plan.seed),
        folder=plan.folder,
        threads=plan.threads,
        progress=progress,
    )
    states = read_or_compute_states(
        plan.work / "states.safetensors", texts, folder=plan.folder, progress=progress
    )
    embedding = _tensor(checkpoint, checkpoint.embedding_name)
    head = embedding if checkpoint.is_tied else _tensor(checkpoint, checkpoint.head_name)
    draft_token_ids = frequent_tokens(texts, plan.vocabulary, checkpoint.vocab_size)
    place = torch.full((len(head),), -1)
    place[draft_token_ids] = torch.arange(len(draft_token_ids))
    return Material(
        target_hash=target_hash,
        target_bytes=checkpoint.weight_bytes,
        texts=texts,
        starts=row_starts(texts),
        states=states,
        draft_token_ids=draft_token_ids,
        head=head[draft_token_ids].contiguous(),
        embedding=embedding,
        answers=place[torch.tensor([token_id for text in texts for token_id in text.answer_ids])],
    )


def frequent_tokens(texts: Sequence[Text], count: int, vocab_size: int) -> torch.Tensor:
    """Ids of `count` tokens, ascending; of all when there are fewer.

    Those that are most frequent in the answers of the training texts. How frequent a rare token is, a small
    text does not tell: behind those that came at least _SEEN times, and between equals, the smaller id comes
    first, which a tokenizer made earlier, for being the more frequent where it was made."""
    counts = Counter(token_id for text in texts if text.part is Part.TRAINING for token_id in text.answer_ids)
    seen = sorted((-number, token_id) for token_id, number in counts.items() if number >= _SEEN)
    ranked = dict.fromkeys([*(token_id for _, token_id in seen), *range(vocab_size)])
    return torch.tensor(sorted(list(ranked)[:count]))


def lessons_of(material: Material) -> Lessons:
    """From the states, once for the whole training."""
    places, shares = [], []
    with torch.inference_mode():
        for rows in torch.split(material.states, _CHUNK):
            logits = (rows @ material.head.T).float()
            likely, where = logits.topk(min(NUM_LIKELY, logits.shape[1]))
            places.append(where)
            shares.append(likely.softmax(dim=1))
    return Lessons(places=torch.cat(places), shares=torch.cat(shares))


def _tensor(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    with safe_open(checkpoint.tensors[name].file, framework="pt") as stored:
        found: torch.Tensor = stored.get_tensor(name)
        return found.to(torch.bfloat16)
