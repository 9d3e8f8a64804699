"""What the toy model must give for prompts' log-probabilities and beam searches, computed without blocks."""

from __future__ import annotations

from collections.abc import Sequence

from tests.unit.engine.toy_model import candidates_of, contents_of, score_of
from workers.decoding.beam_search import BeamSearch, Hypothesis
from workers.engine.step import SampleTask
from workers.types import GenerateRequest, TokenLogprob


def reference_search(request: GenerateRequest, eos: Sequence[int] = ()) -> list[Hypothesis]:
    """What a beam search must give, best first: every hypothesis computed anew for each token."""
    assert request.beam is not None
    sampling = request.sampling
    ends = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else set(eos))
    search = BeamSearch(request.beam, max_tokens=sampling.max_tokens, end_ids=ends)
    while not search.is_over:
        tasks = [
            SampleTask(
                params=sampling,
                choice=0,
                prompt_token_ids=request.prompt_token_ids,
                output_token_ids=hypothesis.token_ids,
                end_token_ids=sorted(ends),
                num_candidates=search.num_candidates,
            )
            for hypothesis in search.hypotheses
        ]
        search.advance(
            [
                candidates_of(contents_of((*task.prompt_token_ids, *task.output_token_ids)), task)
                for task in tasks
            ]
        )
    return list(search.finished[: request.num_choices])


def reference_scores(request: GenerateRequest) -> tuple[TokenLogprob | None, ...]:
    contents = contents_of(request.prompt_token_ids)
    scores = (score_of(contents[:i], token) for i, token in enumerate(request.prompt_token_ids) if i)
    return (None, *scores)
