"""The engine runs where nothing but Python is installed."""

from __future__ import annotations

import subprocess
import sys

_PROGRAM = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "numpy", "ray", "pydantic", "fastapi", "msgspec"}:
            raise ImportError(name + " is blocked")
        return None

sys.meta_path.insert(0, Blocked())
import workers.engine.loop
print("ok")
"""


def test_engine_needs_only_the_standard_library() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.stdout, done.returncode) == ("ok\n", 0), done.stderr
