"""Decode steps that are replayed: what they find without graphs, and nothing of the padding is seen.

Products of torch on the CPU depend on the number of rows in their last bits, so numbers are compared with a
tolerance here; what a step must not touch is compared exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from tests.models import checkpoints
from tests.models.emulated_device import EmulatedDevice
from tests.unit.kernels.batches import fill
from workers.config import ScheduleConfig
from workers.kernels import (
    CacheForm,
    Draw,
    Drawn,
    PagedCache,
    StepMessage,
    TorchKernels,
    build_batch,
    header_of,
    pack_step,
    unpack,
)
from workers.model.checkpoint import Checkpoint
from workers.model.decoder import Decoder, load_decoder
from workers.model.parallel import Part, TensorParallel
from workers.runtime.graphs.buckets import Buckets
from workers.runtime.graphs.decoder import GraphedDecoder
from workers.runtime.graphs.reserve import first_steps, largest_step, measure_reserve, other_steps

BLOCK_SIZE, NUM_BLOCKS = 8, 40
CPU = torch.device("cpu")
BEST = Draw(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, uniform=0.0)
Folders = Callable[[str], Path]


def decoder_of(folder: Path) -> Decoder:
    return load_decoder(Checkpoint(folder), torch.float32, CPU, TensorParallel(), TorchKernels())


def pool_of(decoder: Decoder, num_blocks: int = NUM_BLOCKS) -> PagedCache:
    """Noise everywhere: what a padding row reads must not matter, nor be changed."""
    spec = decoder.spec
    form = CacheForm(
        num_kv_heads=decoder.num_kv_heads,
        num_layers=spec.num_layers,
        block_size=BLOCK_SIZE,
        head_dim=spec.head_dim,
        dtype=torch.float32,
    )
    pool = PagedCache.zeros(num_blocks, form)
    fill(pool, torch.Generator().manual_seed(3))
    return pool


def decode_step(contexts: Sequence[int], seed: int = 0) -> StepMessage:
    """One token of each sequence, which has so many tokens in the pool already."""
    counts = [-(-(context + 1) // BLOCK_SIZE) for context in contexts]
    order = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(seed)).tolist()
    return pack_step(
        lens=[1] * len(contexts),
        starts=contexts,
        block_counts=counts,
        token_ids=[(7 * place + seed) % 128 for place in range(len(contexts))],
        blocks=order[: sum(counts)],
        logit_rows=range(len(contexts)),
    )


class Both:
    """A decoder with and without graphs, each over a pool of its own that began alike."""

    def __init__(self, folder: Path, max_rows: int = 6, max_context: int = 100) -> None:
        self.plain = decoder_of(folder)
        self.plain_pool = pool_of(self.plain)
        self.pool = self.plain_pool.clone()
        self.device = EmulatedDevice()
        self.graphs = GraphedDecoder(self.plain, self.pool, Buckets(max_rows, max_context), self.device)
        self.graphs.record()

    def run(self, message: StepMessage) -> tuple[Drawn, Drawn]:
        draws = [BEST] * header_of(message).num_logit_rows
        found = self.graphs.forward(message, self.pool, draws)
        wanted = self.plain.forward(message, self.plain_pool, draws)
        assert found is not None and wanted is not None
        return found, wanted

    @property
    def num_replays(self) -> int:
        return sum(graph.num_replays for graph in self.device.graphs)


def assert_same(pair: tuple[Drawn, Drawn]) -> None:
    found, wanted = pair
    assert found.ids == wanted.ids
    assert found.hidden is not None and wanted.hidden is not None
    torch.testing.assert_close(found.logits, wanted.logits, atol=1e-5, rtol=0)
    torch.testing.assert_close(found.hidden, wanted.hidden, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3", "gpt2"])
def test_a_replayed_step_finds_what_the_operators_find(name: str, family_folder: Folders) -> None:
    both = Both(family_folder(name), max_context=60)
    for seed, contexts in enumerate([(5,), (0, 17, 31), (59, 8, 7, 3, 2), (1, 1, 1, 1, 1, 1), (40, 3)]):
        before = both.pool.clone()
        message = decode_step(contexts, seed=seed)
        assert_same(both.run(message))
        torch.testing.assert_close(both.pool.numbers, both.plain_pool.numbers, atol=1e-5, rtol=0)
        assert written_slots(before.numbers, both.pool.numbers) == slots_of(message)
    assert both.num_replays == 5


def written_slots(before: torch.Tensor, after: torch.Tensor) -> set[int]:
    changed = (before != after).any(dim=5).any(dim=3).any(dim=2).any(dim=1)  # (blocks, block_size)
    return set(changed.view(-1).nonzero()[:, 0].tolist())


def slots_of(message: StepMessage) -> set[int]:
    batch = build_batch(
        unpack(message), block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, vocab_size=128, device=CPU
    )
    return set(batch.slots.tolist())


def test_recording_writes_nothing(family_folder: Folders) -> None:
    both = Both(family_folder("llama"))
    assert torch.equal(both.pool.memory, both.plain_pool.memory)
    assert len(both.device.graphs) == both.graphs.num_graphs == 4


@pytest.mark.parametrize(
    "message",
    [
        pack_step(
            lens=[3], starts=[0], block_counts=[1], token_ids=[1, 2, 3], blocks=[4], logit_rows=[2]
        ),
        pack_step(lens=[1], starts=[3], block_counts=[1], token_ids=[1], blocks=[4], logit_rows=[]),
        pack_step(
            lens=[1, 1],
            starts=[3, 4],
            block_counts=[1, 1],
            token_ids=[1, 2],
            blocks=[4, 5],
            logit_rows=[1, 1],
        ),
        decode_step((3,) * 7),
        decode_step((100,)),
    ],
    ids=["a prompt", "no logits", "rows out of order", "too many rows", "too long a context"],
)  # fmt: skip
def test_other_steps_run_by_operator(message: StepMessage, family_folder: Folders) -> None:
    both = Both(family_folder("llama"))
    found, wanted = both.run(message)
    assert torch.equal(found.logits, wanted.logits)
    assert both.num_replays == 0


def test_closed_all_graphs_are_freed_and_steps_run_by_operator(family_folder: Folders) -> None:
    both = Both(family_folder("llama"))
    both.graphs.close()
    both.graphs.close()
    assert both.graphs.num_graphs == 0 and all(graph.is_freed for graph in both.device.graphs)
    found, wanted = both.run(decode_step((5, 6)))
    assert torch.equal(found.logits, wanted.logits)


def test_a_step_outside_of_the_pool_is_refused(family_folder: Folders) -> None:
    both = Both(family_folder("llama"))
    message = pack_step(
        lens=[1], starts=[3], block_counts=[1], token_ids=[1], blocks=[NUM_BLOCKS], logit_rows=[0]
    )
    with pytest.raises(ValueError, match=r"block outside 0 \.\. 39"):
        both.graphs.forward(message, both.pool)
    assert both.num_replays == 0


def test_a_step_is_brought_by_one_copy(family_folder: Folders) -> None:
    both = Both(family_folder("llama"), max_rows=4, max_context=1000)
    before = both.device.num_uploads
    both.run(decode_step((5, 6, 7)))
    assert both.device.num_uploads == before + 1
    # Four rows of the widest tables, 125 blocks; of those of 512 tokens the copy has 64.
    assert both.device.uploaded_bytes == 4 * 4 * 8 + (5 + 4 + 4 * 64) * 4


def test_a_stretched_rotary_by_length(family_folder: Folders, tmp_path: Path) -> None:
    """Below the trained length and beyond it: each row by its own context, padding by none."""
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    folder = tmp_path / "dynamic"
    checkpoints.build(folder, checkpoints.family("llama"), max_position_embeddings=32, rope_parameters=rope)
    both = Both(folder, max_rows=4, max_context=64)
    for contexts in ((5, 40, 63), (3,)):
        assert_same(both.run(decode_step(contexts)))
    assert both.num_replays == 2


def test_the_largest_step_fills_budget_and_rows() -> None:
    message, num_blocks = largest_step(700, 16, 256)
    header = header_of(message)
    assert (header.num_slices, header.num_tokens, header.num_logit_rows) == (3, 700, 512)
    assert num_blocks == header.num_block_entries == 16 + 16 + 12
    assert header.longest_context == 256


def test_first_steps_have_all_kinds_of_sizes() -> None:
    assert first_steps(40) == [1, 2, 3, 4, 5, 8, 9, 16, 17, 32, 33]
    assert first_steps(64) == [1, 2, 3, 4, 5, 8, 9, 16, 17, 32, 33, 64]
    assert first_steps(1) == [1]


def test_other_steps_have_a_long_context_and_trees() -> None:
    for max_model_len, longest in ((5000, 1024), (100, 100)):
        headers = [header_of(step) for step in other_steps(16, max_model_len)]
        assert [header.longest_context for header in headers] == [longest, 1, longest]
        assert [header.num_parents for header in headers] == [0, 1, 1]


def test_what_steps_take_is_measured_before_the_pool(family_folder: Folders) -> None:
    decoder = decoder_of(family_folder("llama"))
    device = EmulatedDevice(taken=1000, graph_bytes=[500, 30], peaks=[7000])
    pools: list[int] = []

    def make_pool(num_blocks: int) -> PagedCache:
        pools.append(num_blocks)
        return pool_of(decoder, num_blocks)

    reserve = measure_reserve(
        decoder,
        make_pool,
        device,
        ScheduleConfig(max_step_tokens=64, max_running=4),
        block_size=BLOCK_SIZE,
        max_model_len=600,
        buckets=Buckets(4, 600),
    )
    # 3 numbers of rows with 2 contexts: the first graph, and five more like the second.
    assert (reserve.step_bytes, reserve.graph_bytes) == (7000, 500 + 5 * 30)
    assert pools == [75]  # for a context of 600 tokens


class Recorder(TensorParallel):
    """The first of two ranks; each kind of collective takes memory at its first, as NCCL's do."""

    def __init__(self, device: EmulatedDevice) -> None:
        super().__init__(rank=0, size=2)
        object.__setattr__(self, "device", device)
        object.__setattr__(self, "kinds", set())

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return self._take("all-reduce", x)

    def add_up(self, *parts: Part) -> torch.Tensor:
        """A GPU's parts are tensors; of those of a CPU one node will do."""
        whole = [
            part if isinstance(part, torch.Tensor) else part.sums[0].to(part.out_dtype) for part in parts
        ]
        return self.all_reduce(sum(whole[1:], whole[0]))

    def share(self, x: torch.Tensor) -> torch.Tensor:
        return self._take("broadcast", x)

    def gather_columns(self, x: torch.Tensor, widths: tuple[int, ...], kept: object) -> torch.Tensor:
        return self._take("gather", x.repeat(1, 2))

    def _take(self, kind: str, x: torch.Tensor) -> torch.Tensor:
        if kind not in self.kinds:
            self.kinds.add(kind)
            self.device.taken += 1 << 20
        return x


@pytest.mark.parametrize("has_graphs", [True, False])
def test_collectives_of_all_kinds_come_before_the_pool_is_measured(
    has_graphs: bool, family_folder: Folders
) -> None:
    """So what NCCL takes for them is no longer free, and belongs to no graph."""
    device = EmulatedDevice(graph_bytes=[500, 30])
    checkpoint = Checkpoint(family_folder("llama"))
    decoder = load_decoder(checkpoint, torch.float32, CPU, Recorder(device), TorchKernels())
    reserve = measure_reserve(
        decoder,
        lambda num_blocks: pool_of(decoder, num_blocks),
        device,
        ScheduleConfig(max_step_tokens=64, max_running=4),
        block_size=BLOCK_SIZE,
        max_model_len=100,
        buckets=Buckets(4, 100) if has_graphs else None,
    )
    assert device.taken == (3 << 20) + (530 if has_graphs else 0)
    assert reserve.graph_bytes == (500 + 2 * 30 if has_graphs else 0)
