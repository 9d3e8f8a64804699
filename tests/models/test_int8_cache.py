"""Keys and values as int8: the answer is the same however a prompt is cut, cached, guessed or split up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.models import checkpoints
from tests.models.engine_groups import GREEDY, Client, InNoTime, group_config
from tests.models.exchange_groups import ForeignMember, LocalMember, Loop, Member, Ranks, through
from tests.models.loading import logits_of, paged_model
from tests.models.oracle import Oracle
from tests.models.ranks import Work, run_ranks
from tests.models.test_exchange import Pair, local_pair
from workers.config import GroupConfig, SpeculativeConfig
from workers.runtime.errors import RankConfigError
from workers.runtime.launch import LocalGroup
from workers.runtime.rank_model import RankModel
from workers.types import BeamParams

TEXT = checkpoints.prompt_ids(90)
Folders = Callable[[str], Path]
Configs = Callable[[str, int], GroupConfig]


def as_int8(config: GroupConfig, dtype: str = "bfloat16") -> GroupConfig:
    return replace(
        config, model=replace(config.model, dtype=dtype), cache=replace(config.cache, dtype="int8")
    )


def text_for(name: str) -> list[int]:
    return TEXT[:60] if name == "gpt2" else TEXT  # all that it has positions for


@pytest.mark.parametrize("name", [entry.name for entry in checkpoints.FAMILIES])
def test_logits_stay_close_to_transformers(name: str, family_folder: Folders) -> None:
    """Logits of spread 1, where float32 with unquantized keys and values is exact.

    A token whose experts nearly tie may take another one, and its logits jump: the mean counts it, the
    largest error does not.
    """
    folder, text = family_folder(name), text_for(name)
    oracle = Oracle(folder)
    error = (logits_of(paged_model(folder, kv_dtype=torch.int8), text) - oracle.logits(text)).abs()
    assert 0 < float(error.mean()) < 0.02
    tied = oracle.routing_margins(text) < 0.02
    assert int(tied.sum()) <= len(text) // 10 and float(error[~tied].max()) < 0.2


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3", "gpt2", "llama_head_dim_24"])
def test_bits_are_the_same_however_a_prompt_is_cut(name: str, family_folder: Folders) -> None:
    model = paged_model(family_folder(name), dtype=torch.bfloat16, kv_dtype=torch.int8)
    text = text_for(name)
    whole = logits_of(model, text)
    for chunk in (1, 7, 64):
        assert torch.equal(logits_of(model, text, chunk=chunk), whole)


def test_two_ranks_have_the_heads_and_scales_of_one(family_folder: Folders, tmp_path: Path) -> None:
    folder, dtypes = family_folder("llama"), ("float32", "bfloat16")
    works = [
        Work(folder=str(folder), texts=[TEXT], chunk=16, dtype=dtype, kv_dtype="int8") for dtype in dtypes
    ]
    for dtype, found in zip(dtypes, run_ranks(tmp_path, 2, works), strict=True):
        model = paged_model(folder, dtype=getattr(torch, dtype), kv_dtype=torch.int8)
        assert torch.equal(found.logits[0], logits_of(model, TEXT)), dtype


def test_what_is_cached_or_copied_reads_as_it_was_computed(family_folder: Folders) -> None:
    prompts = checkpoints.graded_prompts()
    with LocalGroup(as_int8(group_config(family_folder("llama"), 1))) as group:
        assert (group.facts.dtype, group.facts.kv_dtype) == ("bfloat16", "int8")
        cold = Client(group.facts, group.executor, prefix_reuse=False).generate(prompts, together=False)
        client = Client(group.facts, group.executor, max_prefill_chunk=7)
        for _ in range(2):
            answers = client.generate(prompts)
            assert [each.token_ids for each in answers] == [each.token_ids for each in cold]
        assert sum(each.num_cached for each in answers) > 0
        # Hypotheses share blocks and copy the ones that they write to.
        beam = BeamParams(width=4)
        found = []
        for options in ({"prefix_reuse": False}, {"max_prefill_chunk": 7}, {"num_blocks": 16}):
            client = Client(group.facts, group.executor, **options)  # type: ignore[arg-type]
            request_id = client.submit(prompts[3], num_choices=4, beam=beam)
            answers_of = client.finish()
            found.append(
                [(answers_of[request_id, i].token_ids, answers_of[request_id, i].score) for i in range(4)]
            )
        assert found[1] == found[0] == found[2] and len({tuple(ids) for ids, _ in found[0]}) == 4


def test_guesses_of_a_small_model_change_nothing(family_folder: Folders) -> None:
    """Its own keys and values are int8 too."""
    folder, prompts = family_folder("llama"), checkpoints.graded_prompts()
    plain = as_int8(group_config(folder, 1))
    with LocalGroup(plain) as group:
        expected = [answer.token_ids for answer in Client(group.facts, group.executor).generate(prompts)]
    speculative = SpeculativeConfig(method="draft_model", model=str(folder))
    with LocalGroup(replace(plain, speculative=speculative)) as group:
        client = Client(group.facts, InNoTime(group.executor), speculative=speculative, clock=lambda: 0.0)
        assert [answer.token_ids for answer in client.generate(prompts)] == expected
        assert client.engine.stats().accepted_tokens_total > 0


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_prompt_that_is_handed_over(loop: Loop, long_config: Configs, family: str) -> None:
    config = as_int8(long_config(family, 1))
    with local_pair(loop, config, config) as pair:
        for length in (16, 17, 200):
            pair.check(checkpoints.prompt_ids(length, seed=length), GREEDY, f"{length}")


def test_a_prompt_that_is_handed_over_by_one_rank_to_two(
    loop: Loop, ranks: Ranks, long_config: Configs
) -> None:
    configs = [as_int8(long_config("llama", size), "float32") for size in (1, 2)]
    members: list[Member] = [LocalMember(loop, "one", configs[0])]
    try:
        two = ForeignMember(loop, "two", configs[1], ranks)
        members.append(two)
        Pair(members[0], two).check(checkpoints.prompt_ids(200), GREEDY, "")
    finally:
        for member in members:
            member.close()


def test_groups_of_another_form_do_not_read_each_other(
    loop: Loop, long_config: Configs, caplog: pytest.LogCaptureFixture
) -> None:
    config = long_config("llama", 1)
    config = replace(config, model=replace(config.model, dtype="bfloat16"))
    prompt = checkpoints.prompt_ids(200)
    with local_pair(loop, config, as_int8(config)) as pair:
        alone = pair.decode.answer(pair.decode.submit(prompt, salt="alone"))
        answer = pair.decode.answer(through(pair.prefill, pair.decode, prompt))
        assert (answer.token_ids, answer.num_cached) == (alone.token_ids, 0)
        pair.rest(kv_fetched_tokens_total=0)
    assert "differ in kv_dtype (here int8, there bfloat16)" in caplog.text


def test_what_has_no_int8_form_is_refused_at_the_start(family_folder: Folders) -> None:
    config = group_config(family_folder("llama"), 1)
    with pytest.raises(RankConfigError, match=r"cache\.dtype 'int4': must be auto or int8"):
        RankModel(replace(config, cache=replace(config.cache, dtype="int4")), 0)
    models = [RankModel(each, 0) for each in (config, as_int8(config, "float32"))]
    assert [model.identity(same_files=True)["kv_dtype"] for model in models] == ["float32", "int8"]
    bytes_of = [model.facts(4).kv_bytes_per_block for model in models]
    head_dim = models[0].facts(4).head_dim
    assert bytes_of[0] * (head_dim + 2) == bytes_of[1] * 4 * head_dim
