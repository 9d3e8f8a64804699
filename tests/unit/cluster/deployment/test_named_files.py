"""Files that a deployment names: what the start would refuse, the check refuses, and it waits for none."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.config.parse import check_config, parse_config
from cluster.config.problems import Problem
from cluster.config.tree import PoolsConfig
from cluster.deployment.named_files import key_problems, open_model, step_cost_problems
from cluster.figures.step_cost import SMOLLM2_ON_SMALL_CPU
from workers.model.checkpoint import Checkpoint

FILES = ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
         "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"]  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, tiny_model: Path) -> Path:
    """A model folder to spoil: 2 layers, context 128."""
    copy = tmp_path / "model"
    shutil.copytree(tiny_model, copy)
    return copy


def problems_of(folder: Path, **cache: int) -> list[Problem]:
    tree = {"model": {"path": str(folder)}, "pools": {"unified": {"cache": cache}}}
    return open_model(parse_config(tree), folder)[1]


def empty(file: Path) -> None:
    file.write_bytes(b"")


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-20])


def junk(file: Path) -> None:
    file.write_bytes(b"\xff\xfejunk{%")


def make_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def make_fifo(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def make_endless(file: Path) -> None:
    file.unlink()
    file.symlink_to("/dev/zero")


def test_the_folder_is_good_as_it_was_written(folder: Path) -> None:
    assert {file.name for file in folder.iterdir()} >= set(FILES)
    assert problems_of(folder) == []


@pytest.mark.timeout(20)
@pytest.mark.parametrize("spoil", [make_folder, make_fifo, make_endless, junk])
@pytest.mark.parametrize("name", FILES)
def test_no_file_of_a_model_may_be_anything_else(
    folder: Path, name: str, spoil: Callable[[Path], None]
) -> None:
    spoil(folder / name)
    (problem,) = problems_of(folder)
    assert problem.path == "model.path"
    assert name in problem.message or "chat template" in problem.message


@pytest.mark.parametrize("name", FILES)
def test_no_file_of_a_model_lies_outside_its_folder(folder: Path, name: str) -> None:
    outside = folder.parent / name
    (folder / name).rename(outside)
    (folder / name).symlink_to(outside)
    (problem,) = problems_of(folder)
    assert problem.message == f"{folder / name}: links to {outside}, outside the folder"


@pytest.mark.parametrize("spoil", [empty, cut, Path.unlink])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_files_that_a_model_needs_are_whole(folder: Path, name: str, spoil: Callable[[Path], None]) -> None:
    spoil(folder / name)
    (problem,) = problems_of(folder)
    assert problem.path == "model.path"
    assert name in problem.message


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% for m in messages %}", "chat template, line 1: Unexpected end of template"),
        ("\n{{ x | nofilter }}", "chat template, line 2: No filter named 'nofilter'."),
        ("{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "chat template: RecursionError"),
    ],
)
def test_a_template_is_compiled(folder: Path, template: str, words: str) -> None:
    (folder / "chat_template.jinja").write_text(template)
    (problem,) = problems_of(folder)
    assert words in problem.message


def test_a_tokenizer_of_another_model_is_refused(folder: Path) -> None:
    file = folder / "tokenizer.json"
    content, size = json.loads(file.read_text()), Checkpoint(folder).vocab_size
    content["model"]["vocab"]["of-another-model"] = size
    file.write_text(json.dumps(content))
    (problem,) = problems_of(folder)
    assert problem.message == (
        f"{folder}: tokenizer.json has tokens up to id {size}, config.json says vocab_size {size}: they are "
        "not of one model"
    )


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("(a+)+$", ""),
        ("((a{1,1000}){1,1000}){1,100}", ""),
        ("a{100000}{100000}", "too big number"),
        ("(" * 100_000, "Oniguruma error"),
    ],
)
def test_a_hostile_pattern_of_a_tokenizer_costs_no_time_to_load(
    folder: Path, pattern: str, words: str
) -> None:
    file = folder / "tokenizer.json"
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    file.write_text(json.dumps({**json.loads(file.read_text()), "pre_tokenizer": split}))
    problems = problems_of(folder)
    assert [words in problem.message for problem in problems] == ([True] if words else [])


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method 'bitsandbytes' is not read; quantized checkpoints"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size must be -1 or at least 1; got 0"),
        ({"quant_method": "tandem"}, "quantization_config lacks version"),
        ([], "quantization_config must be an object; got []"),
    ],
)
def test_a_quantized_checkpoint_that_is_not_read_is_named(folder: Path, section: object, words: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": section}))
    (problem,) = problems_of(folder)
    assert words in problem.message


def test_templates_without_names_are_no_crash(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": [{"x": 1}, 2]}))
    assert problems_of(folder) == []


def test_a_pool_holds_the_longest_request_that_the_model_can(folder: Path) -> None:
    (problem,) = problems_of(folder, num_blocks=7, block_size=16)
    assert problem == Problem(
        path="pools.unified.cache.num_blocks",
        message="the pool is too small for one request of the 128 tokens that model can",
        got="7",
        allowed="at least 8",
        hint="or set model.max_model_len to 112",
    )
    assert problems_of(folder, num_blocks=8, block_size=16) == []


@pytest.mark.parametrize(
    ("ranks", "placement", "max_bytes", "allowed", "longest"),
    [
        (1, "PACK", 32_767, "at least 32768", 112),  # 8 blocks of 16 tokens, 2 layers, 2 heads of 8, K and V
        (2, "STRICT_PACK", 32_767, "at least 32768", 112),  # a head each
        (2, "SPREAD", 16_383, "at least 16384", 112),  # perhaps not on the same machine
        (1, "PACK", 4_095, "at least 32768", 0),
        (1, "PACK", 32_768, "", 0),
        (2, "SPREAD", 16_384, "", 0),
    ],
)
def test_the_most_bytes_of_a_pool_hold_the_longest_request(
    folder: Path, ranks: int, placement: str, max_bytes: int, allowed: str, longest: int
) -> None:
    pool = {"tensor_parallel": ranks, "placement": placement, "cache": {"max_bytes": 1 << 20}}
    config = parse_config({"model": {"path": str(folder)}, "pools": {"unified": pool}})
    assert config.pools.unified is not None
    cache = replace(config.pools.unified.cache, max_bytes=max_bytes)  # less than any real model has use for
    pools = PoolsConfig(unified=config.pools.unified.model_copy(update={"cache": cache}))
    problems = open_model(config.model_copy(update={"pools": pools}), folder)[1]
    expected = Problem(
        path="pools.unified.cache.max_bytes",
        message="the pool is too small for one request of the 128 tokens that model can",
        got=str(max_bytes),
        allowed=allowed,
        hint=f"or set model.max_model_len to {longest}" if longest else "",
    )
    assert problems == ([expected] if allowed else [])


def test_a_gpus_pool_has_no_such_limit(folder: Path) -> None:
    pool = {"parallel": {"device": "cuda"}, "cache": {"max_bytes": 1 << 20, "block_size": 1024}}
    config = parse_config({"model": {"path": str(folder)}, "pools": {"unified": pool}})
    assert open_model(config, folder)[1] == []


def with_draft(folder: Path, draft: Path, method: str = "draft_model") -> list[Problem]:
    speculative = {"method": method, "model": str(draft)}
    tree = {"model": {"path": str(folder)}, "pools": {"unified": {"speculative": speculative}}}
    return open_model(parse_config(tree), folder)[1]


def test_a_draft_model_has_to_fit_the_model(folder: Path, tmp_path: Path) -> None:
    assert with_draft(folder, folder) == []
    (absent,) = with_draft(folder, tmp_path / "absent")
    assert absent.path == "pools.unified.speculative.model" and "no such model folder" in absent.message
    draft = tmp_path / "draft"
    shutil.copytree(folder, draft)
    config = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps({**config, "vocab_size": 7}))
    (other,) = with_draft(folder, draft)
    assert f"vocab_size is 7, that of {folder} is {config['vocab_size']}" in other.message


def test_heads_have_to_fit_the_model(folder: Path, tmp_path: Path) -> None:
    (absent,) = with_draft(folder, tmp_path / "absent", "medusa")
    assert absent.path == "pools.unified.speculative.model"
    assert "no such folder of Medusa heads" in absent.message
    (other,) = with_draft(folder, folder, "medusa")
    assert "it must be 'tandem_medusa'" in other.message


@pytest.mark.parametrize(
    ("method", "model", "words"),
    [
        ("draft_model", "", "does not go with the method draft_model"),
        ("medusa", "", "does not go with the method medusa"),
        ("prompt_lookup", "/some/folder", "does not go with the method prompt_lookup"),
    ],
)
def test_the_folder_of_a_draft_model_goes_with_its_method(method: str, model: str, words: str) -> None:
    speculative = {"method": method, "model": model}
    config, problems = check_config({"pools": {"unified": {"speculative": speculative}}})
    assert config is None
    assert [(p.path, p.message) for p in problems] == [("pools.unified.speculative.model", words)]


def test_the_hash_of_a_model_does_not_depend_on_its_folder(folder: Path, tiny_model: Path) -> None:
    assert Checkpoint(folder).model_hash() == Checkpoint(tiny_model).model_hash()


def step_cost(file: str) -> list[Problem]:
    return list(step_cost_problems(parse_config({"scaling": {"step_cost": file}})))


def test_a_step_cost_is_a_file_under_an_absolute_path(tmp_path: Path) -> None:
    file = tmp_path / "cost.json"
    SMOLLM2_ON_SMALL_CPU.save(file, about={})
    assert step_cost(str(file)) == [] == list(step_cost_problems(parse_config({})))
    assert [problem.message for problem in step_cost("cost.json")] == ["is no absolute path"]
    for content in ("{", None):
        file.write_text(content) if content else file.unlink()
        (problem,) = step_cost(str(file))
        assert problem.path == "scaling.step_cost" and str(file) in problem.message


def keys_file(file: Path) -> list[Problem]:
    tree = {"router": {"http": {"api_keys_file": str(file)}}}
    return list(key_problems(parse_config(tree)))


def test_a_good_key_file_is_taken(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\nkey-1\n")
    file.chmod(0o600)
    assert keys_file(file) == []
    assert list(key_problems(parse_config({}))) == []


@pytest.mark.timeout(10)
@pytest.mark.parametrize(
    ("content", "mode", "words"),
    [
        ("key", 0o604, "mode 604: other users may use it; run chmod 600"),
        ("# only\n\n", 0o600, "holds no key"),
        ("", 0o600, "holds no key"),
        ("two words\n", 0o600, "must be one word"),
        ("k" * (2 << 20), 0o600, "larger than 1048576 bytes"),
        (None, 0, "cannot be read: No such file or directory"),
        ("folder", 0, "cannot be read: it is no regular file"),
        ("fifo", 0, "cannot be read: it is no regular file"),
    ],
)
def test_a_bad_key_file_is_named(tmp_path: Path, content: str | None, mode: int, words: str) -> None:
    file = tmp_path / "keys"
    if content == "folder":
        file.mkdir()
    elif content == "fifo":
        os.mkfifo(file, 0o600)
    elif content is not None:
        file.write_text(content)
        file.chmod(mode)
    (problem,) = keys_file(file)
    assert problem.path == "router.http.api_keys_file"
    assert words in problem.message and str(file) in problem.message
