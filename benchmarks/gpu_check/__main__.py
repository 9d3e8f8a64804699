"""Runs the parts one after the other, shows the table, writes the JSON."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

from benchmarks.gpu_check.findings import Finding, Kind, read
from benchmarks.gpu_check.settings import Settings

# In the order of the run: what is late is cut first.
_LIMITS_S = {
    "kernels": 130.0,
    "llama": 240.0,
    "repeat": 80.0,
    "ranks": 140.0,
    "mistral": 80.0,
    "model": 80.0,
    "flashinfer": 200.0,  # it compiles its kernels
}
_WHOLE_S = 470.0
_LAST_LINES = 15  # of a part's errors


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What came of one."""

    name: str
    seconds: float
    has_ended: bool
    findings: list[Finding]
    error: str  # its last lines, when it did not end

    @property
    def is_good(self) -> bool:
        return self.has_ended and all(each.is_met for each in self.findings if each.kind is Kind.CHECK)


def main(arguments: Sequence[str]) -> int:
    options = _parser().parse_args(arguments)
    names = part_names(options.parts, has_model=bool(options.model))
    started = time.monotonic()
    parts = []
    with tempfile.TemporaryDirectory(
        prefix="gpu-check-",
        dir=options.scratch,
        ignore_cleanup_errors=True,  # a part that could not be killed may write on
    ) as folder:
        for name in names:
            settings = Settings(is_dry=options.dry, folder=f"{folder}/{name}", model=options.model)
            left_s = _WHOLE_S - (time.monotonic() - started)
            part = run_part(name, settings, max(1.0, min(_LIMITS_S[name], left_s)))
            show(part)
            parts.append(part)
    seconds = time.monotonic() - started
    write(Path(options.out), parts, seconds, is_dry=options.dry)
    return 0 if summarise(parts, seconds) else 1


def part_names(wanted: Sequence[str] | None, *, has_model: bool) -> list[str]:
    """Each once. wanted: None for all; `model` is one of them where there is a model."""
    names = [name for name in _LIMITS_S if name != "model"] if wanted is None else wanted
    return list(dict.fromkeys([*names, *(["model"] if has_model else [])]))


def run_part(name: str, settings: Settings, limit_s: float) -> Part:
    """In a process group of its own, which is killed when it ends or the time is over."""
    Path(settings.folder).mkdir(parents=True)
    out, errors = Path(settings.folder, "out"), Path(settings.folder, "errors")
    environment = dict(os.environ)
    if settings.is_dry and name == "kernels":
        environment["TRITON_INTERPRET"] = "1"  # read by Triton when a kernel is defined
    began = time.monotonic()
    with out.open("wb") as stdout, errors.open("wb") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.gpu_check.part", name],
            stdin=subprocess.PIPE,
            stdout=stdout,
            stderr=stderr,
            env=environment,
            start_new_session=True,
        )
        reason = ""
        try:
            process.communicate(settings.to_json().encode(), timeout=limit_s)
        except subprocess.TimeoutExpired:
            reason = f"stopped after {limit_s:.0f} s\n"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)  # one that a driver holds ends when it is let go
    findings = read(out.read_text(errors="replace").splitlines())
    has_ended = any(each.kind is Kind.END for each in findings)
    lines = errors.read_text(errors="replace").splitlines()[-_LAST_LINES:]
    return Part(
        name=name,
        seconds=time.monotonic() - began,
        has_ended=has_ended,
        findings=[each for each in findings if each.kind is not Kind.END],
        error="" if has_ended else reason + "\n".join(lines),
    )


def show(part: Part) -> None:
    checks = [each for each in part.findings if each.kind is Kind.CHECK]
    good = sum(each.is_met for each in checks)
    print(f"{part.name}: {good} of {len(checks)} checks, {part.seconds:.0f} s")
    for each in part.findings:
        if each.kind is Kind.FIGURE or not each.is_met:
            mark = "" if each.kind is Kind.FIGURE else " MISSED" if each.kind is Kind.TARGET else " WRONG"
            values = "  ".join(f"{name} {value:.4g}" for name, value in each.values.items())
            print(f"  {each.name:<44}{mark} {each.detail}  {values}".rstrip())
    if part.error:
        print("  did not end:\n    " + part.error.replace("\n", "\n    "))
    sys.stdout.flush()


def summarise(parts: Sequence[Part], seconds: float) -> bool:
    """Whether all is right."""
    bad = [part.name for part in parts if not part.is_good]
    missed = sum(not each.is_met for part in parts for each in part.findings if each.kind is Kind.TARGET)
    print(f"{seconds:.0f} s; wrong: {', '.join(bad) or 'nothing'}; targets missed: {missed}")
    return not bad


def write(path: Path, parts: Sequence[Part], seconds: float, *, is_dry: bool) -> None:
    record = {
        "is_dry": is_dry,
        "seconds": seconds,
        "machine": platform.node(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("torch", "triton", "transformers", "numpy")},
        "gpu": _gpu(),
        "parts": [
            asdict(part) | {"findings": [json.loads(each.to_line()) for each in part.findings]}
            for part in parts
        ],
    }
    path.write_text(json.dumps(record, indent=1) + "\n")


def _gpu() -> str:
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"],
            capture_output=True, text=True, timeout=20, check=False,
        )  # fmt: skip
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_check", description=__doc__)
    parser.add_argument("--dry", action="store_true", help="tiny shapes on the CPU")
    parser.add_argument("--out", default="gpu_check.json", help="file for all findings")
    parser.add_argument("--model", default="", help="folder of a real checkpoint to compare as well")
    parser.add_argument("--parts", nargs="+", choices=tuple(_LIMITS_S), help="these alone")
    parser.add_argument("--scratch", help="folder with room for 21 GB; default: the temporary one")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
