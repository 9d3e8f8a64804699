"""deploy/local-disaggregated.yaml: answers are those of one pool, blocks really travel, and neither deaths of
groups nor clients that leave strand any."""

from __future__ import annotations

import concurrent.futures
import json
import os
import random
import re
import signal
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from cluster.launch.local_cluster import LocalCluster
from tests.cases import serving as one_process
from tests.integration.serving import Serving, serving, tiny_llama, wait_for

pytestmark = pytest.mark.integration

COMPLETIONS = "/v1/completions"
BLOCK, NUM_BLOCKS = 16, 256  # of each pool
MAX_MODEL_LEN = 4096
BIG_PROMPT = NUM_BLOCKS * BLOCK * 9 // 10
LENGTHS = (1, 15, 16, 17, 200)
REBUILD_S, IDLE_S = 40.0, 10.0
COMMON: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True, "return_token_ids": True}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 1.0, "seed": 11},
    "two choices": {"temperature": 1.0, "seed": 5, "n": 2},
    "logprobs": {"temperature": 0, "logprobs": 2},
    "stop string": {"temperature": 0, "include_stop_str_in_output": False},
    "prompt logprobs": {"temperature": 0, "logprobs": 1, "echo": True},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("llama"), MAX_MODEL_LEN)


@pytest.fixture(scope="module")
def unified(folder: Path) -> Iterator[one_process.Serving]:
    """The same model as one group, in this process."""
    with one_process.serving(folder, num_blocks=1024) as unified:
        yield unified


@pytest.fixture(scope="module")
def settings(folder: Path) -> list[str]:
    """Every block of a prompt that a decode group lacks is worth reading, however few there are."""
    settings = [f"model.path={folder}", "model.dtype=float32"]
    settings += ["router.placement.interference_weight=1000", "router.placement.transfer_ms=0"]
    for pool in ("prefill", "decode"):
        settings += [
            f"pools.{pool}.cache.num_blocks={NUM_BLOCKS}",
            f"pools.{pool}.parallel.threads_per_rank=1",
        ]
    return settings


@pytest.fixture(scope="module")
def server(cluster: LocalCluster, http_port: int, settings: list[str]) -> Iterator[Serving]:
    with serving(cluster, http_port, "local-disaggregated.yaml", settings) as server:
        wait_for(lambda: set(ready(server)) == {"prefill", "decode"}, 30.0, "a group is not ready")
        yield server


def ready(server: Serving) -> dict[str, dict[str, Any]]:
    """Groups that answer, by role."""
    return {group["role"]: group for group in server.groups() if group["ready"]}


def is_idle(server: Serving) -> bool:
    """Whether both groups are there and hold nothing."""
    return len(ready(server)) == 2 and server.is_idle()


def prompt(seed: str, num_tokens: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(3, 128) for _ in range(num_tokens)]


def ask(server: Serving, body: Mapping[str, Any]) -> dict[str, Any]:
    answer = server.post(COMPLETIONS, body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def assert_same(found: Mapping[str, Any], expected: Mapping[str, Any], label: object = "") -> None:
    """Two answers say the same, log-probabilities to four places."""
    words, numbers = parts(found)
    expected_words, expected_numbers = parts(expected)
    assert words == expected_words, label
    assert numbers == pytest.approx(expected_numbers, abs=1e-4), label


def parts(answer: Mapping[str, Any]) -> tuple[Any, list[float]]:
    """Choices and usage without their log-probabilities, and these."""
    numbers: list[float] = []

    def without(value: Any) -> Any:
        if isinstance(value, float):
            numbers.append(value)
            return None
        if isinstance(value, Mapping):
            return {key: without(entry) for key, entry in value.items()}
        return [without(entry) for entry in value] if isinstance(value, list) else value

    return without([answer["choices"], answer["usage"]]), numbers


def group_counts(server: Serving, role: str) -> dict[str, float]:
    """Totals of the group of a role, by metric, and by metric and source of tokens."""
    group = ready(server)[role]["group"]
    lines = server.get("/metrics").text.splitlines()
    counts: dict[str, float] = {}
    for line in lines:
        if f'group="{group}"' in line and "_total{" in line:
            name = line.partition("{")[0].removeprefix("tandem_").removesuffix("_total")
            source = re.search(r'source="(\w+)"', line)
            for key in (name, f"{name} {source[1]}") if source else (name,):
                counts[key] = counts.get(key, 0.0) + float(line.rpartition(" ")[2])
    return counts


def read_tokens(server: Serving) -> float:
    """Prompt tokens whose blocks have come to the decode group."""
    return group_counts(server, "decode")["kv_fetched_tokens"]


def whole_blocks(num_tokens: int) -> int:
    """Prompt tokens in blocks that can be read: the last token is always computed."""
    return (num_tokens - 1) // BLOCK * BLOCK


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_those_of_one_pool(server: Serving, unified: one_process.Serving, kind: str) -> None:
    """Cold, and repeated when the decode group has the prompt's blocks."""
    before = read_tokens(server)
    for length in LENGTHS:
        body = COMMON | KINDS[kind] | {"prompt": prompt(f"{kind} {length}", length)}
        if kind == "stop string":
            unseen = unified.whole(COMPLETIONS, body | {"cache_salt": "only to know the text"})
            body["stop"] = unseen["choices"][0]["text"][4:6]
        for _ in range(2):
            assert_same(ask(server, body), unified.whole(COMPLETIONS, body), length)
    whole = sum(map(whole_blocks, LENGTHS))
    expected = 0 if kind == "prompt logprobs" else whole  # those need every row of the prompt
    wait_for(lambda: read_tokens(server) - before == expected, 5.0, f"not {expected} tokens were read")


def test_the_prefill_group_computes_prompts_and_the_decode_group_their_tails(server: Serving) -> None:
    before = {role: group_counts(server, role) for role in ("prefill", "decode")}
    answer = ask(server, COMMON | {"prompt": prompt("who computes", 500), "temperature": 0})
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0  # what was read was new to all

    def counted() -> list[float]:
        after = {role: group_counts(server, role) for role in before}
        return [
            after[role][f"engine_{name}"] - before[role][f"engine_{name}"]
            for role in ("prefill", "decode")
            for name in ("prompt_tokens", "prompt_tokens remote", "prompt_tokens cached", "generated_tokens")
        ]

    expected = [500, 0, 0, 0, 500, whole_blocks(500), 0, COMMON["max_tokens"]]
    wait_for(lambda: counted() == expected, 5.0, "a group computed something else")
    (placed,) = server.get(f"/explain/{answer['id']}").json()["prompts"]
    assert placed["fetch"]["pulled_tokens"] == placed["fetch"]["wanted_tokens"] == whole_blocks(500)
    groups = {role: group["group"] for role, group in ready(server).items()}
    assert placed["taken_by"] == groups["decode"]
    assert placed["fetch"]["source"] == placed["ranked"][0]["source"] == groups["prefill"]
    assert "transfer" in placed["ranked"][0]["terms_ms"]
    (pair,) = server.get("/load").json()["pairs"]
    assert (pair["source"], pair["reader"]) == (groups["prefill"], groups["decode"])
    assert pair["num_reads"] > 0 == pair["num_failed"]
    name = f"tandem_kv_pair_bytes_total {pair['reader']} {pair['source']}"
    wait_for(lambda: server.counts().get(name) == pair["num_bytes"] > 0, 5.0, "bytes are not counted")


def test_a_stream_says_what_the_whole_answer_says(server: Serving, unified: one_process.Serving) -> None:
    body = COMMON | {"prompt": prompt("stream", 300), "temperature": 0, "max_tokens": 40}
    options = {"stream": True, "stream_options": {"include_usage": True}}
    lines = server.post(COMPLETIONS, body | options).text.split("\n\n")
    events = [line.removeprefix("data: ") for line in lines if line]
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    expected = unified.whole(COMPLETIONS, body)
    assert "".join(c["text"] for e in chunks for c in e["choices"]) == expected["choices"][0]["text"]
    assert chunks[-1]["usage"] == expected["usage"]


def test_many_at_once_are_answered_alike(server: Serving, unified: one_process.Serving) -> None:
    """More than both pools hold at the same time; some share their beginnings."""
    bodies = [
        COMMON
        | {"prompt": prompt(f"shared {i % 4}", 200) + prompt(f"own {i}", 10 + 15 * i), "max_tokens": 40}
        | ({"temperature": 0} if i % 2 else {"temperature": 1.0, "seed": i})
        for i in range(16)
    ]
    before = read_tokens(server)
    with concurrent.futures.ThreadPoolExecutor(len(bodies)) as pool:
        answers = list(pool.map(lambda body: ask(server, body), bodies))
    for body, answer in zip(bodies, answers, strict=True):
        assert answer["choices"] == unified.whole(COMPLETIONS, body)["choices"]
    wait_for(lambda: read_tokens(server) > before, 5.0, "nothing was read")
    wait_for(lambda: is_idle(server), IDLE_S, "blocks are held for nobody")


def test_clients_that_leave_strand_no_block(server: Serving, unified: one_process.Serving) -> None:
    draw = random.Random("leaving")
    bodies = [COMMON | {"prompt": prompt(f"leaves {i}", 200), "max_tokens": 300} for i in range(40)]
    moments = [draw.choice((0.0, 0.005, 0.02, 0.05, 0.1, None)) for _ in bodies]
    neighbour = COMMON | {"prompt": prompt("neighbour", 150), "max_tokens": 400, "temperature": 0}
    with concurrent.futures.ThreadPoolExecutor(9) as pool:
        undisturbed = pool.submit(ask, server, neighbour)
        for gone in [pool.submit(leave, server, *each) for each in zip(bodies, moments, strict=True)]:
            gone.result()
        assert_same(undisturbed.result(), unified.whole(COMPLETIONS, neighbour))
    wait_for(lambda: is_idle(server), IDLE_S, "blocks are held for clients that left")
    for group in ready(server).values():
        assert group["free_blocks"] + group["cached_blocks"] == NUM_BLOCKS
    wait_for(lambda: exchanged_now(server) == 0, IDLE_S, "a lease or a transfer is left")
    big = COMMON | {"prompt": prompt("big", BIG_PROMPT), "temperature": 0}
    before = read_tokens(server)
    assert_same(ask(server, big), unified.whole(COMPLETIONS, big))
    expected = whole_blocks(BIG_PROMPT)
    wait_for(lambda: read_tokens(server) - before == expected, 5.0, "it was not read as a whole")


def leave(server: Serving, body: Mapping[str, Any], after_s: float | None) -> None:
    """Ask for a stream and close the socket after a time, or after the first token."""
    url = urlsplit(server.url)
    content = json.dumps({**body, "stream": True}).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: {url.netloc}\r\ncontent-type: application/json\r\n"
    with socket.create_connection((url.hostname or "", url.port or 0), timeout=30.0) as connection:
        connection.sendall(head.encode() + b"content-length: %d\r\n\r\n" % len(content) + content)
        if after_s is not None:
            time.sleep(after_s)
            return
        received = b""
        while b"data: " not in received:
            part = connection.recv(4096)
            assert part, received
            received += part


def exchanged_now(server: Serving) -> float:
    """Leases and blocks in flight, of all groups."""
    lines = server.get("/metrics").text.splitlines()
    return sum(
        float(line.rpartition(" ")[2])
        for line in lines
        if line.startswith("tandem_kv_leases{")
        or (line.startswith("tandem_kv_blocks{") and 'state="transferring"' in line)
    )


def num_placed(server: Serving) -> float:
    """Requests, by any choice of who gives blocks."""
    counts = server.counts()
    return sum(value for name, value in counts.items() if name.startswith("tandem_kv_source_decisions_total"))


def test_a_killed_prefill_group_costs_no_answer(server: Serving, unified: one_process.Serving) -> None:
    bodies = [COMMON | {"prompt": prompt(f"killed {i}", 1000), "temperature": 0} for i in range(7)]
    lost = ready(server)["prefill"]["group"]
    (pid,) = server.rank_pids(lost)
    redirected = server.counts()["tandem_kv_redirects_total none"]
    placed_before = num_placed(server)
    with concurrent.futures.ThreadPoolExecutor(len(bodies)) as pool:
        early = [pool.submit(ask, server, body) for body in bodies[:3]]
        time.sleep(0.05)
        os.kill(pid, signal.SIGSTOP)  # so that requests are in flight for certain
        late = [pool.submit(ask, server, body) for body in bodies[3:6]]
        wait_for(lambda: num_placed(server) - placed_before >= 6, 20.0, "the requests were not placed")
        time.sleep(0.5)
        os.kill(pid, signal.SIGKILL)
        answers = [asked.result(timeout=30.0) for asked in early + late]
    answers.append(ask(server, bodies[6]))
    (placed,) = server.get(f"/explain/{answers[-1]['id']}").json()["prompts"]
    assert [choice["source"] for choice in placed["ranked"]] == [None]  # no prefill group is there now
    for body, answer in zip(bodies, answers, strict=True):
        assert answer["choices"] == unified.whole(COMPLETIONS, body)["choices"]
    assert server.counts()["tandem_kv_redirects_total none"] - redirected >= 3

    def is_rebuilt() -> bool:
        groups = ready(server)
        return "prefill" in groups and groups["prefill"]["group"] != lost

    wait_for(is_rebuilt, REBUILD_S, "the prefill group was not rebuilt")
    before = read_tokens(server)
    assert_is_read(server, unified, "rebuilt prefill", before)
    wait_for(lambda: is_idle(server), IDLE_S, "blocks are held for nobody")


def test_what_a_killed_decode_group_has_begun_goes_on_in_the_next(
    server: Serving, unified: one_process.Serving
) -> None:
    lost = ready(server)["decode"]["group"]
    (pid,) = server.rank_pids(lost)
    body = COMMON | {"prompt": prompt("begun", 800), "max_tokens": 1000, "temperature": 1.0, "seed": 3}
    streamed = {**body, "stream": True}
    lines: list[str] = []
    with httpx.stream(
        "POST", server.url + COMPLETIONS, json=streamed, timeout=90.0, trust_env=False
    ) as stream:
        for line in stream.iter_lines():
            if line.startswith("data: "):
                lines.append(line.removeprefix("data: "))
                if len(lines) == 5:
                    os.kill(pid, signal.SIGKILL)
    assert lines[-1] == "[DONE]"
    choices = [choice for line in lines[:-1] for choice in json.loads(line)["choices"]]
    tokens = [token for choice in choices for token in choice.get("token_ids") or ()]
    assert tokens == unified.whole(COMPLETIONS, body)["choices"][0]["token_ids"]

    def is_rebuilt() -> bool:
        groups = ready(server)
        return "decode" in groups and groups["decode"]["group"] != lost

    wait_for(is_rebuilt, REBUILD_S, "the decode group was not rebuilt")
    before = read_tokens(server)  # it has read the blocks of what went on there
    assert_is_read(server, unified, "rebuilt decode", before)
    wait_for(lambda: is_idle(server), IDLE_S, "blocks are held for nobody")


def assert_is_read(server: Serving, unified: one_process.Serving, name: str, before: float) -> None:
    """The pair is used: a new prompt's blocks are read."""
    body = COMMON | {"prompt": prompt(name, 200), "temperature": 0}
    assert_same(ask(server, body), unified.whole(COMPLETIONS, body))
    wait_for(lambda: read_tokens(server) - before == whole_blocks(200), 5.0, "the blocks were not read")
