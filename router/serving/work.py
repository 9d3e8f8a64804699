"""A request after every check: token ids, sampling, and how the answer is to be written."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from router.api.auth import Caller
from router.api.structured import AskedGrammar
from router.serving.truncation import Truncation
from router.telemetry.waterfall import PrepareTimes
from workers.types import BeamParams, SamplingParams


class Endpoint(Enum):
    """Which API answers; the value is the prefix of response ids."""

    CHAT = "chatcmpl"
    COMPLETIONS = "cmpl"


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What the groups say of the model they run."""

    vocab_size: int
    max_model_len: int
    model_hash: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One HTTP request, ready for dispatch. Choice c of prompt p has the index p * num_choices + c."""

    endpoint: Endpoint
    id: str  # of the response; each prompt's request id is made from it
    created: int  # Unix seconds
    arrived_at: float  # of the service's clock
    prepare: PrepareTimes  # from then until it was tokenized
    caller: Caller
    limits: ModelLimits
    prompts: tuple[tuple[int, ...], ...]
    sampling: tuple[SamplingParams, ...]  # one per prompt: budgets and drawn seeds differ
    num_choices: int
    num_best: int | None = None  # so many of each prompt's choices are given out, the best; None: all
    beam: BeamParams | None  # the choices are the best of a search; None: each is sampled
    cache_salt: str
    truncation: Truncation | None = None  # what was cut of the prompts; None: they were not to be cut
    stops: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    echo: bool = False
    asked_grammar: AskedGrammar | None = None  # that all answers follow
    num_logprobs: int | None = None  # as in SamplingParams
    return_token_ids: bool = False
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False

    @property
    def num_prompt_tokens(self) -> int:
        """Over all prompts, each once."""
        return sum(map(len, self.prompts))
