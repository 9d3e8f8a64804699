"""The router's process: no torch in it, and little memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.models.toy_tokenizers import byte_tokenizer

PROGRAM = r"""
import re, sys
from router.text.tokenizer import TextTokenizer
from tests.unit.router.client import COMPLETIONS, call
from tests.unit.router.fakes import stack
router = stack(tokenizer=TextTokenizer.load(sys.argv[1]))
assert call(router.app, COMPLETIONS, {"prompt": "a"}).status_code == 200
heavy = [name for name in ("torch", "transformers", "ray", "numpy") if name in sys.modules]
assert not heavy, heavy
print(int(re.search(r"VmHWM:\s+(\d+)", open("/proc/self/status").read())[1]) // 1024)
"""


def test_router_without_torch_in_little_memory(tmp_path: Path) -> None:
    byte_tokenizer().save_pretrained(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=Path(__file__).parents[3],
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 200  # MiB; 450 with Ray's part of a router replica
