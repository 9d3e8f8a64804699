"""Checkpoints in GPTQ, AWQ and fp8, against transformers in float32 on the values they stand for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models import checkpoints
from tests.models.loading import logits_of, paged_model
from tests.models.oracle import Oracle
from tests.models.quantized_checkpoints import FORMS, Made, form, make
from tests.models.ranks import Found, Work, run_ranks
from workers.kernels import Quantization
from workers.model.checkpoint import Checkpoint
from workers.model.errors import CheckpointError
from workers.model.files import SINGLE_FILE
from workers.model.weights import WeightReader

NAMES = [entry.name for entry in FORMS]
KEPT = ["gptq", "awq"]  # whose codes stay in bfloat16
TEXT = checkpoints.prompt_ids(40)
PROMPTS = [checkpoints.prompt_ids(length, seed=length) for length in (7, 40)]
NUM_TOKENS = 16
GATE, DOWN, OUTPUT = (
    f"model.layers.0.{name}.weight" for name in ("mlp.gate_proj", "mlp.down_proj", "self_attn.o_proj")
)
CPU = torch.device("cpu")
Maker = Callable[[str, str], Made]


@pytest.fixture(scope="module")
def made(family_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Maker:
    """A family's checkpoint in a form, by their names."""
    found: dict[tuple[str, str], Made] = {}

    def of(family: str, name: str) -> Made:
        if (family, name) not in found:
            found[family, name] = make(tmp_path_factory.mktemp(name), family_folder(family), form(name))
        return found[family, name]

    return of


@pytest.fixture(scope="module")
def two_ranks(made: Maker, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Found]:
    works = [
        Work(folder=str(made("llama", name).folder), texts=[TEXT], prompts=PROMPTS, num_tokens=NUM_TOKENS)
        for name in NAMES
    ]
    works += [
        Work(
            folder=str(made("llama", name).folder),
            texts=[TEXT],
            prompts=PROMPTS,
            num_tokens=NUM_TOKENS,
            dtype="bfloat16",
            quantization="auto",
        )
        for name in KEPT
    ]
    names = [*NAMES, *(f"{name} kept" for name in KEPT)]
    return dict(zip(names, run_ranks(tmp_path_factory.mktemp("two"), 2, works), strict=True))


def greedy_of(oracle: Oracle) -> list[list[int]]:
    found = [oracle.continuation(prompt, NUM_TOKENS) for prompt in PROMPTS]
    assert min(each.margin for each in found) > 1e-3
    return [each.token_ids for each in found]


@pytest.mark.parametrize("name", NAMES)
def test_one_and_two_ranks_equal_transformers(name: str, made: Maker, two_ranks: dict[str, Found]) -> None:
    """Inner size 96 over two ranks: the second begins inside a group of 32 and inside a block of 40."""
    checkpoint = made("llama", name)
    oracle = Oracle(checkpoint.plain)
    wanted, tokens = oracle.logits(TEXT), greedy_of(oracle)
    model = paged_model(checkpoint.folder, quantization=Quantization.AUTO)
    torch.testing.assert_close(logits_of(model, TEXT), wanted, atol=1e-4, rtol=0)
    assert model.greedy(PROMPTS, NUM_TOKENS) == tokens
    torch.testing.assert_close(two_ranks[name].logits[0], wanted, atol=1e-4, rtol=0)
    assert two_ranks[name].ids == tokens


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("qwen2", "gptq_order"),
        ("qwen3", "awq"),
        ("llama_biased", "fp8_block"),
        ("llama_biased", "gptq_8"),
        ("gpt2", "gptq_asymmetric"),
    ],
)
def test_other_families(family: str, name: str, made: Maker) -> None:
    checkpoint = made(family, name)
    wanted = Oracle(checkpoint.plain).logits(TEXT)
    torch.testing.assert_close(logits_of(paged_model(checkpoint.folder), TEXT), wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize("left_out", ["model.layers.0.", "model.layers.1.mlp.down_proj"])
def test_layers_left_out_are_read_as_they_are(
    left_out: str, family_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    checkpoint = make(tmp_path, family_folder("llama"), form("gptq_asymmetric"), left_out=left_out)
    wanted = Oracle(checkpoint.plain).logits(TEXT)
    found = logits_of(paged_model(checkpoint.folder, quantization=Quantization.AUTO), TEXT)
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["gptq", "gptq_asymmetric", "gptq_v2", "gptq_whole", "awq"])
def test_codes_of_4_bits_stay_as_they_are(name: str, made: Maker) -> None:
    """Bit for bit, in our groups of 32; only a minimum that half precision does not hold is rounded."""
    checkpoint = made("llama", name)
    plain = load_file(checkpoint.plain / SINGLE_FILE)
    with WeightReader(Checkpoint(checkpoint.folder), torch.bfloat16, CPU) as reader:
        for matrix in (GATE, DOWN, OUTPUT):
            kept = reader.kept(matrix)
            assert kept is not None and kept.quantization is Quantization.INT4
            steps = kept.scales.float().repeat_interleave(32, dim=1)
            error = (kept.values() - plain[matrix]).abs()
            is_power_of_two = name in ("gptq", "gptq_whole")  # symmetric: the zero is 8
            assert float((error / steps).max()) <= (0 if is_power_of_two else 1 / 128)


@pytest.mark.parametrize(
    "name",
    [
        "gptq_order",  # neighbours of different groups
        "awq_16",  # groups smaller than ours
        "gptq_8",
        "fp8",
    ],
)
def test_what_4_bits_do_not_hold_is_kept_as_values(name: str, made: Maker) -> None:
    """On every rank, also on one whose own inputs would be held."""
    checkpoint = made("llama", name)
    for matrix, inputs in ((GATE, None), (DOWN, range(16))):
        wanted = load_file(checkpoint.plain / SINGLE_FILE)[matrix]
        with WeightReader(Checkpoint(checkpoint.folder), torch.float32, CPU) as reader:
            assert reader.kept(matrix, inputs=inputs) is None
            found = reader.matrix(matrix, inputs=inputs)
        assert torch.equal(found, wanted if inputs is None else wanted[:, :16])


@pytest.mark.parametrize("name", ["gptq", "gptq_asymmetric", "awq"])
@pytest.mark.parametrize("inputs", [range(48), range(48, 96), range(40, 41)], ids=str)
def test_a_part_has_the_codes_of_the_whole(name: str, inputs: range, made: Maker) -> None:
    """Also one that begins or ends inside a group."""
    with WeightReader(Checkpoint(made("llama", name).folder), torch.bfloat16, CPU) as reader:
        whole, part = reader.kept(DOWN), reader.kept(DOWN, inputs=inputs)
    assert whole is not None and part is not None
    assert torch.equal(part.codes, whole.codes[:, inputs.start : inputs.stop])
    assert torch.equal(part.values(), whole.values()[:, inputs.start : inputs.stop])


@pytest.mark.parametrize("setting", ["auto", "int4", "int8", "none"])
def test_what_a_setting_does_in_bfloat16(setting: str, made: Maker) -> None:
    """Logits have a spread of 1: `auto` and `int4` compute with the codes, all stay near."""
    checkpoint = made("llama", "awq")
    model = paged_model(checkpoint.folder, dtype=torch.bfloat16, quantization=Quantization(setting))
    error = (logits_of(model, TEXT) - Oracle(checkpoint.plain).logits(TEXT)).abs()
    assert float(error.mean()) < 0.04 and float(error.max()) < 0.3


@pytest.mark.parametrize("name", KEPT)
def test_two_ranks_compute_with_the_codes(name: str, made: Maker, two_ranks: dict[str, Found]) -> None:
    """The second rank begins inside a group of 32 inputs."""
    checkpoint, found = made("llama", name), two_ranks[f"{name} kept"]
    model = paged_model(checkpoint.folder, dtype=torch.bfloat16, quantization=Quantization.AUTO)
    assert torch.equal(found.logits[0], logits_of(model, TEXT))
    assert found.ids == model.greedy(PROMPTS, NUM_TOKENS)
    error = (found.logits[0] - Oracle(checkpoint.plain).logits(TEXT)).abs()
    assert float(error.mean()) < 0.04 and float(error.max()) < 0.3


@pytest.mark.parametrize(
    ("name", "left_out", "setting", "said"),
    [
        ("gptq", None, "auto", None),
        ("gptq_order", None, "none", None),
        ("gptq_order", None, "int8", None),
        ("gptq_order", None, "auto", "14 matrices of rank 0 are held in bfloat16:"),
        ("gptq_order", None, "int4", "14 matrices of rank 0 are held in int4, rounded once more:"),
        # Queries, keys and values are held together.
        ("gptq", "model.layers.0.self_attn.q_proj", "auto", "2 matrices of rank 0 are held in bfloat16:"),
    ],
)
def test_the_log_says_what_did_not_keep_its_codes(
    name: str,
    left_out: str | None,
    setting: str,
    said: str | None,
    family_folder: Callable[[str], Path],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = make(tmp_path, family_folder("llama"), form(name), left_out=left_out).folder
    paged_model(folder, dtype=torch.bfloat16, quantization=Quantization(setting))
    lines = [record.getMessage() for record in caplog.records if record.name == "workers.model.loader"]
    assert len(lines) == (said is not None) and all(f"{folder}: {said}" in line for line in lines)


def test_auto_is_none_where_nothing_is_in_few_bits(made: Maker, family_folder: Callable[[str], Path]) -> None:
    plain, fp8, awq = (
        Checkpoint(folder)
        for folder in (family_folder("llama"), made("llama", "fp8").folder, made("llama", "awq").folder)
    )
    settings = ("auto", "none", "int8", "int4")
    assert [plain.quantization(setting) for setting in settings] == ["none", "none", "int8", "int4"]
    assert [fp8.quantization(setting) for setting in settings] == ["none", "none", "int8", "int4"]
    assert [awq.quantization(setting) for setting in settings] == list(settings)
    assert plain.model_hash("auto") == plain.model_hash("none")
    assert len({awq.model_hash(setting) for setting in settings}) == 4


def test_forms_in_which_weights_are_held(made: Maker, family_folder: Callable[[str], Path]) -> None:
    """Of a head, too: GPTQ and AWQ mostly leave it as it is."""
    plain, awq = Checkpoint(family_folder("llama")), Checkpoint(made("llama", "awq").folder)
    settings = ("auto", "none", "int8", "int4")
    none, int8, int4 = Quantization.NONE, Quantization.INT8, Quantization.INT4
    explicit = [(none, none), (int8, int8), (int4, int8)]
    for dtype in ("bfloat16", "float32"):
        assert [plain.forms(setting, dtype) for setting in settings] == [(none, none), *explicit]
    assert [awq.forms(setting, "bfloat16") for setting in settings] == [(int4, none), *explicit]
    assert [awq.forms(setting, "float32") for setting in settings] == [(none, none), *explicit]


def change(folder: Path, name: str, edit: Callable[[torch.Tensor], torch.Tensor]) -> None:
    tensors = load_file(folder / SINGLE_FILE)
    tensors[name] = edit(tensors[name])
    save_file(tensors, folder / SINGLE_FILE, metadata={"format": "pt"})


@pytest.fixture
def fresh(tmp_path: Path, family_folder: Callable[[str], Path]) -> Callable[[str], Path]:
    """A llama checkpoint in a form, to be damaged."""
    return lambda name: make(tmp_path, family_folder("llama"), form(name)).folder


def test_a_bias_that_is_not_zero_is_no_part_of_the_model(fresh: Callable[[str], Path]) -> None:
    folder, name = fresh("gptq"), "model.layers.1.mlp.up_proj.bias"
    change(folder, name, lambda bias: bias + 1)
    with pytest.raises(CheckpointError, match=f"not part of this model: {name}"):
        Checkpoint(folder)


def test_a_bias_of_zeros_has_the_size_of_the_matrix(fresh: Callable[[str], Path]) -> None:
    folder, name = fresh("gptq"), "model.layers.1.mlp.up_proj.bias"
    change(folder, name, lambda bias: bias.repeat(2))
    with pytest.raises(CheckpointError, match=f"not part of this model: {name}"):
        Checkpoint(folder)


def test_parts_that_do_not_fit_are_listed_together(fresh: Callable[[str], Path]) -> None:
    folder = fresh("gptq")
    change(folder, "model.layers.0.mlp.up_proj.scales", lambda scales: scales[:1].clone())
    change(folder, "model.layers.0.mlp.down_proj.qzeros", lambda zeros: zeros.float())
    change(folder, "model.layers.1.mlp.up_proj.qweight", lambda codes: codes[1:].clone())
    with pytest.raises(CheckpointError) as caught:
        Checkpoint(folder)
    assert str(caught.value) == (
        f"{folder}: 3 differences between config.json and the weight files:\n"
        "  model.layers.0.mlp.up_proj.scales has shape [1, 96], the config needs [2, 96]\n"
        "  model.layers.0.mlp.down_proj.qzeros has dtype F32, supported are I32\n"
        "  model.layers.1.mlp.up_proj.qweight has shape [7, 96], the config needs [8, 96]"
    )


def test_an_order_that_is_missing_or_leads_nowhere(fresh: Callable[[str], Path]) -> None:
    folder = fresh("gptq_order")
    change(folder, "model.layers.0.mlp.up_proj.g_idx", lambda groups: groups + 1)
    with pytest.raises(CheckpointError, match=r"up_proj\.g_idx names groups outside of 0 to 1"):
        paged_model(folder)
    tensors = load_file(folder / SINGLE_FILE)
    del tensors["model.layers.0.mlp.up_proj.g_idx"]
    save_file(tensors, folder / SINGLE_FILE, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"missing model\.layers\.0\.mlp\.up_proj\.g_idx \[64\]"):
        Checkpoint(folder)


@pytest.mark.parametrize(
    ("name", "part", "dtype"),
    [
        ("awq", "scales", torch.float32),
        ("awq", "scales", torch.bfloat16),
        ("fp8_block", "weight_scale_inv", torch.float32),
    ],
)
def test_scales_that_are_not_finite_are_named(
    name: str, part: str, dtype: torch.dtype, fresh: Callable[[str], Path]
) -> None:
    folder, stem = fresh(name), "model.layers.1.mlp.down_proj"
    change(folder, f"{stem}.{part}", lambda scales: scales.clone().fill_(float("nan")))
    with pytest.raises(CheckpointError, match=f"tensor {stem}.weight holds NaN or infinite values"):
        paged_model(folder, dtype=dtype, quantization=Quantization.AUTO)
