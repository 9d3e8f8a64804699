"""The model side of a rank's start: open the checkpoint, load this rank's slice, size and fill the pool."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from workers.config import GroupConfig
from workers.decoding.drafter import DRAFT_MODEL, MEDUSA, MODEL_METHODS
from workers.engine.meter import MeteredModel
from workers.engine.request import EngineLimits
from workers.kernels import (
    MAX_LOGIT_ROWS,
    CacheForm,
    PagedCache,
    Quantization,
    RankPart,
    TorchKernels,
    kernels_for,
)
from workers.kernels.memory import MAX_KEPT_ROWS
from workers.model.architecture import ModelSpec
from workers.model.checkpoint import Checkpoint
from workers.model.decoder import Decoder, load_decoder
from workers.model.medusa import load_heads
from workers.model.medusa_folder import MedusaFolder
from workers.model.parallel import TensorParallel
from workers.model.spec import check_tensor_parallel
from workers.runtime.agreement import code_digest, file_facts, identity_facts
from workers.runtime.ceilings import measure_ceilings, of_group
from workers.runtime.device import (
    choose_device,
    choose_dtype,
    choose_kv_dtype,
    choose_quantization,
    make_current,
    set_threads,
)
from workers.runtime.draft_model import DraftRunner
from workers.runtime.errors import RankConfigError
from workers.runtime.graphs.buckets import Buckets
from workers.runtime.graphs.decoder import GraphedDecoder
from workers.runtime.graphs.device import CudaDevice
from workers.runtime.graphs.reserve import Reserve, measure_reserve
from workers.runtime.handshake import Facts
from workers.runtime.kv_pool import allocate_pool, free_bytes
from workers.runtime.medusa import MedusaRunner
from workers.runtime.model_work import model_work
from workers.runtime.pool_size import FreeMemory, num_blocks_for
from workers.runtime.runner import ModelRunner
from workers.runtime.shared_pool import PartForm
from workers.weight_forms import WeightForms

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFacts:
    """What was found and measured at start; equal on all ranks of a group."""

    model_hash: str
    code: str  # digest of the engine's source
    limits: EngineLimits
    dtype: str
    kv_dtype: str  # of keys and values in the pool
    device: str  # cpu or cuda
    tensor_parallel: int
    block_size: int
    num_blocks: int
    kv_bytes_per_block: int  # over all ranks
    num_kv_heads: int  # of the model, not of a rank
    num_layers: int
    head_dim: int


class RankModel:
    """Steps of the start, in the order of the methods. The first finds faults of config and checkpoint."""

    def __init__(self, config: GroupConfig, rank: int) -> None:
        """Reads config and headers. Raises CheckpointError, TensorParallelError or RankConfigError."""
        self._config = config
        self._rank = rank
        self._size = config.parallel.tensor_parallel
        self.device = choose_device(config.parallel, rank)
        make_current(self.device)
        self._dtype = choose_dtype(config.model.dtype)
        self._kv_dtype = choose_kv_dtype(config.cache.dtype, self._dtype)
        setting = choose_quantization(config.model.quantization)
        self._checkpoint = Checkpoint(config.model.path)
        self._quantization = Quantization(self._checkpoint.quantization(setting.value))
        check_tensor_parallel(self._checkpoint.spec, self._size)
        self._draft: Checkpoint | None = None
        self._draft_form: CacheForm | None = None
        self._draft_decoder: Decoder | None = None
        self._heads: MedusaFolder | None = None
        if rank == 0:
            self._open_folder_of_guesses()
        self._max_model_len = self._checked_max_model_len()
        # Of all ranks.
        self._cache_forms = [self._form(self._checkpoint.spec, each) for each in range(self._size)]
        self._buckets: Buckets | None = None  # of CUDA graphs; None: there will be none
        self._graphs: GraphedDecoder | None = None
        self._is_recordable = False  # a step: it waits for nothing

    def files(self) -> Facts:
        """Which files the checkpoint consists of."""
        return file_facts([self._checkpoint.folder / "config.json", *self._checkpoint.files])

    def identity(self, *, same_files: bool) -> Facts:
        """What the ranks compare. Reads all weight files once, for their digest, unless all ranks are known
        to see the same ones."""
        checkpoint = self._checkpoint
        return identity_facts(
            content_hash=checkpoint.model_hash() if same_files else checkpoint.content_hash(),
            dtype=self._dtype,
            kv_dtype=self._kv_dtype,
            quantization=self._quantization,
            block_size=self._config.cache.block_size,
            tensor_parallel=self._size,
            max_model_len=self._max_model_len,
            device=self.device,
        )

    def load(self, parallel: TensorParallel, ranks_on_machine: int) -> Decoder:
        """Reads this rank's slice of the weights, and on rank 0 the draft model's."""
        set_threads(self._config.parallel, ranks_on_machine)
        if self._draft is not None:
            form = Quantization(self._draft.quantization(self._config.model.quantization))
            self._draft_decoder = load_decoder(
                self._draft, self._dtype, self.device, TensorParallel(), quantization=form
            )
        kernels = kernels_for(self.device, self._dtype, flashinfer=self._takes_flashinfer())
        decoder = load_decoder(
            self._checkpoint, self._dtype, self.device, parallel, kernels, quantization=self._quantization
        )
        has_triton = not isinstance(decoder.kernels, TorchKernels)  # which wait for the device
        self._is_recordable = has_triton and decoder.is_recordable and parallel.is_recordable
        if self.device.type == "cuda" and self._config.parallel.cuda_graphs and self._is_recordable:
            self._buckets = Buckets(self._max_rows(), self._max_model_len)
        return decoder

    def measure_blocks(self, decoder: Decoder, num_sharers: int) -> int:
        """Blocks this rank can hold, now that the weights are in, beside what steps take. On GPUs all ranks
        compute a step for that. num_sharers: of its memory; each needs as much for steps. Raises
        PoolTooSmall."""
        reserve = self._reserve(decoder)
        free = FreeMemory(
            num_bytes=max(0, free_bytes(self.device) - reserve.num_bytes * num_sharers),
            num_sharers=num_sharers,
            is_host=self.device.type == "cpu",
        )
        return num_blocks_for(
            self._config.cache,
            self._config.schedule,
            block_bytes=self._cache_forms[self._rank].block_bytes
            + (0 if self._draft_form is None else self._draft_form.block_bytes),
            max_model_len=self._max_model_len,
            free=free,
        )

    def part_forms(self, num_blocks: int) -> tuple[PartForm, ...]:
        """What every rank would hold for the others to see; by rank."""
        spec = self._checkpoint.spec
        return tuple(
            PartForm(
                num_blocks=num_blocks,
                block_bytes=form.block_bytes,
                num_heads=len(spec.q_heads_of_rank(rank, self._size)),
                num_kv_heads=form.num_kv_heads,
                head_dim=spec.head_dim,
                max_tokens=self._config.schedule.max_step_tokens,
                vocab_size=spec.vocab_size,
                num_logits=min(self._config.schedule.max_step_tokens, MAX_KEPT_ROWS) if rank == 0 else 0,
            )
            for rank, form in enumerate(self._cache_forms)
        )

    def runner(
        self, decoder: Decoder, num_blocks: int, parts: tuple[RankPart, ...] | None = None
    ) -> ModelRunner:
        """Allocates the pool, unless it is among `parts`: those of all ranks, which then share their
        attention. On GPUs all ranks record their graphs over it."""
        if parts is None:
            pool = self._pool(num_blocks)
        else:
            pool = PagedCache(parts[self._rank].pool, self._cache_forms[self._rank])
            decoder.share_attention(parts, self._config.schedule.max_step_tokens)
        if self._buckets is None:
            return ModelRunner(decoder, pool)
        device = CudaDevice(self.device)
        graphs = self._graphs = GraphedDecoder(decoder, pool, self._buckets, device)
        before = device.taken_bytes()
        graphs.record()
        taken = device.taken_bytes() - before
        _log.info("%d graphs take %d MiB", graphs.num_graphs, taken >> 20)
        return ModelRunner(graphs, pool)

    @property
    def decode_message_bytes(self) -> int:
        """What the ranks add up at once in the largest step of decode rows alone."""
        return self._max_rows() * self._checkpoint.spec.hidden_size * self._dtype.itemsize

    @property
    def plans_ahead(self) -> bool:
        """Whether steps are to be planned ahead (`workers.engine.ahead`); after `load`."""
        schedule, is_gpu = self._config.schedule, self.device.type == "cuda"
        max_rows = min(schedule.max_running, schedule.max_step_tokens)
        if max_rows > MAX_LOGIT_ROWS or (is_gpu and not self._is_recordable):
            return False
        return is_gpu if schedule.plan_ahead is None else schedule.plan_ahead

    def close(self) -> None:
        """Frees the graphs, which has to come before the rank leaves its group. May be called twice."""
        if self._graphs is not None:
            self._graphs.close()

    def draft_heads(self, decoder: Decoder) -> MedusaRunner | None:
        """Reads them; None where there are none."""
        if self._heads is None:
            return None
        found = load_heads(self._heads, decoder.kernels, self._dtype, self.device, self._quantization)
        return MedusaRunner(found)

    def draft_model(self, num_blocks: int) -> DraftRunner | None:
        """Allocates its pool; None where there is none."""
        if self._draft_form is None or self._draft_decoder is None:
            return None
        return DraftRunner(self._draft_decoder, allocate_pool(num_blocks, self._draft_form, self.device))

    def metered(self, ranks_on_machine: int) -> MeteredModel:
        """What counts in a step, and the ceilings of the group's machines, of which this one is measured; for
        a fraction of a second, in which the other ranks here should have nothing to do."""
        spec, is_host = self._checkpoint.spec, self.device.type == "cpu"
        num_threads = torch.get_num_threads() * (ranks_on_machine if is_host else 1)
        one = measure_ceilings(self.device, self._dtype, num_threads)
        kv_bytes = self._kv_bytes_per_block() // self._config.cache.block_size
        return MeteredModel(
            work=model_work(spec, self._dtype, self._forms(), kv_bytes_per_token=kv_bytes),
            ceilings=of_group(one, self._size / ranks_on_machine if is_host else self._size),
        )

    def facts(self, num_blocks: int) -> RankFacts:
        spec = self._checkpoint.spec
        return RankFacts(
            model_hash=self._checkpoint.model_hash(self._quantization.value),
            code=code_digest(),
            limits=EngineLimits(
                vocab_size=self._checkpoint.vocab_size,
                max_model_len=self._max_model_len,
                eos_token_ids=self._checkpoint.eos_token_ids,
                is_prefix_reusable=spec.is_prefix_reusable(self._max_model_len),
                window=spec.longest_window,
                turns_by_length=not spec.is_prefix_reusable(self._max_model_len),
                recompute_past=spec.recompute_past(self._max_model_len),
                max_pass_rows=MAX_LOGIT_ROWS,
            ),
            dtype=str(self._dtype).removeprefix("torch."),
            kv_dtype=str(self._kv_dtype).removeprefix("torch."),
            device=self.device.type,
            tensor_parallel=self._size,
            block_size=self._config.cache.block_size,
            num_blocks=num_blocks,
            kv_bytes_per_block=self._kv_bytes_per_block(),
            num_kv_heads=spec.num_kv_heads,
            num_layers=spec.num_layers,
            head_dim=spec.head_dim,
        )

    def _checked_max_model_len(self) -> int:
        longest, wanted = self._checkpoint.max_model_len, self._config.model.max_model_len
        if wanted is None:
            return longest
        if not 1 <= wanted <= longest:
            raise RankConfigError(
                f"model.max_model_len {wanted}: {self._checkpoint.folder} allows 1 to {longest}"
            )
        return wanted

    def _takes_flashinfer(self) -> bool:
        """Guesses are checked in slices of several rows, which would go to FlashInfer, and their answers
        would not be those without them."""
        method = self._config.speculative.method
        if self._config.parallel.flashinfer and method != "none":
            _log.warning("Triton computes prompts: parallel.flashinfer does not go with guesses (%s)", method)
            return False
        return self._config.parallel.flashinfer

    def _open_folder_of_guesses(self) -> None:
        """Of what guesses tokens on rank 0. Raises CheckpointError or RankConfigError."""
        method, folder = self._config.speculative.method, self._config.speculative.model
        if method in MODEL_METHODS and not folder:
            raise RankConfigError(f"speculative.model is empty: the method {method} needs a folder")
        if method == DRAFT_MODEL:
            self._draft = Checkpoint(folder, self._checkpoint)
            self._draft_form = self._form(self._draft.spec)
        elif method == MEDUSA:
            self._heads = MedusaFolder(folder, self._checkpoint)

    def _reserve(self, decoder: Decoder) -> Reserve:
        if self.device.type == "cpu":
            return Reserve(step_bytes=0, graph_bytes=0)
        found = measure_reserve(
            decoder,
            self._pool,
            CudaDevice(self.device),
            self._config.schedule,
            block_size=self._config.cache.block_size,
            max_model_len=self._max_model_len,
            buckets=self._buckets,
        )
        _log.info("steps take %d MiB, graphs %d MiB", found.step_bytes >> 20, found.graph_bytes >> 20)
        return found

    def _max_rows(self) -> int:
        """Most sequences of a step that is replayed: one of more rows of logits is cut into passes."""
        schedule = self._config.schedule
        return min(schedule.max_running, schedule.max_step_tokens, MAX_LOGIT_ROWS)

    def _pool(self, num_blocks: int) -> PagedCache:
        return allocate_pool(num_blocks, self._cache_forms[self._rank], self.device)

    def _kv_bytes_per_block(self) -> int:
        """Over all ranks."""
        return sum(form.block_bytes for form in self._cache_forms)

    def _forms(self) -> WeightForms:
        """What most of the weights are held in."""
        dtype = str(self._dtype).removeprefix("torch.")
        return self._checkpoint.forms(self._quantization.value, dtype)

    def _form(self, spec: ModelSpec, rank: int | None = None) -> CacheForm:
        """Of a rank's pool of this model; None: of all its heads. Raises RankConfigError for pages that have
        no int8 form."""
        try:
            return CacheForm(
                num_kv_heads=spec.num_kv_heads
                if rank is None
                else len(spec.kv_heads_of_rank(rank, self._size)),
                num_layers=spec.num_layers,
                block_size=self._config.cache.block_size,
                head_dim=spec.head_dim,
                dtype=self._kv_dtype,
            )
        except ValueError as error:
            raise RankConfigError(str(error)) from error
