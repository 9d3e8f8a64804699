"""Every family against transformers in float32: logits within 1e-4, greedy tokens exactly."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.models import checkpoints
from tests.models.families import FAMILIES
from tests.models.loading import logits_of, paged_model
from tests.models.oracle import Oracle
from workers.kernels import StepMessage, pack_step

EVERY_FAMILY = [entry.name for entry in FAMILIES]
Folders = Callable[[str], Path]


@pytest.mark.parametrize("name", EVERY_FAMILY)
def test_logits_and_greedy_tokens_equal_transformers_however_chunked(
    name: str, family_folder: Folders
) -> None:
    folder = family_folder(name)
    oracle, model = Oracle(folder), paged_model(folder)
    text = checkpoints.prompt_ids(50)
    wanted_logits = oracle.logits(text)
    for chunk in (1, 7, 16, None):
        torch.testing.assert_close(logits_of(model, text, chunk=chunk), wanted_logits, atol=1e-4, rtol=0)
    prompts = checkpoints.graded_prompts()
    wanted = [oracle.greedy(prompt, checkpoints.NUM_GRADED_TOKENS) for prompt in prompts]
    # All prompts in one batch, in chunks that mix prompt parts of some with the last token of others.
    assert model.greedy(prompts, checkpoints.NUM_GRADED_TOKENS, chunk=7) == wanted
    assert model.greedy(prompts, checkpoints.NUM_GRADED_TOKENS) == wanted


@pytest.mark.parametrize("block_size", [8, 16, 32])
def test_block_size_changes_nothing(block_size: int, family_folder: Folders) -> None:
    folder = family_folder("qwen2_sliding")
    model, oracle = paged_model(folder, block_size=block_size), Oracle(folder)
    for prompt in checkpoints.graded_prompts():
        assert model.greedy([prompt], 20) == [oracle.greedy(prompt, 20)]


def test_a_batch_of_sixteen_says_what_each_says_alone(family_folder: Folders) -> None:
    folder = family_folder("llama")
    model = paged_model(folder)
    texts = [checkpoints.prompt_ids(3 + 2 * i, seed=50 + i) for i in range(16)]
    alone = [logits_of(model, text) for text in texts]
    sequences = [model.start(text) for text in texts]
    model.read(sequences, 5)
    for sequence, wanted in zip(sequences, alone, strict=True):
        torch.testing.assert_close(torch.stack(sequence.logits), wanted, atol=1e-4, rtol=0)


def test_a_step_without_wanted_rows_still_writes_keys_and_values(family_folder: Folders) -> None:
    folder = family_folder("gpt2")
    model, text = paged_model(folder), checkpoints.prompt_ids(20)
    sequence = model.start(text)
    model.step([(sequence, 12)], want="none")
    assert sequence.logits == []
    model.step([(sequence, 8)])
    torch.testing.assert_close(
        torch.stack(sequence.logits), Oracle(folder).logits(text)[12:], atol=1e-4, rtol=0
    )


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2"])
def test_bfloat16_stays_close_to_float32(name: str, family_folder: Folders) -> None:
    folder, text = family_folder(name), checkpoints.prompt_ids(40)
    exact = Oracle(folder).logits(text)
    ours = logits_of(paged_model(folder, dtype=torch.bfloat16), text)
    assert ours.dtype == torch.float32
    # bfloat16 has 8 bits of mantissa: 0.4 % of error a rounding, logits here have a spread of 1.
    assert float((ours - exact).abs().mean()) < 0.02
    assert float((ours - exact).abs().max()) < 0.25


def test_window_edge_is_exact(tmp_path: Path) -> None:
    """With a window of 16, position 39 sees 24 to 39: token 23 must not matter at all, token 24 must."""
    folder = checkpoints.build(tmp_path / "m", checkpoints.family("mistral"), seed=0, num_hidden_layers=1)
    model, oracle, text = paged_model(folder), Oracle(folder), checkpoints.prompt_ids(40)
    base = logits_of(model, text)
    torch.testing.assert_close(base, oracle.logits(text), atol=1e-4, rtol=0)
    for position, matters in ((23, False), (24, True)):
        changed = [*text]
        changed[position] = (changed[position] + 1) % 128
        difference = float((logits_of(model, changed)[39] - base[39]).abs().max())
        assert (difference > 1e-2) is matters
        assert matters or difference == 0.0


@pytest.mark.parametrize(
    ("overrides", "windows"),
    [
        ({"use_sliding_window": False}, (None, None, None)),
        ({"use_sliding_window": True, "max_window_layers": 1}, (None, 16, 16)),
        ({"use_sliding_window": True, "max_window_layers": 28}, (None, None, None)),
    ],
)
def test_qwen2_window_switches(
    overrides: dict[str, object], windows: tuple[int | None, ...], tmp_path: Path
) -> None:
    folder = checkpoints.build(tmp_path / "m", checkpoints.family("qwen2_sliding"), seed=0, **overrides)
    model, text = paged_model(folder), checkpoints.prompt_ids(60)
    assert model.decoder.spec.sliding_window == windows
    torch.testing.assert_close(logits_of(model, text), Oracle(folder).logits(text), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("llama", {"hidden_act": "gelu"}),
        ("llama", {"hidden_act": "gelu_pytorch_tanh"}),
        ("llama", {"hidden_act": "relu"}),
        ("llama", {"rms_norm_eps": 0.1}),
        ("llama", {"num_hidden_layers": 1, "num_key_value_heads": 4}),
        ("mistral", {"sliding_window": None}),
        ("qwen3", {"attention_bias": True, "tie_word_embeddings": True}),
        ("gpt2", {"activation_function": "gelu", "n_inner": 100}),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
        ("gpt2", {"scale_attn_weights": False, "tie_word_embeddings": False}),
    ],
)
def test_switches_of_the_config(name: str, overrides: dict[str, object], tmp_path: Path) -> None:
    folder = checkpoints.build(tmp_path / "m", checkpoints.family(name), seed=4, **overrides)
    text = checkpoints.prompt_ids(30)
    ours = logits_of(paged_model(folder), text, chunk=16)
    torch.testing.assert_close(ours, Oracle(folder).logits(text), atol=1e-4, rtol=0)


@pytest.mark.parametrize("lengths", [(1,), (17,), (40,), (1, 5, 17, 30, 40, 44)])
def test_learned_positions_while_decoding(lengths: tuple[int, ...], family_folder: Folders) -> None:
    folder = family_folder("gpt2")
    model, oracle = paged_model(folder), Oracle(folder)
    prompts = [checkpoints.prompt_ids(length, seed=length) for length in lengths]
    wanted = [oracle.continuation(prompt, 20).token_ids for prompt in prompts]
    assert model.greedy(prompts, 20) == wanted


def test_learned_positions_up_to_the_last(tmp_path: Path) -> None:
    script = [3 + (7 * i) % 250 for i in range(60)]
    folder = checkpoints.pos_script(tmp_path / "m", script, prompt_len=4, vocab_size=259, n_positions=64)
    model = paged_model(folder)
    assert model.decoder.spec.max_model_len == 64
    assert model.greedy([[9, 9, 9, 9]], 60) == [script]


def test_successor_says_the_permutation(tmp_path: Path) -> None:
    perm = [(5 * i + 3) % 64 for i in range(64)]
    folder = checkpoints.successor(tmp_path / "m", perm)
    said = paged_model(folder).greedy([[11]], 8)[0]
    assert said == [perm[token] for token in [11, *said[:-1]]]


@pytest.mark.parametrize("longest", [-1, 257 * 16, 2**31 - 1])
def test_a_context_longer_than_the_pool_is_refused_before_anything_is_made_for_it(
    tmp_path: Path, longest: int
) -> None:
    """Whatever length the checkpoint claims: the table of positions would have its rows."""
    folder = checkpoints.build(
        tmp_path / "long", checkpoints.family("llama"), max_position_embeddings=1 << 28
    )
    model = paged_model(folder)  # 256 blocks of 16 tokens
    assert len(model.greedy([checkpoints.prompt_ids(20)], 2)[0]) == 2
    message = pack_step(
        lens=[2], starts=[0], block_counts=[1], token_ids=[5, 6], blocks=[0], logit_rows=[1], zero_blocks=[]
    )
    claimed = StepMessage(message[:24] + struct.pack("<i", longest) + message[28:])
    with pytest.raises(ValueError, match=f"a context of {longest} tokens, in a pool for 4096"):
        model.decoder.forward(claimed, model._kv)
