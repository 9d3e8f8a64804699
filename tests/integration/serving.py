"""A running cluster, and what tests ask of it: deploy, wait, look at processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx
import openai
import yaml
from prometheus_client.parser import text_string_to_metric_families

from cluster.config.parse import apply_overrides
from cluster.launch.handover import deploy, wait_ready
from cluster.launch.local_cluster import LocalCluster
from cluster.running.directory_probe import read_directories
from tests.models import checkpoints
from tests.models.toy_tokenizers import byte_tokenizer

DEPLOY = Path(__file__).parents[2] / "deploy"
APPLICATION = "tandem"
Value = TypeVar("Value")


@dataclass(frozen=True)
class Serving:
    """An application that answers at `url`."""

    cluster: LocalCluster
    url: str

    def client(self, **options: Any) -> openai.OpenAI:
        """The official client, without its own retries."""
        http = openai.DefaultHttpxClient(trust_env=False)
        return openai.OpenAI(
            base_url=f"{self.url}/v1",
            api_key="none",
            max_retries=0,
            timeout=60.0,
            http_client=http,
            **options,
        )

    @property
    def model(self) -> str:
        """The served name."""
        with self.client() as client:
            return client.models.list().data[0].id

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=10.0, trust_env=False)

    def post(self, path: str, body: Mapping[str, Any], timeout_s: float = 60.0) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=timeout_s, trust_env=False)

    def counts(self) -> dict[str, float]:
        """Counters and histogram counts of `/metrics` by name and own label, over replicas and groups."""
        counts: dict[str, float] = {}
        for family in text_string_to_metric_families(self.get("/metrics").text):
            for sample in family.samples:
                if not sample.name.endswith(("_total", "_count")):
                    continue
                shared = ("model", "replica", "group", "role")
                own = (value for label, value in sorted(sample.labels.items()) if label not in shared)
                name = " ".join((sample.name, *own))
                counts[name] = counts.get(name, 0.0) + sample.value
        return counts

    def groups(self) -> list[dict[str, Any]]:
        """What the router says of its groups."""
        groups: list[dict[str, Any]] = self.get("/load").json()["groups"]
        return groups

    def is_idle(self) -> bool:
        """Whether nothing runs or waits in any group, and no request holds a block."""
        counts = ("running", "waiting", "active_blocks")
        groups = self.groups()
        return bool(groups) and all(group[count] == 0 for group in groups for count in counts)

    def rank_pids(self, group_id: str) -> tuple[int, ...]:
        """Process ids of a group's ranks, in order."""
        listing = read_directories(self.cluster.gcs_address, [APPLICATION])[APPLICATION]
        return next(entry.rank_pids for entry in listing.entries if entry.group_id == group_id)


def tiny_llama(folder: Path, max_model_len: int) -> Path:
    """Fills a folder with a small random Llama whose tokens are bytes."""
    family, tokenizer = checkpoints.family("llama"), byte_tokenizer()
    tokenizer.save_pretrained(folder)
    return checkpoints.build(folder, family, vocab_size=len(tokenizer), max_position_embeddings=max_model_len)


def config_of(file: str, port: int, settings: list[str], **replicas: int) -> dict[str, Any]:
    """A shipped deployment file with another port, `--set` assignments and numbers of replicas."""
    config: dict[str, Any] = yaml.safe_load((DEPLOY / file).read_text())
    config["http_options"]["port"] = port
    (app,) = config["applications"]
    app["args"] = apply_overrides(app["args"], settings)
    for deployment in app["deployments"]:
        if deployment["name"] in replicas:
            deployment["num_replicas"] = replicas[deployment["name"]]
    return config


@contextmanager
def serving(
    cluster: LocalCluster, port: int, file: str, settings: list[str], **replicas: int
) -> Iterator[Serving]:
    """Deploy, wait until it is ready, and remove it at the end."""
    url = f"http://127.0.0.1:{port}"
    deploy(cluster.api, config_of(file, port, settings, **replicas))
    try:
        wait_ready(cluster.api, application=APPLICATION, url=url, timeout_s=180.0)
        yield Serving(cluster, url)
    finally:
        remove(cluster)


def remove(cluster: LocalCluster) -> None:
    """Take the application down and wait until Serve has forgotten it."""
    cluster.api.remove_applications()
    wait_for(lambda: not cluster.api.details().get("applications"), 60.0, "the application is still there")


def wait_for(condition: Callable[[], Value], timeout_s: float, otherwise: str) -> Value:
    """The condition's value once it is true; fails with `otherwise` after the time."""
    deadline = time.monotonic() + timeout_s
    while True:
        if value := condition():
            return value
        assert time.monotonic() < deadline, f"after {timeout_s:g} s: {otherwise}"
        time.sleep(0.1)


def processes(mark: str, title: str) -> list[int]:
    """Ids of living processes of a cluster whose title contains a text."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            command = (entry / "cmdline").read_bytes()
            if title.encode() in command and f"={mark}".encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return sorted(found)


def resident_mb(pid: int) -> float:
    """Resident memory of a process, MB."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise AssertionError(f"no VmRSS of {pid}")


def has_torch(pid: int) -> bool:
    """Whether torch's library is mapped into a process."""
    return "libtorch" in Path(f"/proc/{pid}/maps").read_text()
