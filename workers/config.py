"""Configuration of a worker group: frozen leaves of the one typed config tree.

Data only. A YAML key, a `--set` path and an attribute are the same dotted name. Facts that are measured
(number of blocks, addresses) never appear here; they come back in `workers.types.GroupInfo`.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which checkpoint, and in what number format it runs."""

    path: str  # folder in Hugging Face layout
    name: str = ""  # served name; empty: the folder's name
    dtype: str = "auto"  # auto (bfloat16), bfloat16, float32
    # Of linear weights: auto (as the checkpoint has them: codes of 4 bits stay, all else is in dtype), none
    # (all in dtype), int8, int4 (the head: int8); what the checkpoint does not have is made at load
    quantization: str = "auto"
    max_model_len: int | None = None  # longest context; None: what the checkpoint says


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The paged KV pool."""

    block_size: int = 16  # tokens in a block
    dtype: str = "auto"  # of keys and values: auto (the model's), int8 (half the bytes, with a scale a head)
    num_blocks: int | None = None  # None: from free memory, measured at start
    memory_fraction: float = 0.5  # share of the free memory that the pool may take, when measured
    max_bytes: int = 4 << 30  # upper limit of the measured size on CPU, bytes
    prefix_reuse: bool = True  # keep finished blocks for requests with the same beginning


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleConfig:
    """What one step may hold."""

    max_step_tokens: int = 512  # one token budget for prompt chunks and decode rows together
    max_running: int = 128  # sequences with blocks at the same time
    max_prefill_chunk: int | None = None  # most prompt tokens of one request in a step; None: the budget
    max_waiting: int = 2048  # requests that have not begun to run; more are refused
    expected_output_tokens: int = 128  # length that memory is planned for until some requests have ended
    # Plan and start a step while the one before it is computed; None: on a GPU. On a CPU it gains nothing.
    plan_ahead: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """How the ranks of a group work together."""

    tensor_parallel: int = 1
    step_timeout_s: float = 10.0  # a rank silent for longer ends the group
    threads_per_rank: int | None = None  # CPU threads; None: usable cores / ranks of the group on the machine
    device: str = "auto"  # auto, cpu, cuda
    cuda_graphs: bool = True  # decode steps on a GPU are recorded at start and replayed
    symmetric_memory: bool = True  # GPUs of one machine add up over NVLink without NCCL, where they can
    # A GPU computes prompts with FlashInfer, where that is installed: a token's bits then depend on how its
    # prompt was cut, and on most GPUs on what else was in the step. Not beside speculative methods.
    flashinfer: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """Several tokens a step: guesses that the model checks together. Answers are the same as without."""

    # none; prompt_lookup: what came after the same tokens before; lookahead: what the model said to other
    # guesses; draft_model: what a small model says; medusa: what heads on the model's hidden states say
    method: str = "none"
    model: str = ""  # folder of the small model, or of the heads
    max_draft_tokens: int = 8  # most guesses of a sequence in a step; how many pay is measured


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferConfig:
    """KV blocks that groups read from each other instead of computing them."""

    enabled: bool = True  # read those of other groups, and let them read
    transport: str = "auto"  # auto (the fastest between two ranks), memory, process_group, sockets
    heartbeat_s: float = 2.0  # how often readers renew their leases, and sources say that they work on them
    lease_s: float = 10.0  # blocks are kept for a reader that is not heard of for so long
    expect_s: float = 5.0  # that a source waits for the request whose blocks a reader wants
    stall_s: float = 10.0  # a source that says nothing of a lease for so long: the rest is computed here
    silent_s: float = 4.0  # a source that says nothing at all for so long is gone
    timeout_s: float = 5.0  # to connect to a source, and for each next portion of its bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupConfig:
    """One worker group."""

    model: ModelConfig
    cache: CacheConfig = field(default_factory=CacheConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    speculative: SpeculativeConfig = field(default_factory=SpeculativeConfig)
    transfer: TransferConfig = field(default_factory=TransferConfig)
