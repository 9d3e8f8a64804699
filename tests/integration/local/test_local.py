"""The whole path through HTTP."""

from __future__ import annotations

import concurrent.futures
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.integration.serving import (
    Serving,
    has_torch,
    processes,
    resident_mb,
    wait_for,
)

pytestmark = pytest.mark.integration

QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]


def test_a_chat_answer_is_the_same_streamed_and_whole(server: Serving) -> None:
    with server.client() as client:
        whole = client.chat.completions.create(
            model=server.model, messages=QUESTION, max_tokens=12, temperature=0
        )
        stream = client.chat.completions.create(
            model=server.model,
            messages=QUESTION,
            max_tokens=12,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert "Paris" in text
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_each_prompt_of_a_list_gets_its_choice(server: Serving) -> None:
    prompts = ["One two three", "The sky is", "One two three"]
    with server.client() as client:
        whole = client.completions.create(model=server.model, prompt=prompts, max_tokens=4, temperature=0)
        alone = [
            client.completions.create(model=server.model, prompt=prompt, max_tokens=4, temperature=0)
            for prompt in prompts
        ]
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert [choice.text for choice in whole.choices] == [answer.choices[0].text for answer in alone]


def test_both_routers_serve_and_reach_the_same_cache(server: Serving) -> None:
    prompt = "One two three four five six seven eight nine ten. " * 8

    def ask(number: int) -> tuple[str, int]:
        body = {"model": server.model, "prompt": prompt, "max_tokens": 4, "temperature": 0}
        answer = server.post("/v1/completions", body)  # a connection each
        assert answer.status_code == 200, answer.text
        usage = answer.json()["usage"]
        return answer.json()["choices"][0]["text"], usage["prompt_tokens_details"]["cached_tokens"]

    first_text, _ = ask(0)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, range(16)))
    assert {text for text, _ in answers} == {first_text}
    assert min(cached for _, cached in answers) >= 64
    living = {  # totals also tell of routers that have left
        line.split('replica="')[1].split('"')[0]
        for line in server.get("/metrics").text.splitlines()
        if line.startswith("tandem_requests_inflight{")
    }
    assert len(living) == 2


def test_ray_serves_our_series_beside_its_own(server: Serving) -> None:
    """What Prometheus finds by Ray's service discovery says the same as `/metrics`."""
    body = {"model": server.model, "prompt": "One two three", "max_tokens": 3, "ignore_eos": True}
    assert server.post("/v1/completions", body).status_code == 200
    names = (
        *("tandem_requests_total", "tandem_ttft_seconds_count", "tandem_ttft_seconds_sum"),
        *("tandem_ttft_seconds_bucket", "tandem_stage_seconds_count", "tandem_engine_up"),
        *("tandem_engine_generated_tokens_total", "tandem_engine_step_seconds_count", "tandem_kv_blocks"),
    )

    def exported() -> bool:
        own, of_ray = server.get("/metrics").text, ray_metrics(server)
        assert "ray_node_cpu_count" in of_ray
        living = {  # totals also tell of those that have left
            sample.labels.get("replica", sample.labels.get("group", ""))
            for family in text_string_to_metric_families(own)
            for sample in family.samples
            if sample.name in ("tandem_requests_inflight", "tandem_engine_running")
        }
        expected = sums(own, "", names, living)
        has_counted = expected["tandem_requests_total"] > 0  # a router tells the others once a second
        return has_counted and sums(of_ray, "ray_", names, living) == pytest.approx(expected)

    wait_for(exported, 60.0, "Ray's metrics and ours differ")


def ray_metrics(server: Serving) -> str:
    """The page of the machine's agent, found as Prometheus finds it."""
    api = server.cluster.api
    headers = {"authorization": f"Bearer {api.token}"}
    found = httpx.get(f"{api.url}/api/prometheus/sd", headers=headers, timeout=10.0, trust_env=False)
    (target,) = found.json()[0]["targets"][:1]
    return httpx.get(f"http://{target}/metrics", timeout=10.0, trust_env=False).text


def sums(page: str, prefix: str, names: tuple[str, ...], of: set[str]) -> dict[str, float]:
    """By name, over all series of these replicas and groups."""
    totals = dict.fromkeys(names, 0.0)
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            owner = sample.labels.get("replica", sample.labels.get("group"))
            name = sample.name.removeprefix(prefix)
            if sample.name.startswith(prefix) and name in totals and owner in of:
                totals[name] += sample.value
    return totals


def test_counts_of_both_routers_add_up_through_the_public_port(server: Serving) -> None:
    before = server.counts()
    usage: Counter[str] = Counter()
    reported = ("prompt_tokens", "completion_tokens")
    seen = [before]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        body = {"model": server.model, "prompt": "One two three", "max_tokens": 6, "ignore_eos": True}
        asked = [pool.submit(server.post, "/v1/completions", body) for _ in range(12)]
        refused = [pool.submit(server.post, "/v1/completions", {**body, "n": 0}) for _ in range(2)]
        while not all(future.done() for future in asked + refused):
            seen.append(server.counts())
    for answer in asked:
        usage.update({name: answer.result().json()["usage"][name] for name in reported})
    assert [answer.result().status_code for answer in refused] == [400, 400]
    expected = {
        "tandem_requests_total length": 12,
        "tandem_client_errors_total invalid_value": 2,
        "tandem_prompt_tokens_total": usage["prompt_tokens"],
        "tandem_generation_tokens_total": usage["completion_tokens"],
        "tandem_ttft_seconds_count": 12,
    }

    def told() -> dict[str, float]:
        seen.append(server.counts())
        return {name: seen[-1][name] - before[name] for name in expected}

    wait_for(lambda: told() == expected, 5.0, "a router did not publish")
    assert [told() for _ in range(10)] == [expected] * 10
    falls = [
        (old[name], new.get(name)) for old, new in pairwise(seen) for name in old if old[name] > new[name]
    ]
    assert falls == []


def test_routers_and_fronts_are_small_and_without_torch(server: Serving) -> None:
    mark = server.cluster.mark
    routers = processes(mark, "ServeReplica:tandem:router")
    fronts = processes(mark, "ServeReplica:tandem:unified")
    assert (len(routers), len(fronts)) == (2, 1)
    for pid in routers + fronts:
        assert resident_mb(pid) < 450
        assert not has_torch(pid)
    ranks = processes(mark, "ray::RankActor")
    assert len(ranks) == 1
    assert has_torch(ranks[0])


@pytest.mark.parametrize("num_choices", [1, 4])
def test_a_client_that_leaves_is_forgotten_at_once(server: Serving, num_choices: int) -> None:
    body = {"model": server.model, "prompt": "Tell a long story.", "max_tokens": 4000, "ignore_eos": True}
    body |= {"n": num_choices, "temperature": 1.0}
    counter = "tandem_client_disconnects_total waiting"
    num_left = server.counts()[counter]

    def leave() -> None:
        with pytest.raises(httpx.TimeoutException):
            server.post("/v1/completions", body, timeout_s=1.0)

    with concurrent.futures.ThreadPoolExecutor(5) as pool:
        for future in [pool.submit(leave) for _ in range(5)]:
            future.result()
    left = time.monotonic()

    wait_for(server.is_idle, 5.0, "the engine still works for clients that left")
    assert time.monotonic() - left < 5.0
    wait_for(
        lambda: server.counts()[counter] >= num_left + 5,
        5.0,
        "not all who left are counted",
    )
    assert server.counts()[counter] == num_left + 5
    answer = server.post("/v1/completions", {"model": server.model, "prompt": "Hi", "max_tokens": 1})
    assert answer.status_code == 200


def test_a_placement_is_explained(server: Serving) -> None:
    """By the router replica that made it; the other one says that it does not know."""
    body = {"model": server.model, "prompt": ["Hello", "Bye"], "max_tokens": 1}
    path = f"/explain/{server.post('/v1/completions', body).json()['id']}"
    answers: dict[int, Any] = {}

    def both_have_answered() -> bool:
        answer = server.get(path)
        answers[answer.status_code] = answer.json()
        return len(answers) == 2

    wait_for(both_have_answered, 10.0, "only one replica answers")
    assert answers[404]["error"]["code"] == "unknown_request"
    (group,) = server.groups()
    assert [prompt["taken_by"] for prompt in answers[200]["prompts"]] == [group["group"]] * 2
    for prompt in answers[200]["prompts"]:
        (choice,) = prompt["ranked"]
        assert choice["group"] == group["group"]
        assert choice["cost_ms"] == pytest.approx(sum(choice["terms_ms"].values()))


def test_nothing_but_the_ingress_serves_strangers(server: Serving) -> None:
    """Handle ports listen on all interfaces; without the cluster's token they answer nothing."""
    import grpc
    from ray.serve.generated import serve_pb2, serve_pb2_grpc

    (front,) = processes(server.cluster.mark, "ServeReplica:tandem:unified")
    ports = _listening_ports(front)
    assert ports
    refused = 0
    for port in ports:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = serve_pb2_grpc.ASGIServiceStub(channel)
            with pytest.raises(grpc.RpcError) as caught:
                stub.HandleRequest(serve_pb2.ASGIRequest(pickled_request_metadata=b"x"), timeout=5.0)
            assert caught.value.code() in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNIMPLEMENTED)
            refused += caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert refused >= 1


def _listening_ports(pid: int) -> list[int]:
    """TCP ports on which a process listens, from /proc."""
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = str(link.readlink())
        except OSError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    ports = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                ports.append(int(fields[1].rpartition(":")[2], 16))
    return ports
