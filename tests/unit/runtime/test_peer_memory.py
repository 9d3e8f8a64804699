"""What can be seen of torch's symmetric memory without a GPU: its operators, and the way out of a wait."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from workers.runtime.peer_memory import TorchPeers, let_go

PATIENCE_S = 20.0


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("one_shot_all_reduce_out", ["input", "reduce_op", "group_name", "out"]),
        ("two_shot_all_reduce_", ["input", "reduce_op", "group_name"]),
    ],
)
def test_torch_has_the_operators(name: str, arguments: list[str]) -> None:
    schema = getattr(torch.ops.symm_mem, name).default._schema
    assert [each.name for each in schema.arguments] == arguments


def test_a_torch_without_cuda_refuses() -> None:
    if torch.version.cuda is not None:
        pytest.skip("this torch knows CUDA")
    with pytest.raises(RuntimeError):
        TorchPeers(torch.device("cuda", 0)).reachable()


@pytest.mark.parametrize(("size", "rank"), [(2, 0), (3, 1), (4, 3)])
def test_what_waits_for_ranks_that_are_gone_goes_on(size: int, rank: int) -> None:
    """The kernels of one rank, here a thread, as torch's have it: a signal to each peer, then one of each."""
    pads = [torch.zeros(2, size, dtype=torch.int32) for _ in range(size)]
    gives_up = threading.Event()
    done: list[int] = []

    def wait(pad: torch.Tensor, channel: int, column: int, wanted: int) -> None:
        while not gives_up.is_set():
            if pad[channel, column].item() == wanted:
                pad[channel, column] = 1 - wanted
                return

    def kernel(channel: int) -> None:
        for number in range(20):
            for peer in range(size):
                wait(pads[peer], channel, rank, 0)
            for peer in range(size):
                wait(pads[rank], channel, peer, 1)
            if gives_up.is_set():
                return
            done.append(number)

    threads = [threading.Thread(target=kernel, args=(channel,)) for channel in range(2)]
    for thread in threads:
        thread.start()
    time.sleep(0.05)
    assert done == []  # nobody answers
    deadline = time.monotonic() + PATIENCE_S
    while any(thread.is_alive() for thread in threads) and time.monotonic() < deadline:
        let_go(pads[rank], pads, rank)
        time.sleep(0.001)
    gives_up.set()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert sorted(done) == sorted([*range(20), *range(20)])
