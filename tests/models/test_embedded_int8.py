"""The embedded model with keys and values of 8 bits, with weights of 8 bits, and with both.

On English texts and one of code, scored as `echo` does: what it costs, and that it is the same to the bit on
two and three ranks, from the prefix cache, and after the prompt was handed over.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tests.models.engine_groups import GREEDY, Client, group_config
from tests.models.exchange_groups import Loop
from tests.models.test_exchange import local_pair
from tests.models.test_quantized_perplexity import TEXT
from workers.config import GroupConfig
from workers.runtime.launch import LocalGroup

SCORED = replace(GREEDY, max_tokens=0, num_prompt_logprobs=0)
TEXTS = (
    TEXT,
    "The lighthouse stood on a spit of black rock a mile from the village, and for as long as anyone could "
    "remember the same family had kept its lamp. In winter the road to it lay under water twice a day, so "
    "that the keeper's children went to school by boat or not at all. They learned to read from old "
    "almanacs, to count from the tide tables, and to tell the weather from the color of the evening sky.",
    "A bridge carries its load in one of three ways. A beam bends: its upper side is pressed together and "
    "its lower side is pulled apart, so a long beam must also be a deep one. An arch is pressed "
    "everywhere and pushes outward at its feet, which therefore need solid ground. A cable can only be "
    "pulled, and hangs in the curve that makes every part of it carry the weight below.",
    "To make bread you need flour, water, salt and yeast, and more patience than most recipes admit. Mix "
    "everything until no dry flour is left, cover the bowl and wait. After an hour fold the dough over "
    "itself a few times; after another hour shape it. Bake it in a very hot oven until the crust is dark "
    "brown and the loaf sounds hollow when you knock on its bottom. Let it cool before you cut it.",
    "def merge(left, right):\n    result = []\n    i = j = 0\n    while i < len(left) and j < len(right):\n"
    "        if left[i] <= right[j]:\n            result.append(left[i])\n            i += 1\n        else:\n"
    "            result.append(right[j])\n            j += 1\n    result.extend(left[i:])\n"
    "    result.extend(right[j:])\n    return result\n\n\ndef merge_sort(values):\n"
    "    if len(values) <= 1:\n        return values\n    middle = len(values) // 2\n"
    "    return merge(merge_sort(values[:middle]), merge_sort(values[middle:]))\n",
)


@pytest.fixture(scope="module")
def prompts(embedded_folder: Path) -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(embedded_folder / "tokenizer.json"))
    return [tokenizer.encode(text).ids for text in TEXTS]


def config_of(
    folder: Path, dtype: str, kv_dtype: str, quantization: str, tensor_parallel: int = 1
) -> GroupConfig:
    config = group_config(folder, tensor_parallel, dtype=dtype, kv_dtype=kv_dtype)
    return replace(config, model=replace(config.model, quantization=quantization, max_model_len=1024))


def loss(group: LocalGroup, prompts: Sequence[Sequence[int]]) -> float:
    """Mean negative log-probability of all tokens but the first of each text."""
    found: list[float] = []
    client = Client(group.facts, group.executor)
    for answer in client.generate(prompts, SCORED):
        assert answer.prompt_logprobs is not None
        found += [-entry.logprob for entry in answer.prompt_logprobs if entry is not None]
    assert len(found) == sum(map(len, prompts)) - len(prompts)
    return sum(found) / len(found)


def test_what_8_bits_cost(embedded_folder: Path, prompts: list[list[int]]) -> None:
    losses, bytes_per_block = {}, {}
    for name, form in {
        "float32": ("float32", "auto", "none"),
        "bfloat16": ("bfloat16", "auto", "none"),
        "keys": ("bfloat16", "int8", "none"),
        "weights": ("bfloat16", "auto", "int8"),
        "both": ("bfloat16", "int8", "int8"),
    }.items():
        with LocalGroup(config_of(embedded_folder, *form)) as group:
            losses[name] = loss(group, prompts)
            bytes_per_block[name] = group.facts.kv_bytes_per_block
    ratios = {name: math.exp(each - losses["float32"]) for name, each in losses.items()}
    assert 0.99 < ratios["bfloat16"] < 1.02
    assert ratios["keys"] < 1.03 and ratios["weights"] < 1.05 and ratios["both"] < 1.08, ratios
    assert bytes_per_block["bfloat16"] == 16 * 23_040
    assert bytes_per_block["keys"] == 16 * 30 * 2 * 3 * (64 + 2) < 0.6 * bytes_per_block["bfloat16"]
    assert bytes_per_block["bfloat16"] > 1.9 * bytes_per_block["keys"]


@pytest.mark.parametrize(
    ("kv_dtype", "quantization", "size"),
    [("int8", "none", 3), ("auto", "int8", 3), ("int8", "int8", 2), ("int8", "int4", 3)],
)
def test_several_ranks_say_what_one_says(
    embedded_folder: Path, prompts: list[list[int]], kv_dtype: str, quantization: str, size: int
) -> None:
    found = []
    for ranks in (1, size):
        with LocalGroup(config_of(embedded_folder, "bfloat16", kv_dtype, quantization, ranks)) as group:
            found.append(loss(group, prompts))
    assert found[1] == found[0]


@pytest.mark.parametrize(("kv_dtype", "quantization"), [("int8", "none"), ("int8", "int8"), ("auto", "int4")])
def test_cached_and_handed_over_prompts_go_on_as_cold_ones(
    loop: Loop, embedded_folder: Path, prompts: list[list[int]], kv_dtype: str, quantization: str
) -> None:
    config = config_of(embedded_folder, "bfloat16", kv_dtype, quantization)
    sampling = replace(GREEDY, max_tokens=100)
    beginnings = [prompt[:length] for prompt in prompts for length in (24, 49, 80)][:10]
    with LocalGroup(config) as group:
        cold = Client(group.facts, group.executor, prefix_reuse=False).generate(beginnings, sampling)
        client = Client(group.facts, group.executor)
        client.generate(beginnings, replace(GREEDY, max_tokens=1))
        cached = client.generate(beginnings, sampling)
    assert [each.token_ids for each in cached] == [each.token_ids for each in cold]
    assert all(each.num_cached >= 16 for each in cached)
    with local_pair(loop, config, config) as pair:
        for number in (1, 8):
            pair.check(beginnings[number], sampling, f"{number}")
