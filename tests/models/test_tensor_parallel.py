"""Several ranks against transformers: every family, uneven heads, copied KV heads, odd sizes.

Two and three ranks add up in shared memory, four over gloo.

All works of a group size run in one start of its ranks: starting processes costs more than the tests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.models import checkpoints
from tests.models.families import FAMILIES
from tests.models.loading import logits_of, paged_model
from tests.models.oracle import Oracle
from tests.models.ranks import Found, Work, run_ranks

LLAMA = checkpoints.family("llama")
EVERY_FAMILY = [entry.name for entry in FAMILIES]
TEXT = checkpoints.prompt_ids(40)

# Shapes that do not divide by the group sizes. Each is a change of the llama family, with seed 1.
SHAPES: Mapping[str, dict[str, object]] = {
    "9 heads over 3 kv heads": {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72},
    "one kv head": {"num_key_value_heads": 1},
    "vocabulary of 129": {"vocab_size": 129},
    "vocabulary of 257, tied": {"vocab_size": 257, "tie_word_embeddings": True},
    "head_dim 24": {"head_dim": 24},
    "head_dim 8, inner 97": {"head_dim": 8, "intermediate_size": 97},
    "biases": {"attention_bias": True, "mlp_bias": True},
}


@dataclass(frozen=True)
class Case:
    folder: Path
    found: Found


@pytest.fixture(scope="module")
def two_ranks(
    family_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Case]:
    """Every family (greedy over the graded prompts) and every shape, on two ranks."""
    root = tmp_path_factory.mktemp("two")
    works = {}
    for name in EVERY_FAMILY:
        works[name] = Work(
            folder=str(family_folder(name)),
            texts=[TEXT, TEXT[:17]],
            prompts=checkpoints.graded_prompts(),
            num_tokens=checkpoints.NUM_GRADED_TOKENS,
            chunk=16,
        )
    for name, overrides in SHAPES.items():
        folder = checkpoints.build(root / name, LLAMA, seed=1, **overrides)
        works[name] = Work(folder=str(folder), texts=[TEXT], chunk=7)
    works["deep logits"] = Work(folder=str(_deep_negative_logits(root / "deep")), texts=[TEXT])
    works["bfloat16"] = Work(folder=str(family_folder("llama")), texts=[TEXT], dtype="bfloat16")
    found = run_ranks(root, 2, list(works.values()))
    return {
        name: Case(Path(work.folder), result)
        for (name, work), result in zip(works.items(), found, strict=True)
    }


@pytest.mark.parametrize("name", EVERY_FAMILY)
def test_two_ranks_equal_transformers(name: str, two_ranks: dict[str, Case]) -> None:
    case = two_ranks[name]
    oracle = Oracle(case.folder)
    assert case.found.ids == [
        oracle.greedy(prompt, checkpoints.NUM_GRADED_TOKENS) for prompt in checkpoints.graded_prompts()
    ]
    for text, logits in zip((TEXT, TEXT[:17]), case.found.logits, strict=True):
        torch.testing.assert_close(logits, oracle.logits(text), atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_that_do_not_divide(name: str, two_ranks: dict[str, Case]) -> None:
    case = two_ranks[name]
    torch.testing.assert_close(case.found.logits[0], Oracle(case.folder).logits(TEXT), atol=1e-4, rtol=0)


def test_padding_never_wins(two_ranks: dict[str, Case]) -> None:
    """All real logits lie far below zero: a zero of a padding row would win the argmax."""
    case = two_ranks["deep logits"]
    wanted = Oracle(case.folder).logits(TEXT)
    assert float(wanted.max()) < -30
    assert case.found.logits[0].shape == (40, 129)
    torch.testing.assert_close(case.found.logits[0], wanted, atol=1e-3, rtol=0)
    assert torch.equal(case.found.logits[0].argmax(-1), wanted.argmax(-1))


def test_bfloat16_two_ranks_stay_close_to_one(two_ranks: dict[str, Case]) -> None:
    case = two_ranks["bfloat16"]
    alone = logits_of(paged_model(case.folder, dtype=torch.bfloat16), TEXT)
    assert float((case.found.logits[0] - alone).abs().mean()) < 0.02


def test_three_ranks(tmp_path: Path, family_folder: Callable[[str], Path]) -> None:
    """Three KV heads, one each; and a model that three ranks cannot hold says which sizes work."""
    nine = checkpoints.build(tmp_path / "nine", LLAMA, seed=1, **SHAPES["9 heads over 3 kv heads"])
    works = [
        Work(folder=str(nine), texts=[TEXT]),
        Work(folder=str(family_folder("llama"))),
        Work(folder=str(family_folder("gpt2")), texts=[TEXT]),  # 4 heads: 2, 1, 1
        Work(folder=str(nine), texts=[TEXT, TEXT[:9]], chunk=11, dtype="bfloat16"),
    ]
    first, refused, uneven, rounded = run_ranks(tmp_path, 3, works)
    torch.testing.assert_close(first.logits[0], Oracle(nine).logits(TEXT), atol=1e-4, rtol=0)
    torch.testing.assert_close(
        uneven.logits[0], Oracle(family_folder("gpt2")).logits(TEXT), atol=1e-4, rtol=0
    )
    alone = paged_model(nine, dtype=torch.bfloat16)
    for text, logits in zip((TEXT, TEXT[:9]), rounded.logits, strict=True):
        assert float((logits - logits_of(alone, text)).abs().mean()) < 0.02
    assert refused.error == (
        "tensor_parallel 3 does not fit 4 attention heads and 2 KV heads; sizes that work: 1, 2, 4"
    )


def test_four_ranks_with_copied_kv_heads(tmp_path: Path, family_folder: Callable[[str], Path]) -> None:
    one = checkpoints.build(tmp_path / "one", LLAMA, seed=1, **SHAPES["one kv head"])
    folders = [one, family_folder("llama"), family_folder("qwen3")]
    works = [Work(folder=str(folder), texts=[TEXT]) for folder in folders]
    found = run_ranks(tmp_path, 4, works, shares_memory=False)
    for folder, result in zip(folders, found, strict=True):
        torch.testing.assert_close(result.logits[0], Oracle(folder).logits(TEXT), atol=1e-4, rtol=0)


def _deep_negative_logits(folder: Path) -> Path:
    """Vocabulary 129 whose real logits are all below -30, with embed[:, 0] = 30 and lm_head[:, 0] = -5."""
    checkpoints.build(folder, LLAMA, seed=1, vocab_size=129)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 30.0
        model.lm_head.weight[:, 0] = -5.0
        model.model.norm.weight[0] = 1.0
    return checkpoints.save(folder, model)
