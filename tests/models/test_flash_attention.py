"""A model whose prompts go to FlashInfer's double."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.models import checkpoints
from tests.models.emulated_device import EmulatedDevice
from tests.models.engine_groups import group_config
from tests.unit.kernels.flashinfer_double import Calls, wrapper_of
from workers.config import ScheduleConfig, SpeculativeConfig
from workers.kernels import CacheForm, LayerCache, PagedCache, StepBatch, StepMessage, TorchKernels, pack_step
from workers.kernels.gpu.flash_attention import FlashAttention
from workers.model.checkpoint import Checkpoint
from workers.model.decoder import Decoder, load_decoder
from workers.model.parallel import TensorParallel
from workers.runtime.graphs.buckets import Buckets
from workers.runtime.graphs.reserve import measure_reserve
from workers.runtime.rank_model import RankModel

BLOCK_SIZE, CPU = 8, torch.device("cpu")


class Kernels(TorchKernels):
    """Those of torch, but for prompts."""

    def __init__(self, calls: Calls) -> None:
        self._flash = FlashAttention(wrapper_of(calls), "fa3", CPU)

    def paged_attention(
        self,
        q: torch.Tensor,
        cache: LayerCache,
        batch: StepBatch,
        scale: float,
        sliding_window: int | None,
        soft_cap: float | None = None,
    ) -> torch.Tensor:
        def own(q: torch.Tensor, batch: StepBatch) -> torch.Tensor:
            return TorchKernels.paged_attention(self, q, cache, batch, scale, sliding_window, soft_cap)

        return self._flash.attend(q, cache, batch, scale, sliding_window, soft_cap, own)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a model with a soft cap, half of whose layers have a window."""
    family = checkpoints.family("gemma2")
    return checkpoints.build(tmp_path_factory.mktemp("m"), family, head_dim=64, sliding_window=16)


def decoder_of(folder: Path, kernels: TorchKernels) -> Decoder:
    return load_decoder(Checkpoint(folder), torch.bfloat16, CPU, TensorParallel(), kernels)


def pool_of(decoder: Decoder, num_blocks: int) -> PagedCache:
    form = CacheForm(
        num_kv_heads=decoder.num_kv_heads,
        num_layers=decoder.spec.num_layers,
        block_size=BLOCK_SIZE,
        head_dim=decoder.spec.head_dim,
        dtype=torch.bfloat16,
    )
    return PagedCache.zeros(num_blocks, form)


def step_of(slices: Sequence[tuple[int, int, int]]) -> StepMessage:
    """(sequence, start, tokens) of each slice; sequence s has the ten blocks from 10 s on."""
    counts = [-(-(start + length) // BLOCK_SIZE) for _, start, length in slices]
    lens = [length for _, _, length in slices]
    return pack_step(
        lens=lens,
        starts=[start for _, start, _ in slices],
        block_counts=counts,
        token_ids=[(7 * place + 5) % 128 for place in range(sum(lens))],
        blocks=[10 * slices[at][0] + block for at, count in enumerate(counts) for block in range(count)],
        logit_rows=range(sum(lens)),
    )


def test_steps_are_those_of_torch_and_are_planned_once_for_each_kind_of_layer(folder: Path) -> None:
    calls = Calls()
    decoders = [decoder_of(folder, TorchKernels()), decoder_of(folder, Kernels(calls))]
    pools = [pool_of(each, 30) for each in decoders]
    num_layers = decoders[0].spec.num_layers
    # A prompt; the rest of it beside another; both decode beside a third; all decode.
    steps = [
        [(0, 0, 20)],
        [(0, 20, 11), (1, 0, 33)],
        [(0, 31, 1), (2, 0, 40), (1, 33, 1)],
        [(0, 32, 1), (2, 40, 1)],
    ]
    for number, step in enumerate(map(step_of, steps)):
        wanted, found = (each.forward(step, pool) for each, pool in zip(decoders, pools, strict=True))
        assert wanted is not None and found is not None
        torch.testing.assert_close(found.logits, wanted.logits, rtol=0.05, atol=0.1)
        num_prompts = min(number + 1, 3)
        assert (len(calls.plans), calls.num_runs) == (2 * num_prompts, num_layers * num_prompts)
    assert len(calls.made) == 2


def test_its_workspaces_are_made_before_the_pool_is_measured(folder: Path) -> None:
    calls = Calls()
    decoder = decoder_of(folder, Kernels(calls))
    made = []

    class Device(EmulatedDevice):
        def peak_bytes(self, work: object) -> int:
            made.append(len(calls.made))
            return 0

    measure_reserve(
        decoder,
        lambda num_blocks: pool_of(decoder, num_blocks),
        Device(graph_bytes=[500, 30]),
        ScheduleConfig(max_step_tokens=64, max_running=4),
        block_size=BLOCK_SIZE,
        max_model_len=100,
        buckets=Buckets(4, 100),
    )
    assert made == [2] and len(calls.made) == 2
    assert {plan["window_left"] for plan in calls.plans} == {-1, 15}


@pytest.mark.parametrize("method", ["none", "prompt_lookup"])
def test_it_does_not_go_with_guesses(folder: Path, method: str, caplog: pytest.LogCaptureFixture) -> None:
    config = group_config(folder, 1)
    config = replace(
        config,
        parallel=replace(config.parallel, flashinfer=True),
        speculative=SpeculativeConfig(method=method),
    )
    RankModel(config, 0).load(TensorParallel(), ranks_on_machine=1)
    assert ("parallel.flashinfer does not go with guesses (prompt_lookup)" in caplog.text) == (
        method != "none"
    )
