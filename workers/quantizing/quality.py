"""How well a model foretells a fixed text: perplexity, exp of the mean negative log-probability of a token.

The text comes with this package, 1,700 tokens of English of several kinds and of Python, written for
it, so that no model has seen it. It is scored in windows that do not overlap, by the engine as it serves.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from tokenizers import Tokenizer

from workers.config import CacheConfig, GroupConfig, ModelConfig
from workers.engine.engine import Engine
from workers.engine.step import GroupFailed
from workers.runtime.launch import LocalGroup
from workers.types import FinishReason, GenerateRequest, RequestId, SamplingParams

PASSAGE = Path(__file__).with_name("passage.txt")
_WINDOW = 512  # tokens


def passage_ids(folder: Path) -> list[int] | None:
    """The text in tokens of the model; None where its folder has no tokenizer.json."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        return None
    return list(Tokenizer.from_file(str(file)).encode(PASSAGE.read_text(encoding="utf-8")).ids)


def perplexity(folder: Path, token_ids: Sequence[int], quantization: str) -> float:
    """Of the model in bfloat16. Raises CheckpointError, GroupFailed and what loading raises."""
    model = ModelConfig(path=str(folder), dtype="bfloat16", quantization=quantization)
    config = GroupConfig(model=model, cache=CacheConfig(prefix_reuse=False))
    with LocalGroup(config) as group:
        limit = min(_WINDOW, group.facts.limits.max_model_len)
        windows = [token_ids[start : start + limit] for start in range(0, len(token_ids), limit)]
        engine = Engine(
            limits=group.facts.limits,
            cache=CacheConfig(block_size=group.facts.block_size, prefix_reuse=False),
            schedule=config.schedule,
            executor=group.executor,
            speculative=config.speculative,
        )
        for number, window in enumerate(windows):
            engine.add(
                GenerateRequest(
                    request_id=RequestId(str(number)),
                    prompt_token_ids=tuple(window),
                    sampling=SamplingParams(max_tokens=0, temperature=0.0, num_prompt_logprobs=0),
                )
            )
        scores = list(_scores(engine))
    return math.exp(-math.fsum(scores) / len(scores))


def _scores(engine: Engine) -> Iterator[float]:
    """Log-probabilities of all tokens that have one before them."""
    while engine.has_work():
        for chunk in engine.step():
            if chunk.finish_reason is FinishReason.ERROR:
                raise GroupFailed(chunk.error or "the request ended in an error")
            yield from (entry.logprob for entry in chunk.prompt_logprobs or () if entry is not None)
