"""Tiny checkpoints with known behaviour, saved as ordinary Hugging Face folders.

Two kinds:

- one randomly weighted model for every family of `tests.models.families`. Weights are *perturbed*: a fresh
  transformers model has all biases 0 and all norm weights 1, which hides most faults of biases and norms.
- scripted models whose output is known without running anything: `pos_script` says a fixed text, `successor`
  always says perm[last token].

Random models have near ties, where 1e-6 between two correct programs changes the greedy token.
The seed of every family was therefore screened: the smallest whose gap between the best and the second logit
is at least MARGIN at every graded step (`python -m tests.models.screen` finds it); the oracle checks the gap
again whenever it makes the reference ids.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from tests.models.families import FAMILIES, Family

MARGIN = 1e-2  # least gap between the two best logits at every graded step
NUM_GRADED_TOKENS = 20  # new tokens of every graded prompt
GRADED_PROMPT_LENGTHS = (1, 7, 16, 17, 40)  # tokens; around block and chunk borders


def family(name: str) -> Family:
    """The family called `name`."""
    return next(entry for entry in FAMILIES if entry.name == name)


def graded_prompts(vocab_size: int = 128) -> list[list[int]]:
    """The prompts whose continuation has no near ties under the screened seeds."""
    return [prompt_ids(length, vocab_size, seed=length) for length in GRADED_PROMPT_LENGTHS]


def prompt_ids(length: int, vocab_size: int = 128, *, seed: int = 0) -> list[int]:
    """Random token ids that avoid the first three, which are special in our toy tokenizers."""
    generator = torch.Generator().manual_seed(1000 + seed)
    return torch.randint(3, vocab_size, (length,), generator=generator).tolist()


def perturb(model: PreTrainedModel, seed: int) -> None:
    """Redraws matrices as N(0, 1/sqrt(fan_in)) and adds N(0, 0.3) to every vector, in place."""
    generator = torch.Generator().manual_seed(seed)
    conv1d_inputs_first = model.config.model_type == "gpt2"
    for name, parameter in sorted(model.named_parameters()):
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim == 1:
            parameter.data.add_(noise, alpha=0.3)
            continue
        is_conv1d = conv1d_inputs_first and ".h." in name
        fan_in = parameter.shape[0] if is_conv1d else parameter.shape[-1]
        parameter.data.copy_(noise * fan_in**-0.5)


def build(folder: Path, entry: Family, *, seed: int | None = None, **overrides: object) -> Path:
    """Saves a perturbed checkpoint of a family and returns its folder. Without `seed`: the screened one."""
    config = entry.config(**{**entry.overrides, **overrides})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    perturb(model, entry.seed if seed is None else seed)
    return save(folder, model)


def save(
    folder: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast | None = None,
    *,
    max_shard_size: str = "5GB",
) -> Path:
    """Writes model and tokenizer as a Hugging Face folder."""
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return folder


def edit_json(file: Path, **values: object) -> None:
    """Sets keys of a config or generation config; None writes null."""
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def pos_script(
    folder: Path,
    script: Sequence[int],
    *,
    prompt_len: int,
    tokenizer: PreTrainedTokenizerFast | None = None,
    vocab_size: int | None = None,
    end_id: int = 1,
    n_positions: int | None = None,
    sharpness: float = 1.0,
) -> Path:
    """A checkpoint that says `script` after any prompt of `prompt_len` tokens, then `end_id` for ever.

    The learned position p alone decides the next token. `sharpness` 1 gives the chosen token a probability of
    nearly 1; 0.25 about 0.9. `vocab_size` defaults to the tokenizer's.
    """
    size = vocab_size if vocab_size is not None else len(_required(tokenizer))
    positions = n_positions if n_positions is not None else prompt_len + len(script) + 8
    config = GPT2Config(
        vocab_size=size,
        n_embd=256,
        n_layer=1,
        n_head=4,
        n_positions=positions,
        bos_token_id=0,
        eos_token_id=end_id,
        tie_word_embeddings=False,
    )
    model = GPT2LMHeadModel(config)
    rows = torch.randn(size, 256, generator=torch.Generator().manual_seed(0))
    rows -= rows.mean(dim=1, keepdim=True)
    rows /= rows.norm(dim=1, keepdim=True)
    wanted = [end_id] * (prompt_len - 1) + list(script)
    wanted += [end_id] * (positions - len(wanted))
    with torch.no_grad():
        model.transformer.wte.weight.zero_()
        for name, parameter in model.named_parameters():
            if name.endswith("c_proj.weight"):
                parameter.zero_()
        model.transformer.wpe.weight.copy_(16 * rows[torch.tensor(wanted[:positions])])
        model.lm_head.weight.copy_(2 * sharpness * rows)
    return save(folder, model, tokenizer)


def successor(
    folder: Path,
    perm: Sequence[int],
    *,
    tokenizer: PreTrainedTokenizerFast | None = None,
    max_position_embeddings: int = 2048,
    eos_token_id: int | None = None,
) -> Path:
    """A checkpoint that always says perm[last token]. Vocabulary size is len(perm)."""
    size = len(perm)
    config = LlamaConfig(
        vocab_size=size,
        hidden_size=256,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max_position_embeddings,
        bos_token_id=None,
        eos_token_id=eos_token_id,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    rows = torch.randn(size, 256, generator=torch.Generator().manual_seed(0))
    rows /= rows.norm(dim=1, keepdim=True)
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(rows)
        model.lm_head.weight[torch.tensor(list(perm))] = 2 * rows
        model.model.layers[0].self_attn.o_proj.weight.zero_()
        model.model.layers[0].mlp.down_proj.weight.zero_()
    return save(folder, model, tokenizer)


def _required(tokenizer: PreTrainedTokenizerFast | None) -> PreTrainedTokenizerFast:
    assert tokenizer is not None, "give a tokenizer or a vocab_size"
    return tokenizer
