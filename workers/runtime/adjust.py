"""What a request does to the logits before a token is chosen: penalties, bias, forbidden ids."""

from __future__ import annotations

from itertools import chain

import numpy as np
import torch

from workers.engine.step import SampleTask
from workers.types import SamplingParams

_LARGEST = torch.finfo(torch.float32).max


def is_adjusted(task: SampleTask) -> bool:
    """Whether `adjust` would change anything."""
    params = task.params
    return bool(params.repetition_penalty != 1.0 or _has_output_penalty(params) or params.logit_bias) or bool(
        task.forbidden_token_ids or task.allowed is not None
    )


def adjust(row: torch.Tensor, task: SampleTask) -> None:
    """Changes one row of logits (vocabulary,) in place.

    Repetition penalty as in CTRL (Keskar et al. 2019) and transformers: positive logits are divided,
    negative ones multiplied, for every id of prompt and output. Presence and frequency penalty as in OpenAI's
    API, over the output. Then the bias is added; last, ids that are forbidden, or that a grammar does not
    allow, get probability 0. Raises GrammarFailed.
    """
    params = task.params
    if params.repetition_penalty != 1.0:
        written = chain(task.output_token_ids, task.drafts)
        seen = np.unique(np.fromiter(chain(task.prompt_token_ids, written), dtype=np.int64))
        ids = torch.from_numpy(seen).to(row.device)
        scores, penalty = row[ids].double(), params.repetition_penalty
        _put(row, ids, torch.where(scores < 0, scores * penalty, scores / penalty))
    if _has_output_penalty(params) and task.num_new:
        output = np.fromiter(chain(task.output_token_ids, task.drafts), dtype=np.int64)
        distinct, times = np.unique(output, return_counts=True)
        ids = torch.from_numpy(distinct).to(row.device)
        minus = params.presence_penalty + params.frequency_penalty * torch.from_numpy(times)
        _put(row, ids, row[ids] - minus.to(row.device, torch.float32))
    if params.logit_bias:
        ids = torch.tensor([token_id for token_id, _ in params.logit_bias], device=row.device)
        plus = torch.tensor([bias for _, bias in params.logit_bias], dtype=torch.float32, device=row.device)
        _put(row, ids, row[ids] + plus)
    if forbidden := task.forbidden_token_ids:
        row[torch.tensor(list(forbidden), device=row.device)] = float("-inf")
    if task.allowed is not None and (bits := task.allowed.bits(len(task.drafts))) is not None:
        packed = np.frombuffer(bits, dtype=np.uint8)
        allowed = np.unpackbits(packed, count=len(row), bitorder="little").view(np.bool_)
        row[torch.from_numpy(~allowed).to(row.device)] = float("-inf")


def _has_output_penalty(params: SamplingParams) -> bool:
    return params.presence_penalty != 0.0 or params.frequency_penalty != 0.0


def _put(row: torch.Tensor, ids: torch.Tensor, scores: torch.Tensor) -> None:
    """Extreme penalties must not reach infinity: it would make the whole row not a number."""
    row[ids] = scores.clamp(-_LARGEST, _LARGEST).float()
