"""The one typed config tree. A YAML key, a `--set` path and an attribute are the same dotted name.

The leaves are the frozen dataclasses that each part receives; this root composes them. Facts that are
measured at start (number of blocks, addresses) are never part of it. Read it with
`cluster.config.parse.parse_config`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from cluster.scaling.targets import ScalingTargets
from router.routing.policy import PlacementPolicy, PolicyConfig
from router.settings import RouterSettings
from workers.config import (
    CacheConfig,
    GroupConfig,
    ModelConfig,
    ParallelConfig,
    ScheduleConfig,
    SpeculativeConfig,
    TransferConfig,
)

EMBEDDED_MODEL = "embedded"  # model.path of the model that ships with the package

_STRICT = ConfigDict(extra="forbid", strict=True, frozen=True)


class ParallelSettings(BaseModel):
    """How the ranks of a group work together (their number is the pool's `tensor_parallel`)."""

    model_config = _STRICT
    step_timeout_s: float = 10.0  # a rank silent for longer ends the group
    threads_per_rank: int | None = None  # CPU threads; None: usable cores / ranks of the group on the machine
    device: Literal["auto", "cpu", "cuda"] = "auto"
    cuda_graphs: bool = True  # decode steps on a GPU are recorded at start and replayed
    symmetric_memory: bool = True  # GPUs of one machine add up over NVLink without NCCL, where they can
    flashinfer: bool = (
        False  # a GPU computes prompts with FlashInfer, where installed: workers.config has more
    )


class PoolConfig(BaseModel):
    """Worker groups of one kind; how many of them is `num_replicas` of the deployment of the same name."""

    model_config = _STRICT
    tensor_parallel: int = 1  # ranks of a group
    cpus_per_rank: float = 1.0  # CPUs that Ray sets aside for a rank, in the group's placement group
    gpus_per_rank: float | None = None  # None: 1 when parallel.device is cuda, else 0
    placement: Literal["PACK", "STRICT_PACK", "SPREAD", "STRICT_SPREAD"] = "PACK"  # of ranks over machines
    wait_for_resources: bool = False  # do not refuse a group that no machine known now can hold
    start_timeout_s: float = 600.0  # longest time from the first rank's start to a loaded group
    drain_timeout_s: float = 30.0  # how long requests may go on when a group is removed or replaced
    cache: CacheConfig = Field(default_factory=CacheConfig)
    schedule: ScheduleConfig = Field(default_factory=ScheduleConfig)
    parallel: ParallelSettings = Field(default_factory=ParallelSettings)
    speculative: SpeculativeConfig = Field(default_factory=SpeculativeConfig)
    transfer: TransferConfig = Field(default_factory=TransferConfig)

    def num_gpus_per_rank(self) -> float:
        """GPUs that Ray sets aside for a rank."""
        if self.gpus_per_rank is not None:
            return self.gpus_per_rank
        return 1.0 if self.parallel.device == "cuda" else 0.0

    def bundles(self) -> list[dict[str, float]]:
        """Placement group of a group: one bundle a rank. The front lives in the first and costs nothing."""
        bundle = {"CPU": self.cpus_per_rank}
        if self.num_gpus_per_rank():
            bundle["GPU"] = self.num_gpus_per_rank()
        return [dict(bundle) for _ in range(self.tensor_parallel)]

    def group(self, model: ModelConfig) -> GroupConfig:
        """What a group of this pool receives."""
        parallel = ParallelConfig(
            tensor_parallel=self.tensor_parallel,
            step_timeout_s=self.parallel.step_timeout_s,
            threads_per_rank=self.parallel.threads_per_rank,
            device=self.parallel.device,
            cuda_graphs=self.parallel.cuda_graphs,
            symmetric_memory=self.parallel.symmetric_memory,
            flashinfer=self.parallel.flashinfer,
        )
        return GroupConfig(
            model=model,
            cache=self.cache,
            schedule=self.schedule,
            parallel=parallel,
            speculative=self.speculative,
            transfer=self.transfer,
        )


class PoolsConfig(BaseModel):
    """The pools of worker groups; which may stand together says `cluster.config.pools`. None at all: one
    unified."""

    model_config = _STRICT
    unified: PoolConfig | None = None  # prompt and generation in the same group
    prefill: PoolConfig | None = None  # computes prompts, whose KV blocks other groups read
    decode: PoolConfig | None = None  # answers; reads blocks from prefill groups, or computes them

    @model_validator(mode="before")
    @classmethod
    def _one_at_least(cls, pools: Any) -> Any:
        return {"unified": {}} if pools == {} else pools

    def by_name(self) -> dict[str, PoolConfig]:
        """The pools there are; their names are their Serve deployments' and their groups' roles."""
        return {name: pool for name, pool in self if pool is not None}


class RouterConfig(BaseModel):
    """HTTP service and placement."""

    model_config = _STRICT
    policy: PlacementPolicy = PlacementPolicy.PREFIX  # how a group is chosen
    placement: PolicyConfig = Field(default_factory=PolicyConfig)  # weights of that choice
    http: RouterSettings = Field(
        default_factory=lambda: RouterSettings(model_name="")
    )  # limits of the service

    def placement_policy(self) -> PolicyConfig:
        """What placement receives."""
        return replace(self.placement, policy=self.policy)


class NetworkConfig(BaseModel):
    """Where groups listen for routers, and ranks for each other."""

    model_config = _STRICT
    # node: each machine's address in the Ray cluster, which is 127.0.0.1 where `tandem serve` started it;
    # loopback: 127.0.0.1 whatever the address is, for a cluster of one machine
    interface: Literal["node", "loopback"] = "node"


class SecurityConfig(BaseModel):
    """What is refused by default because it would leave a port open to strangers."""

    model_config = _STRICT
    allow_ray_without_token: bool = False  # run although this Ray cluster takes commands from anyone


class TandemConfig(BaseModel):
    """Root of the tree: `args` of the application in a deployment file."""

    model_config = _STRICT
    model: ModelConfig = Field(default_factory=lambda: ModelConfig(path=EMBEDDED_MODEL))
    pools: PoolsConfig = Field(default_factory=PoolsConfig)
    router: RouterConfig = Field(default_factory=RouterConfig)
    scaling: ScalingTargets = Field(default_factory=ScalingTargets)  # of pools with autoscaling_config
    network: NetworkConfig = Field(default_factory=NetworkConfig)
    security: SecurityConfig = Field(default_factory=SecurityConfig)
