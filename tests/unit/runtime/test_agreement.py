"""How ranks come together at the start: who is let in, and what they agree on."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.runtime.links import (
    TIMEOUT_S,
    accept_in_background,
    follower,
    follower_of_silence,
    group,
    raw_follower,
)
from workers.engine.step import GroupFailed
from workers.runtime.agreement import (
    agree_on_files,
    agree_on_identity,
    agree_on_memory,
    are_same_files,
    collectives_of,
    file_facts,
    machine_id,
    memory_facts,
    num_blocks_of,
    shares_attention,
)
from workers.runtime.follower_link import LeaderLost
from workers.runtime.frames import FrameKind, FrameSocket, PeerClosed
from workers.runtime.handshake import join, new_token, pack_facts


def test_strangers_are_dropped_and_ours_still_come_in():
    with group() as made:
        accepting = accept_in_background(made.link)
        for noise in (b"", b"GET / HTTP/1.1\r\n\r\n" * 10, b"\xff" * 64):
            with socket.create_connection(("127.0.0.1", made.rendezvous.control_port)) as stranger:
                stranger.sendall(noise)
        wrong = replace(made.rendezvous, token=new_token())
        impostor = join(wrong, 1, timeout_s=5)
        with pytest.raises(PeerClosed):
            impostor.receive()
        frames = join(made.rendezvous, 1, timeout_s=5)
        accepting.join(5)
        assert not accepting.is_alive()
        assert made.failures == []
        frames.close()


def test_who_comes_early_waits_for_the_others_beyond_the_timeout():
    with group(3) as made:
        accepting = accept_in_background(made.link)
        with follower(made, 1) as early:
            answers: list[dict[str, str | int]] = []
            waiting = threading.Thread(
                target=lambda: answers.append(
                    dict(early.agree(memory_facts(7, shares_attention=True), timeout_s=20))
                )
            )
            waiting.start()
            time.sleep(1.5 * TIMEOUT_S)
            assert waiting.is_alive()
            late = join(made.rendezvous, 2, timeout_s=5)
            accepting.join(5)
            late.send(FrameKind.FACTS, pack_facts(memory_facts(8, shares_attention=True)))
            agreed = made.link.agree(memory_facts(9, shares_attention=True), agree_on_memory, timeout_s=5)
            waiting.join(5)
            assert answers == [agreed] and num_blocks_of(agreed) == 7
            assert shares_attention(agreed)
            late.close()


def test_who_comes_early_and_dies_is_named():
    with group(3) as made:
        reasons: list[str] = []

        def accept() -> None:
            try:
                made.link.accept(20.0)
            except GroupFailed as error:
                reasons.append(str(error))

        accepting = threading.Thread(target=accept)
        accepting.start()
        join(made.rendezvous, 1, timeout_s=5).close()
        accepting.join(10)
        assert len(reasons) == 1 and reasons[0].startswith("rank 1 (pid ") and "died" in reasons[0]


def test_missing_ranks_are_named():
    with (
        group(4) as made,
        pytest.raises(GroupFailed, match=r"ranks \[1, 2, 3\] did not connect within 0.2 s"),
    ):
        made.link.accept(0.2)


def test_ranks_agree_on_the_smallest_pool_and_share_only_where_all_can():
    with group() as made:
        accepting = accept_in_background(made.link)
        with follower(made) as other:
            accepting.join(5)
            answers = []
            thread = threading.Thread(
                target=lambda: answers.append(
                    other.agree(memory_facts(70, shares_attention=False), timeout_s=5)
                )
            )
            thread.start()
            agreed = made.link.agree(memory_facts(90, shares_attention=True), agree_on_memory, timeout_s=5)
            thread.join(5)
            assert num_blocks_of(agreed) == 70
            assert not shares_attention(agreed)  # rank 0 could
            assert answers == [agreed]


def test_a_difference_is_told_to_all_ranks():
    own = {"code": "a", "dtype": "float32", "machine": "m", "device": "cpu"}
    with group() as made:
        accepting = accept_in_background(made.link)
        with follower(made) as other:
            accepting.join(5)
            reasons: list[str] = []

            def agree() -> None:
                try:
                    other.agree({**own, "code": "b", "machine": "n"}, timeout_s=5)
                except LeaderLost as error:
                    reasons.append(str(error))

            thread = threading.Thread(target=agree)
            thread.start()
            with pytest.raises(GroupFailed, match=r"differ in code \(rank 0: a, rank 1: b\)$") as raised:
                made.link.agree(own, agree_on_identity, timeout_s=5)
            thread.join(5)
            assert reasons == [str(raised.value)]


def test_the_very_same_files_are_known_without_reading_them(tmp_path: Path):
    file, copy = tmp_path / "a", tmp_path / "b"
    file.write_bytes(b"weights")
    copy.write_bytes(b"weights")
    same, other = file_facts([file]), file_facts([copy])
    assert are_same_files(agree_on_files({0: same, 1: file_facts([file])}))
    assert not are_same_files(agree_on_files({0: same, 1: other}))
    file.write_bytes(b"Weights")  # as long, at another time
    assert not are_same_files(agree_on_files({0: same, 1: file_facts([file])}))


def test_machines_are_counted():
    facts = [{"code": "a", "machine": name, "device": "cpu"} for name in ("m", "n", "m")]
    assert agree_on_identity(dict(enumerate(facts))) == {"m": 2, "n": 1, "collectives": "gloo"}


@pytest.mark.parametrize(
    ("devices", "collectives"),
    [(("cuda a", "cuda b"), "nccl"), (("cuda a", "cuda a"), "gloo"), (("cpu", "cpu"), "gloo")],
)
def test_nccl_takes_a_gpu_for_each_rank(devices: tuple[str, str], collectives: str) -> None:
    facts = [{"machine": "m", "device": device} for device in devices]
    agreed = agree_on_identity(dict(enumerate(facts)))
    assert collectives_of(agreed) == collectives
    assert {device: agreed.get(device) for device in set(devices)} == {
        device: None if device == "cpu" else devices.count(device) for device in devices
    }


def test_ranks_on_different_kinds_of_devices_are_refused() -> None:
    facts = [{"machine": "m", "device": device} for device in ("cuda a", "cpu")]
    with pytest.raises(GroupFailed, match=r"different kinds of devices \(rank 0: cuda a, rank 1: cpu\)"):
        agree_on_identity(dict(enumerate(facts)))


def test_facts_that_are_no_facts_end_the_start_on_both_sides():
    with group() as made:
        frames = raw_follower(made)
        frames.send(FrameKind.FACTS, b"[1, 2]")
        with pytest.raises(GroupFailed, match=r"rank 1 \(pid \d+\) sent what is no message of ours"):
            made.link.agree({"dtype": "float32"}, agree_on_identity, timeout_s=TIMEOUT_S)
        frames.close()
    link, rank_0 = follower_of_silence(lambda reason: None)
    with contextlib.closing(link), rank_0:
        FrameSocket(rank_0, timeout_s=TIMEOUT_S).send(FrameKind.AGREED, b"no JSON")
        with pytest.raises(LeaderLost, match="rank 0 sent what is no message of ours"):
            link.agree({"dtype": "float32"}, timeout_s=TIMEOUT_S)


def test_a_namespace_of_process_ids_is_a_machine_of_its_own():
    """As in a container: process ids of one namespace mean other processes, or none, in another."""
    program = "from workers.runtime.agreement import machine_id; print(machine_id())"
    command = [sys.executable, "-c", program]
    apart = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc", *command]
    done = [subprocess.run(line, capture_output=True, text=True, timeout=60) for line in (command, apart)]
    if done[1].returncode:
        pytest.skip(f"no namespaces here: {done[1].stderr.strip()}")
    own, other = (run.stdout.strip() for run in done)
    assert own == machine_id()
    assert other != own and other.split()[0] == own.split()[0]
