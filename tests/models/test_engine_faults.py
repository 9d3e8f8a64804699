"""Ranks that die or hang: a clear reason in time, and no process left. Every test proves its fault."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.models import checkpoints
from tests.models.engine_groups import Client, group_config, start_group
from workers.engine.loop import EngineLoop, StepOutput
from workers.engine.step import GroupFailed, SampleTask, SequenceSlice, StepPlan
from workers.runtime import launch
from workers.runtime.executor import GroupExecutor
from workers.runtime.launch import LocalGroup, start_follower
from workers.runtime.order import RankOrder
from workers.runtime.rank import EXIT_CODE, Leader
from workers.runtime.step_codec import encode
from workers.types import FinishReason, GenerateRequest, RequestId, SamplingParams

TIMEOUT_S = 2.0
LONG = SamplingParams(max_tokens=240, temperature=0.0)
ROOT = Path(__file__).parents[2]
# Operator by operator, and in one call, where ranks do attention and draw for each other.
IN_ANY_STEP = pytest.mark.parametrize("group", ["float32", "bfloat16"], indirect=True)


def state(pid: int) -> str:
    """The state byte of a process; X when it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "X"


def wait_until(done: Callable[[], bool], timeout_s: float, what: str) -> float:
    """Seconds it took."""
    start = time.monotonic()
    while not done():
        assert time.monotonic() - start < timeout_s, f"not within {timeout_s} s: {what}"
        time.sleep(0.01)
    return time.monotonic() - start


@pytest.fixture
def group(family_folder: Callable[[str], Path], request: pytest.FixtureRequest) -> Iterator[LocalGroup]:
    """Its parameter: the dtype."""
    dtype = getattr(request, "param", "float32")
    with start_group(family_folder("llama"), 2, dtype=dtype, step_timeout_s=TIMEOUT_S) as started:
        yield started
    assert all(process.poll() is not None for process in started.followers)


def one_step() -> StepPlan:
    task = SampleTask(params=LONG, choice=0, prompt_token_ids=(5,), output_token_ids=())
    return StepPlan(number=1, slices=[SequenceSlice(token_ids=(5,), start=0, block_table=(0,), sample=task)])


class Running:
    """An engine loop that generates for ever, and what it said."""

    def __init__(self, group: LocalGroup) -> None:
        self.outputs: list[StepOutput] = []
        self.loop = EngineLoop(Client(group.facts, group.executor).engine, self.outputs.append)
        self.loop.start()
        for number in range(3):
            self.loop.submit(
                GenerateRequest(
                    request_id=RequestId(f"r{number}"), prompt_token_ids=(7, 8, 9 + number), sampling=LONG
                )
            )
        wait_until(lambda: self.num_tokens() > 10, 10, "tokens are flowing")

    def num_tokens(self) -> int:
        return sum(len(chunk.token_ids) for output in list(self.outputs) for chunk in output.chunks)

    def ends(self) -> list[tuple[RequestId, FinishReason, str | None]]:
        return sorted(
            (chunk.request_id, chunk.finish_reason, chunk.error_code)
            for output in list(self.outputs)
            for chunk in output.chunks
            if chunk.finish_reason is not None
        )

    def expect_failure(self, within_s: float) -> str:
        wait_until(lambda: self.loop.failure is not None, within_s, "the loop reports the failure")
        wait_until(lambda: len(self.ends()) == 3, 1.0, "every request has its end")
        assert self.ends() == [
            (RequestId(f"r{number}"), FinishReason.ERROR, "engine_dead") for number in range(3)
        ]
        assert self.outputs[-1].failure == self.loop.failure
        self.loop.stop(5)
        assert self.loop.failure is not None
        return self.loop.failure


def test_killed_while_idle(group: LocalGroup) -> None:
    (follower,) = group.followers
    follower.kill()
    took = wait_until(lambda: group.failure is not None, 1.0, "the watchdog notices")
    assert took < 1.0 and follower.wait(1) == -signal.SIGKILL
    assert group.failure is not None and f"rank 1 (pid {follower.pid}) died" in group.failure
    with pytest.raises(GroupFailed, match=f"rank 1 .pid {follower.pid}. died"):
        group.executor.execute(one_step())


@IN_ANY_STEP
def test_killed_while_computing(group: LocalGroup) -> None:
    (follower,) = group.followers
    running = Running(group)
    follower.kill()
    reason = running.expect_failure(within_s=1.5)
    assert follower.wait(1) == -signal.SIGKILL
    assert f"rank 1 (pid {follower.pid}) died" in reason


def test_killed_while_rank_0_waits_in_a_collective(group: LocalGroup) -> None:
    """The follower is stopped first, so that rank 0 is surely inside the step when it dies."""
    (follower,) = group.followers
    os.kill(follower.pid, signal.SIGSTOP)
    wait_until(lambda: state(follower.pid) == "T", 1, "stopped")
    raised: list[str] = []

    def step() -> None:
        try:
            group.executor.execute(one_step())
        except GroupFailed as error:
            raised.append(str(error))

    thread = threading.Thread(target=step)
    thread.start()
    time.sleep(0.3)
    assert thread.is_alive() and not raised
    follower.kill()
    thread.join(1.5)
    assert not thread.is_alive()
    assert len(raised) == 1 and f"rank 1 (pid {follower.pid}) died" in raised[0]


@IN_ANY_STEP
def test_stopped_while_computing(group: LocalGroup) -> None:
    (follower,) = group.followers
    running = Running(group)
    os.kill(follower.pid, signal.SIGSTOP)
    wait_until(lambda: state(follower.pid) == "T", 1, "stopped")
    start = time.monotonic()
    reason = running.expect_failure(within_s=TIMEOUT_S + 1.5)
    assert state(follower.pid) == "T"  # it was still stopped, not dead, when it was given up
    assert time.monotonic() - start < TIMEOUT_S + 1.5
    assert "rank 1" in reason and str(follower.pid) in reason


def test_stopped_while_idle_and_continued_too_late(group: LocalGroup) -> None:
    (follower,) = group.followers
    os.kill(follower.pid, signal.SIGSTOP)
    wait_until(lambda: state(follower.pid) == "T", 1, "stopped")
    wait_until(lambda: group.failure is not None, TIMEOUT_S + 1, "the watchdog notices")
    assert group.failure is not None and "silent" in group.failure
    os.kill(follower.pid, signal.SIGCONT)
    with pytest.raises(GroupFailed, match="silent"):
        group.executor.execute(one_step())
    closer = threading.Thread(target=group.close)
    closer.start()
    closer.join(5)
    assert not closer.is_alive() and follower.returncode is not None


def test_a_hung_step_ends_by_the_timeout_of_the_collective(group: LocalGroup) -> None:
    """The follower begins a step that rank 0 does not compute: its collective gives up and it says so."""
    assert isinstance(group.executor, GroupExecutor)
    group.executor._link.send_step(encode(one_step(), group.facts.block_size))
    took = wait_until(lambda: group.failure is not None, TIMEOUT_S + 3, "the follower gives up")
    assert took > TIMEOUT_S / 2
    assert group.failure is not None and "rank 1" in group.failure
    (follower,) = group.followers
    assert follower.wait(5) == EXIT_CODE


def leader_process(folder: Path, mode: str) -> tuple[subprocess.Popen[str], int]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.models.engine_leader", str(folder), str(TIMEOUT_S), mode],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    (follower,) = json.loads(process.stdout.readline())
    assert state(follower) in "SRD"
    return process, follower


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate(timeout=5)


@pytest.mark.parametrize("mode", ["idle", "busy"])
def test_rank_0_killed(family_folder: Callable[[str], Path], mode: str) -> None:
    process, follower = leader_process(family_folder("llama"), mode)
    time.sleep(0.3)
    end(process)
    assert process.returncode == -signal.SIGKILL
    wait_until(lambda: state(follower) in "XZ", TIMEOUT_S + 2, "the follower ends")


@pytest.mark.parametrize("mode", ["idle", "busy"])
def test_rank_0_stopped(family_folder: Callable[[str], Path], mode: str) -> None:
    process, follower = leader_process(family_folder("llama"), mode)
    time.sleep(0.3)
    process.send_signal(signal.SIGSTOP)
    wait_until(lambda: state(process.pid) == "T", 1, "stopped")
    wait_until(lambda: state(follower) in "XZ", 2 * TIMEOUT_S + 2, "the follower ends")
    assert state(process.pid) == "T"
    end(process)


@pytest.mark.parametrize("mode", ["idle", "busy"])
def test_a_rank_process_ends_with_its_group(family_folder: Callable[[str], Path], mode: str) -> None:
    """The default reaction of rank 0's process: the reason on stderr, the agreed exit code, in time."""
    process, follower = leader_process(family_folder("llama"), mode)
    os.kill(follower, signal.SIGKILL)
    start = time.monotonic()
    process.wait(10)
    assert process.stderr is not None
    errors = process.stderr.read()
    assert time.monotonic() - start < 4
    assert process.returncode in (EXIT_CODE, 1)  # 1: the step raised before the watchdog ended the process
    assert f"rank 1 (pid {follower}) died" in errors
    end(process)


def test_ranks_that_see_different_files_do_not_start(
    family_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    """One bit of one weight differs in the copy of rank 1."""
    folder = family_folder("llama")
    for file in folder.iterdir():
        content = bytearray(file.read_bytes())
        if file.suffix == ".safetensors":
            content[-5] ^= 1
        (tmp_path / file.name).write_bytes(content)
    config = group_config(folder, 2)
    leader = Leader(config, on_failure=lambda reason: None)
    other = replace(config, model=replace(config.model, path=str(tmp_path)))
    follower = start_follower(RankOrder(config=other, rank=1, rendezvous=leader.rendezvous))
    with pytest.raises(GroupFailed, match=r"differ in checkpoint \(rank 0: [0-9a-f]+, rank 1: [0-9a-f]+\)"):
        leader.load()
    leader.close()
    assert follower.wait(10) == EXIT_CODE


def test_a_follower_that_dies_while_loading(family_folder: Callable[[str], Path]) -> None:
    config = group_config(family_folder("llama"), 2)
    leader = Leader(config, on_failure=lambda reason: None)
    broken = replace(config, model=replace(config.model, path="/nowhere"))
    follower = start_follower(RankOrder(config=broken, rank=1, rendezvous=leader.rendezvous))
    with pytest.raises(
        GroupFailed, match=r"rank 1 .* failed: CheckpointError: /nowhere: no such model folder"
    ):
        leader.load()
    leader.close()
    assert follower.wait(10) == EXIT_CODE


@pytest.mark.parametrize(("end", "how"), [("sys.exit(3)", "with code 3"), ("os.abort()", "by signal 6")])
def test_a_follower_that_dies_before_it_joins_is_not_waited_for(
    family_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, end: str, how: str
) -> None:
    def start_one_that_dies(order: RankOrder) -> subprocess.Popen[str]:
        return subprocess.Popen([sys.executable, "-c", f"import os, sys; {end}"], text=True)

    monkeypatch.setattr(launch, "start_follower", start_one_that_dies)
    began_s = time.monotonic()
    with pytest.raises(GroupFailed, match=rf"rank 1 \(pid \d+\) ended {how} before it joined its group"):
        start_group(family_folder("llama"), 2)
    assert time.monotonic() - began_s < 20.0


def test_groups_come_and_go_in_one_process(family_folder: Callable[[str], Path]) -> None:
    prompt = checkpoints.graded_prompts()[2]
    found = []
    for _ in range(2):
        with start_group(family_folder("llama"), 2, step_timeout_s=TIMEOUT_S) as group:
            found.append(Client(group.facts, group.executor).generate([prompt])[0].token_ids)
        assert [process.returncode for process in group.followers] == [0]
    assert found[0] == found[1]
