"""`tandem simulate`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from cluster.cli.commands import app
from cluster.simulate.report import spread
from cluster.simulate.run import Outcome, SimConfig, simulate
from tests.unit.cluster.simulate.traces import PLAIN, conversations


@pytest.fixture
def trace(tmp_path: Path) -> str:
    """Thirty requests in Mooncake's form, with lengths as in `conversations` times 16."""
    file = tmp_path / "trace.jsonl"
    with file.open("w") as stream:
        for request in conversations(10):
            entry = {
                "timestamp": round(1000 * request.arrival_s),
                "input_length": request.prompt_tokens * 16,
                "output_length": request.output_tokens,
                "hash_ids": request.prefix_ids,
            }
            stream.write(json.dumps(entry) + "\n")
    return str(file)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["simulate", *arguments])


def test_all_policies_as_json(trace: str, tmp_path: Path) -> None:
    PLAIN.save(tmp_path / "cost.json")
    done = run(
        trace, "--groups", "3", "--policy", "all", "--json",
        "--length-divisor", "16", "--cost", str(tmp_path / "cost.json"),
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["policy"] for line in lines] == ["prefix", "round_robin", "power_of_two", "longest_prefix"]
    assert {(line["cluster"], line["requests"], line["refused"]) for line in lines} == {("3 groups", 30, 0)}
    assert lines[0]["hit_tokens"] > lines[1]["hit_tokens"] > 0
    assert lines[0]["ttft_s"].keys() == {"mean", "p50", "p90", "p99"}


def test_without_sharing_nothing_is_found(trace: str) -> None:
    done = run(trace, "--groups", "2", "--no-sharing", "--requests", "5", "--json")
    line = json.loads(done.stdout)
    assert (line["requests"], line["hit_tokens"]) == (5, 0)


def test_the_rate_is_scaled(trace: str) -> None:
    slow, fast = (
        json.loads(run(trace, "--groups", "4", "--rate-divisor", rate, "--json").stdout)
        for rate in ("1000", "1")
    )
    assert slow["span_s"] > 100 * fast["span_s"]


def test_pools_are_compared_in_a_table(trace: str) -> None:
    done = run(
        trace, "--pools", "prefill=1,decode=2", "--pools", "decode=2,prefill=2", "--transfer", "1",
        "--length-divisor", "16",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    heading, *rows = done.stdout.splitlines()
    assert heading.split()[:3] == ["cluster", "policy", "TTFT"]
    assert [row.split()[0] for row in rows] == ["prefill=1,decode=2", "decode=2,prefill=2"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--policy", "best"), "--policy is 'best': it must be one of prefix, round_robin"),
        (("--pools", "prefill=1"), "no group answers"),
        (("--pools", "prefill=1,decode=x"), "it must be like prefill=2,decode=6"),
        (("--pools", "unified=1,unified=2"), "it must be like prefill=2,decode=6"),
        (("--pools", "prefill=1,decode=1"), "a network between the groups is needed"),
        (("--pools", "decode=" + "9" * 5000), "it must be like prefill=2,decode=6"),
        (("--blocks", "10"), "a group has 10 (--blocks)"),
        (("--groups", "100000", "--blocks", "4194304"), "of this machine's memory"),
        (("--pools", "unified=1", "--pools", "bogus=1"), "it must be like prefill=2,decode=6"),
        (("--pools", "unified=1", "--groups", "2"), "--groups and --pools are both given"),
        (("--length-divisor", "0.000001"), "at a length divisor of 1e-06, at most 16,777,216 are allowed"),
        (("--cost", "missing.json"), "missing.json: not readable as JSON"),
    ],
)
def test_mistakes_are_named(trace: str, arguments: tuple[str, ...], message: str) -> None:
    done = run(trace, *arguments)
    assert done.exit_code == (2 if message.startswith(("--", "it must")) else 1)
    assert message in done.stderr and not done.stdout


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--blocks", "10000000000"),
        ("--blocks", "9" * 400),
        ("--requests", "9" * 23),
        ("--length-divisor", "1e-305"),
        ("--rate-divisor", "1e308"),
        ("--transfer", "1e308"),
    ],
)
def test_numbers_without_meaning_are_refused(trace: str, option: str, value: str) -> None:
    done = run(trace, option, value)
    assert (done.exit_code, type(done.exception)) == (2, SystemExit)
    assert f"Invalid value for '{option}'" in done.stderr


def test_what_is_known_when_it_is_interrupted_is_shown(trace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(requests: object, config: SimConfig, policy: str) -> Outcome:
        if policy != "prefix":
            raise KeyboardInterrupt
        return simulate(requests, config, policy)  # type: ignore[arg-type]

    monkeypatch.setattr("cluster.cli.simulate.simulate", interrupted)
    done = run(trace, "--policy", "all", "--requests", "5")
    assert done.exit_code == 130
    assert [line.split()[:3] for line in done.stdout.splitlines()[1:]] == [["1", "group", "prefix"]]


def test_a_file_that_is_no_trace(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    done = run(str(tmp_path / "a.txt"))
    assert done.exit_code == 1
    assert "a trace is a .jsonl (Mooncake) or a .csv (Azure) file" in done.stderr


def test_percentiles_are_values_that_were_seen() -> None:
    found = spread([float(value) for value in range(1, 101)])
    assert (found.mean, found.p50, found.p90, found.p99) == (50.5, 50.0, 90.0, 99.0)
    assert spread([3.0]).p99 == 3.0
    assert spread([]).mean == 0.0
