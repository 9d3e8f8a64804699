"""Trees of guesses in a step: each row has the logits that it would have behind its ancestors alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from tests.models import checkpoints
from tests.unit.kernels.batches import fill
from workers.kernels import CacheForm, Kernels, PagedCache, TorchKernels, kernels_for, pack_step
from workers.model.checkpoint import Checkpoint
from workers.model.decoder import Decoder, load_decoder
from workers.model.parallel import TensorParallel

NUM_BLOCKS, BLOCK_SIZE = 64, 4
#        0
#    1       2
#  3   4     5
#  6         7
PARENTS = [-1, 0, 0, 1, 1, 2, 3, 5]
CHAIN = [-1, 0, 1, 2]
TOKENS = [5, 9, 17, 33, 65, 70, 71, 72]


def decoder_of(folder: Path, dtype: torch.dtype, kernels: Kernels) -> Decoder:
    return load_decoder(Checkpoint(folder), dtype, torch.device("cpu"), TensorParallel(), kernels)


class Pool:
    """Keys and values of one sequence at a time, its blocks scattered."""

    def __init__(self, decoder: Decoder, dtype: torch.dtype) -> None:
        spec = decoder.spec
        self._decoder = decoder
        form = CacheForm(
            num_kv_heads=decoder.num_kv_heads,
            num_layers=spec.num_layers,
            block_size=BLOCK_SIZE,
            head_dim=spec.head_dim,
            dtype=dtype,
        )
        self._kv = PagedCache.zeros(NUM_BLOCKS, form)
        fill(self._kv, torch.Generator().manual_seed(3))
        self._blocks = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(7)).tolist()

    def compute(self, token_ids: Sequence[int], start: int, parents: Sequence[int] = ()) -> torch.Tensor:
        """(tokens, vocabulary): logits of all rows, beside another sequence's decode row."""
        count, other = -(-(start + len(token_ids)) // BLOCK_SIZE), self._blocks[-1]
        message = pack_step(
            lens=[1, len(token_ids)],
            starts=[0, start],
            block_counts=[1, count],
            token_ids=[3, *token_ids],
            blocks=[other, *self._blocks[:count]],
            logit_rows=range(1, 1 + len(token_ids)),
            parents=[-1, *parents] if parents else (),
        )
        drawn = self._decoder.forward(message, self._kv)
        assert drawn is not None
        return drawn.logits.clone()


def path_to(row: int) -> list[int]:
    return [] if row < 0 else [*path_to(PARENTS[row]), row]


@pytest.mark.parametrize("length", [0, 1, 59, 63, 64, 70, 130])
@pytest.mark.parametrize(
    ("family", "dtype", "kind", "kv_dtype"),
    [
        ("llama", torch.bfloat16, "native", None),
        ("mistral", torch.bfloat16, "native", None),
        ("llama_head_dim_24", torch.bfloat16, "native", None),
        ("llama_head_dim_8_mqa", torch.float32, "native", None),
        ("mistral", torch.float32, "native", None),
        ("mistral", torch.float32, "torch", None),
        ("qwen3", torch.float32, "torch", None),
        ("mistral", torch.bfloat16, "native", torch.int8),
        ("llama_head_dim_24", torch.bfloat16, "native", torch.int8),
    ],
)
def test_a_row_sees_its_ancestors_and_nobody_else(
    family_folder: Callable[[str], Path],
    family: str,
    dtype: torch.dtype,
    kind: str,
    kv_dtype: torch.dtype | None,
    length: int,
) -> None:
    kernels = TorchKernels() if kind == "torch" else kernels_for(torch.device("cpu"), dtype)
    decoder = decoder_of(family_folder(family), dtype, kernels)
    prompt = checkpoints.prompt_ids(length, seed=length)
    pool = Pool(decoder, kv_dtype or dtype)
    if prompt:
        pool.compute(prompt, 0)
    found = pool.compute(TOKENS, length, PARENTS)
    for row in range(len(TOKENS)):
        alone = Pool(decoder, kv_dtype or dtype)
        if prompt:
            alone.compute(prompt, 0)
        expected = alone.compute([TOKENS[each] for each in path_to(row)], length)[-1]
        if dtype == torch.bfloat16:  # other products take float32 through torch
            assert torch.equal(found[row], expected), f"row {row}"
        else:
            torch.testing.assert_close(found[row], expected, rtol=1e-4, atol=1e-4)


def test_a_chain_with_parents_is_a_chain(family_folder: Callable[[str], Path]) -> None:
    dtype = torch.bfloat16
    decoder = decoder_of(family_folder("llama"), dtype, kernels_for(torch.device("cpu"), dtype))
    assert torch.equal(
        Pool(decoder, dtype).compute(TOKENS[:4], 0, CHAIN), Pool(decoder, dtype).compute(TOKENS[:4], 0)
    )


@pytest.mark.parametrize("parents", [[0, 0], [-1, 1], [-1, -1], [-1, 2], [-1, -2]])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_parents_that_are_none_are_refused(
    family_folder: Callable[[str], Path], parents: list[int], dtype: torch.dtype
) -> None:
    decoder = decoder_of(family_folder("llama"), dtype, kernels_for(torch.device("cpu"), dtype))
    with pytest.raises(ValueError, match=r"whose token \d of a slice follows the token"):
        Pool(decoder, dtype).compute(TOKENS[:2], 0, parents)
