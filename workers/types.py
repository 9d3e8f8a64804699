"""The vocabulary that router, group and engine share: plain frozen data, no dependencies.

These classes also travel between processes (see `workers.data_plane.wire`): only builtin scalars, tuples,
enums and other classes of this file as fields.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, NewType

from workers.hashing import BlockHash

MAX_BEAM_WIDTH = 64  # hypotheses of a beam search
MAX_GRAMMAR_BYTES = 64 << 10
INVALID_GRAMMAR = "invalid_schema"  # code of a grammar that cannot be used
TOO_BUSY = "queue_full"  # code of what would have been done at another time

RequestId = NewType("RequestId", str)
GroupId = NewType("GroupId", str)


class FinishReason(Enum):
    """Why a choice ended."""

    STOP = "stop"  # end-of-sequence id or a stop id; the grammar is complete
    LENGTH = "length"  # max_tokens or the context length
    CANCELLED = "cancelled"  # the client left
    ERROR = "error"  # TokenChunk.error says what


class Role(Enum):
    """What a group does."""

    UNIFIED = "unified"
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen. Ranges are checked by `workers.engine.request.validate`."""

    max_tokens: int  # new tokens per choice; 0 scores the prompt only
    min_tokens: int = 0  # no end id before this many new tokens
    temperature: float = 1.0  # below 1e-5 is greedy
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and output, as in CTRL (Keskar et al. 2019)
    presence_penalty: float = 0.0  # over output
    frequency_penalty: float = 0.0  # over output
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0  # int64; the router draws one when the client gave none
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    num_logprobs: int | None = None  # None: none; 0: the chosen token's; k: and of the k best
    num_prompt_logprobs: int | None = None  # the same for prompt tokens


class EarlyStopping(Enum):
    """When a beam search ends that has as many finished hypotheses as its width."""

    YES = "yes"  # at once
    NO = "no"  # when the best of the others, at its length now, is no better than the worst of them
    NEVER = "never"  # when it could not become better at any length


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamParams:
    """How a beam search goes (`workers.decoding.beam_search`); `num_choices` of a request are its best."""

    width: int  # hypotheses; at least num_choices
    length_penalty: float = 1.0  # a score is the sum of log-probabilities over length ** this
    early_stopping: EarlyStopping = EarlyStopping.NO


class GrammarKind(Enum):
    """What the text of a grammar is."""

    JSON_SCHEMA = "json_schema"  # the schema, as JSON
    REGEX = "regex"  # that the whole answer matches
    CHOICE = "choice"  # a JSON list of texts, one of which is the answer
    LARK = "lark"  # in llguidance's dialect of Lark


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    """What an answer must look like."""

    kind: GrammarKind
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KVSource:
    """A group whose cached blocks are worth reading, and where its rank 0 listens."""

    group_id: GroupId
    host: str
    port: int
    # Of the request by which the source computes the prompt just now; None: it has the blocks or has not.
    transfer_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockOffer:
    """A block that another group may read, valid as long as its generation there stays the same."""

    index: int  # into the hashes that the reader asked for
    block: int  # in the owner's pool
    generation: int


class BlockRead(NamedTuple):
    """A block to copy from another group, and where to."""

    source: int  # block in the owner's pool
    generation: int  # that it has there: another one before or after the copy makes the copy void
    own: int  # block in the reader's pool


@dataclass(frozen=True, slots=True, kw_only=True)
class BegunChoice:
    """A choice that another group has begun: it goes on after these tokens as it would have there."""

    choice: int
    token_ids: tuple[int, ...]  # new tokens so far; none when it has only been accepted there


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """A tokenized prompt to continue, as the router sends it to a group."""

    request_id: RequestId  # made by the router, unique; never a client's id
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    num_choices: int = 1
    beam: BeamParams | None = None  # search for the choices together; None: sample each
    cache_salt: str = ""  # tenant separation of the prefix cache
    priority: int = 0  # lower goes first
    kv_source: KVSource | None = None  # read what this group lacks of the prompt's blocks from there
    # 32 hex digits: readers that name them wait for the blocks of this request.
    transfer_id: str | None = None
    grammar: Grammar | None = None  # that every choice follows
    # Choices to go on with, by number; the others have ended elsewhere. Empty: all, from the start.
    begun: tuple[BegunChoice, ...] = ()

    def choices(self) -> dict[int, tuple[int, ...]]:
        """The choices to compute, each with the tokens that it has already, in order of their numbers."""
        if self.begun:
            return {begun.choice: begun.token_ids for begun in self.begun}
        return dict.fromkeys(range(self.num_choices), ())


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """Log-probability of one token under the raw distribution, with the best alternatives."""

    token_id: int
    logprob: float  # natural log; never -inf or NaN: at least -9999.0
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), best first


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """How long a group had a request before it had its first token, by what it did; seconds of its clock."""

    queue_s: float  # waited for its turn
    transfer_s: float  # waited for blocks of another group
    compute_s: float  # from its admission on


@dataclass(slots=True, kw_only=True)
class TokenChunk:
    """What a group says of one choice after a step: new tokens, and the end when it has come. Nobody changes
    it; it is not frozen, as that would take three times as long for every token.

    A beam search says two things: that its prompt is computed, in a chunk of choice 0 without tokens, and at
    its end all the rest.
    """

    request_id: RequestId
    choice: int
    token_ids: tuple[int, ...] = ()  # includes the end id that stopped the choice
    logprobs: tuple[TokenLogprob, ...] | None = None  # one per token id when asked for
    # Of choice 0 only, once, in its first chunk: entry i belongs to prompt token i, entry 0 is None.
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache; set in the first chunk of a choice
    times: StageTimes | None = None  # in the first chunk of a choice
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None  # the id that stopped it, when STOP; None: its grammar did
    score: float | None = None  # of a beam search: sum of log-probabilities over length ** length_penalty
    error: str | None = None  # sentence for the client, when ERROR
    error_code: str | None = None  # stable code, when ERROR: "engine_dead", "context_length_exceeded", ...


def error_chunk(request_id: RequestId, choice: int, code: str, message: str) -> TokenChunk:
    """The last chunk of a choice that failed."""
    return TokenChunk(
        request_id=request_id,
        choice=choice,
        finish_reason=FinishReason.ERROR,
        error=message,
        error_code=code,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupInfo:
    """What a group is. Constant for one epoch (one start of its ranks)."""

    group_id: GroupId
    epoch: int  # counts starts under one group_id; 1 in a cluster, where a rebuilt group gets a new id
    role: Role
    model: str
    model_hash: str  # of config and samples of all tensors: differs between trainings
    dtype: str
    kv_dtype: str  # of the blocks
    tensor_parallel: int
    vocab_size: int
    max_model_len: int
    block_size: int
    num_blocks: int
    kv_bytes_per_block: int
    context_token_s: float = (
        0.0  # least time in which a decode step reads a token's keys and values; 0: unknown
    )
    exchanges_kv: bool = False  # reads KV blocks of groups of the same model, and lets them read its own
    exchange_problem: str = ""  # why it does not


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupAddress:
    """Where rank 0 of a group listens for routers, as the directory lists it."""

    group_id: GroupId
    replica_id: str  # Serve's name of the replica in front of the group
    host: str
    port: int
    role: Role
    epoch: int
    is_draining: bool = False  # finishes what it has, takes nothing new
    is_leaving: bool = False  # as was asked for, not because it failed


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceReads:
    """What a group has read from one other group in this epoch, for all routers together."""

    group_id: GroupId  # the source
    transport: str = ""  # by which blocks last came; of several, when ranks differ, joined by "+"
    num_open: int = 0  # reads under way
    num_done: int = 0  # that brought all they wanted
    num_failed: int = 0  # that ended before they had it
    num_blocks: int = 0  # that arrived whole
    seconds: float = 0.0  # in which blocks were on their way


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStats:
    """Load and totals of a group after a step. Totals never fall within an epoch."""

    num_running: int = 0  # sequences: a request of n choices counts n times
    num_waiting: int = 0  # likewise
    # Prompt tokens not yet computed, of waiting and running requests, less what other groups are sending.
    waiting_tokens: int = 0
    running_tokens: int = 0  # context tokens of running requests
    free_blocks: int = 0  # never used or evicted
    cached_blocks: int = 0  # reusable by hash, evictable
    active_blocks: int = 0  # held by requests, and by what is read from or by other groups
    num_steps: int = 0
    step_seconds: float = 0.0  # moving mean
    step_seconds_total: float = 0.0
    prompt_tokens_total: int = 0  # of admitted requests
    cached_tokens_total: int = 0  # of those, found in the prefix cache
    remote_tokens_total: int = 0  # of those, in blocks that were read from other groups for the request
    generated_tokens_total: int = 0
    drafted_tokens_total: int = 0  # guesses that were checked
    accepted_tokens_total: int = 0  # of those, the right ones; generated tokens too
    guess_failures_total: int = 0  # steps that went without guesses because making them failed
    guesses_off: int = 0  # 1: nothing is guessed any more, because it failed
    preemptions_total: int = 0
    finished_stop_total: int = 0
    finished_length_total: int = 0
    finished_error_total: int = 0
    cancelled_total: int = 0
    first_tokens_total: int = 0  # answers that have begun here, not in another group before
    first_token_seconds_total: float = 0.0  # of those, from acceptance to the first token
    # KV blocks read from other groups (fetches), and read by them (leases).
    kv_fetches_total: int = 0  # begun
    kv_fetched_tokens_total: int = 0  # of blocks that arrived whole
    kv_fetches_incomplete_total: int = 0  # the source had fewer blocks
    kv_fetches_lost_total: int = 0  # no connection to the source, or it refused
    kv_fetches_stalled_total: int = 0  # no progress for too long
    kv_fetches_void_total: int = 0  # blocks changed or broke on the way
    kv_fetches_no_memory_total: int = 0  # given up for requests that run
    kv_transferring_blocks: int = 0  # being written by a transfer now
    kv_leases: int = 0  # readers of this group's blocks now
    kv_leases_expired_total: int = 0  # of readers that were not heard of any more
    kv_sources: tuple[SourceReads, ...] = ()  # the last few groups that were read from


class BlockEventKind(Enum):
    """What happened to a cached block."""

    STORED = "stored"
    REMOVED = "removed"


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockEvent:
    """One entry of a group's block log. Numbers are consecutive within an epoch, from 1."""

    number: int
    kind: BlockEventKind
    block_hashes: tuple[BlockHash, ...] = ()


class RequestRefused(Exception):
    """A request that cannot be served as it is: the caller's mistake.

    `code` is stable (`context_length_exceeded`, `invalid_value`, ...); `param` names the request field.
    """

    def __init__(self, message: str, *, code: str = "invalid_value", param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.param = param
