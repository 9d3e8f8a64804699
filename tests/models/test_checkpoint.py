"""What may lie in a model folder: tied and untied heads, shards, damage. Served exactly, or refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models import checkpoints
from tests.models.checkpoints import edit_json
from tests.models.loading import logits_of, paged_model
from tests.models.oracle import Oracle
from workers.model.checkpoint import Checkpoint
from workers.model.errors import CheckpointError
from workers.model.files import INDEX_FILE, SINGLE_FILE

LLAMA = checkpoints.family("llama")
TEXT = checkpoints.prompt_ids(30)
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def rewrite(folder: Path, change: dict[str, torch.Tensor | None]) -> None:
    """Replaces (or with None removes) tensors of a folder with one weight file."""
    tensors = load_file(folder / SINGLE_FILE)
    for name, tensor in change.items():
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    save_file(tensors, folder / SINGLE_FILE, metadata={"format": "pt"})


def tied(folder: Path) -> Path:
    return checkpoints.build(folder, LLAMA, seed=1, tie_word_embeddings=True)


def sharded(folder: Path) -> Path:
    """The llama family in ten or so files with an index."""
    checkpoints.build(folder, LLAMA, seed=1)
    model = Oracle(folder).model
    (folder / SINGLE_FILE).unlink()
    checkpoints.save(folder, model, max_shard_size="20KB")
    assert len(list(folder.glob("model-*.safetensors"))) >= 8
    return folder


def assert_equals_transformers(folder: Path) -> None:
    ours, wanted = logits_of(paged_model(folder), TEXT), Oracle(folder).logits(TEXT)
    torch.testing.assert_close(ours, wanted, atol=1e-4, rtol=0)


def test_tied_without_a_head_in_the_file(tmp_path: Path) -> None:
    folder = tied(tmp_path / "m")
    assert HEAD not in Checkpoint(folder).tensors
    assert_equals_transformers(folder)


def test_tied_with_an_equal_head_in_the_file(tmp_path: Path) -> None:
    folder = tied(tmp_path / "m")
    rewrite(folder, {HEAD: load_file(folder / SINGLE_FILE)[EMBEDDING].clone()})
    assert Checkpoint(folder).is_tied
    assert_equals_transformers(folder)


def test_tied_with_another_head_in_the_file_uses_both(tmp_path: Path) -> None:
    folder = tied(tmp_path / "m")
    rewrite(folder, {HEAD: torch.randn(128, 64, generator=torch.Generator().manual_seed(3)) / 8})
    assert not Checkpoint(folder).is_tied
    assert_equals_transformers(folder)


def test_untied(tmp_path: Path) -> None:
    folder = checkpoints.build(tmp_path / "m", LLAMA, seed=1)
    assert not Checkpoint(folder).is_tied
    assert_equals_transformers(folder)


def test_tied_with_a_head_only(tmp_path: Path) -> None:
    folder = tied(tmp_path / "m")
    rewrite(folder, {HEAD: load_file(folder / SINGLE_FILE)[EMBEDDING].clone(), EMBEDDING: None})
    assert_equals_transformers(folder)


def test_untied_without_a_head_is_refused(tmp_path: Path) -> None:
    folder = checkpoints.build(tmp_path / "m", LLAMA, seed=1)
    rewrite(folder, {HEAD: None})
    with pytest.raises(CheckpointError, match=r"missing lm_head.weight \[128, 64\]"):
        Checkpoint(folder)


def test_shards_and_a_stray_file(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "m")
    assert_equals_transformers(folder)
    zeros = {name: torch.zeros_like(tensor) for name, tensor in Oracle(folder).model.state_dict().items()}
    save_file(zeros, folder / "model-extra.safetensors", metadata={"format": "pt"})
    assert_equals_transformers(folder)


def test_a_deleted_shard_is_named(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "m")
    lost = sorted(folder.glob("model-*.safetensors"))[3]
    lost.unlink()
    with pytest.raises(CheckpointError, match=lost.name):
        Checkpoint(folder)


def test_an_index_entry_that_no_file_has_is_named(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "m")
    weight_map = json.loads((folder / INDEX_FILE).read_text())["weight_map"]
    shard = weight_map[EMBEDDING]
    edit_json(folder / INDEX_FILE, weight_map={**weight_map, "model.ghost.weight": shard})
    with pytest.raises(CheckpointError, match=f"model.ghost.weight is not in {shard}"):
        Checkpoint(folder)


def test_a_truncated_shard_is_named(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "m")
    cut = sorted(folder.glob("model-*.safetensors"))[2]
    cut.write_bytes(cut.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=rf"{cut.name}.*ends at byte \d+, the file at \d+: truncated"):
        Checkpoint(folder)


def test_a_tensor_in_two_shards_is_named(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "m")
    files = sorted(folder.glob("model-*.safetensors"))
    tensors = load_file(files[0])
    name, tensor = next(iter(load_file(files[1]).items()))
    save_file({**tensors, name: tensor}, files[0], metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=rf"stored twice:\n  {name} in {files[0].name} and"):
        Checkpoint(folder)


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/model.safetensors", "..", "a/b.safetensors"])
def test_an_index_that_leads_outside_is_refused(name: str, tmp_path: Path) -> None:
    folder = sharded(tmp_path / "m")
    weight_map = json.loads((folder / INDEX_FILE).read_text())["weight_map"]
    edit_json(folder / INDEX_FILE, weight_map={**weight_map, EMBEDDING: name})
    with pytest.raises(CheckpointError, match=r"outside the folder|not in a safetensors file"):
        Checkpoint(folder)


def test_of_many_differences_the_first_and_the_last_are_told(tmp_path: Path) -> None:
    """Experts under other names: 48 matrices are not there, two tensors are left over."""
    folder = checkpoints.build(tmp_path / "m", checkpoints.family("mixtral"), num_local_experts=8)
    experts = [name for name in load_file(folder / SINGLE_FILE) if ".experts." in name]
    names = [f"model.layers.0.block_sparse_moe.experts.{name}" for name in ("down", "up")]
    rewrite(folder, {**dict.fromkeys(experts), **{name: torch.zeros(8, 2, 2) for name in names}})
    with pytest.raises(CheckpointError) as caught:
        Checkpoint(folder)
    lines = str(caught.value).splitlines()
    assert len(lines) == 42
    assert lines[0].endswith("50 differences between config.json and the weight files:")
    assert lines[1] == "  missing model.layers.0.block_sparse_moe.experts.0.w1.weight [96, 64]"
    assert lines[21] == "  (and 10 more)"
    assert lines[-2:] == [f"  not part of this model: {name}" for name in names]


def test_all_differences_at_once(tmp_path: Path) -> None:
    folder = checkpoints.build(tmp_path / "m", LLAMA, seed=1)
    rewrite(
        folder,
        {
            "model.norm.weight": None,
            "model.layers.1.mlp.up_proj.weight": torch.zeros(95, 64),
            "model.layers.0.self_attn.q_proj.bias": torch.zeros(64),
            "model.layers.0.mlp.gate_proj.weight": torch.zeros(96, 64, dtype=torch.int8),
        },
    )
    with pytest.raises(CheckpointError) as caught:
        Checkpoint(folder)
    assert str(caught.value) == (
        f"{folder}: 4 differences between config.json and the weight files:\n"
        "  model.layers.0.mlp.gate_proj.weight has dtype I8, supported are F32, F16, BF16\n"
        "  model.layers.1.mlp.up_proj.weight has shape [95, 64], the config needs [96, 64]\n"
        "  missing model.norm.weight [64]\n"
        "  not part of this model: model.layers.0.self_attn.q_proj.bias"
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite_are_named(value: float, tmp_path: Path) -> None:
    folder = checkpoints.build(tmp_path / "m", LLAMA, seed=1)
    name = "model.layers.1.mlp.down_proj.weight"
    damaged = load_file(folder / SINGLE_FILE)[name].clone()
    damaged[3, 5] = value
    rewrite(folder, {name: damaged})
    with pytest.raises(CheckpointError, match=f"tensor {name} holds NaN or infinite values"):
        paged_model(folder)


def test_an_all_zero_matrix_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = checkpoints.successor(tmp_path / "m", [1, 2, 0])
    paged_model(folder)
    assert "tensor model.layers.0.self_attn.o_proj.weight is all zero" in caplog.messages


def test_pickles_only(tmp_path: Path) -> None:
    folder = checkpoints.build(tmp_path / "m", LLAMA, seed=1)
    (folder / SINGLE_FILE).rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="pickle checkpoints are not loaded; convert offline"):
        Checkpoint(folder)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_files(dtype: torch.dtype, tmp_path: Path) -> None:
    folder = checkpoints.build(tmp_path / "m", LLAMA, seed=1)
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(folder / SINGLE_FILE).items()}
    save_file(tensors, folder / SINGLE_FILE, metadata={"format": "pt"})
    assert_equals_transformers(folder)


def test_files_of_the_bare_model_with_old_buffers(tmp_path: Path) -> None:
    """GPT-2 as first published: no prefix, and attention masks among the weights."""
    folder = checkpoints.build(tmp_path / "m", checkpoints.family("gpt2"), seed=1)
    wanted = Oracle(folder).logits(TEXT)
    tensors = {
        name.removeprefix("transformer."): tensor for name, tensor in load_file(folder / SINGLE_FILE).items()
    }
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 64, 64)
    save_file(tensors, folder / SINGLE_FILE, metadata={"format": "pt"})
    torch.testing.assert_close(logits_of(paged_model(folder), TEXT), wanted, atol=1e-4, rtol=0)
    tensors["h.2.attn.c_attn.bias"] = torch.ones(192)  # no mask: of a layer too many
    save_file(tensors, folder / SINGLE_FILE, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"not part of this model: h\.2\.attn\.c_attn\.bias"):
        Checkpoint(folder)


@pytest.mark.parametrize(
    ("generation", "config", "wanted"),
    [
        ([1, 2], 9, (1, 2)),
        (None, [1, 2], (1, 2)),
        (2, 1, (2,)),
        (None, 50256, ()),
        (None, None, ()),
    ],
)
def test_end_ids(generation: object, config: object, wanted: tuple[int, ...], tmp_path: Path) -> None:
    folder = checkpoints.build(tmp_path / "m", LLAMA, seed=1)
    edit_json(folder / "config.json", eos_token_id=config)
    if generation is None:
        (folder / "generation_config.json").unlink()
    else:
        edit_json(folder / "generation_config.json", eos_token_id=generation)
    assert Checkpoint(folder).eos_token_ids == wanted


def test_hashes_tell_checkpoints_apart(tmp_path: Path) -> None:
    first = Checkpoint(checkpoints.build(tmp_path / "a", LLAMA, seed=1))
    again = Checkpoint(checkpoints.build(tmp_path / "b", LLAMA, seed=1))
    other_weights = Checkpoint(checkpoints.build(tmp_path / "c", LLAMA, seed=2))
    other_shape = Checkpoint(checkpoints.build(tmp_path / "d", LLAMA, seed=1, vocab_size=130))
    assert first.model_hash() == again.model_hash()
    assert first.content_hash() == again.content_hash()
    assert first.content_hash() != other_weights.content_hash()
    assert first.model_hash() != other_weights.model_hash()
    folder = checkpoints.build(tmp_path / "e", LLAMA, seed=1)
    norm = "model.norm.weight"
    rewrite(folder, {norm: load_file(folder / SINGLE_FILE)[norm] + 1})
    assert first.model_hash() != Checkpoint(folder).model_hash()  # by one small tensor
    assert first.model_hash() != other_shape.model_hash()


def test_links_stay_inside_or_in_the_hub_cache(tmp_path: Path) -> None:
    real = checkpoints.build(tmp_path / "real", LLAMA, seed=1)
    linked = tmp_path / "linked"
    linked.mkdir()
    for file in real.iterdir():
        (linked / file.name).symlink_to(file)
    with pytest.raises(CheckpointError, match="outside the folder"):
        Checkpoint(linked)
    blobs, snapshot = tmp_path / "hub" / "blobs", tmp_path / "hub" / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, file in enumerate(real.iterdir()):
        (blobs / str(number)).write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(Path("..") / ".." / "blobs" / str(number))
    assert Checkpoint(snapshot).model_hash() == Checkpoint(real).model_hash()


def test_auto_map_is_ignored_with_a_notice(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = checkpoints.build(tmp_path / "m", LLAMA, seed=1)
    edit_json(folder / "config.json", auto_map={"AutoModelForCausalLM": "evil.Model"})
    Checkpoint(folder)
    assert any("auto_map is ignored" in message for message in caplog.messages)
