"""`tandem explain`: every term of a placement and the waterfall, for people and for programs."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.unit.cluster.conftest import World

FOUND: dict[str, Any] = {
    "replica": "r1",
    "request": "0123",
    "first_token": {
        "ttft_ms": 50.0,
        "stages_ms": {"admit": 0.5, "render": 0.0, "queue": 9.5, "prefill": 40.0},
    },
    "prompts": [
        {
            "taken_by": "unified-a",
            "num_attempts": 2,
            "num_prompt_tokens": 300,
            "fetch": {
                "source": "prefill-p",
                "wanted_tokens": 288,
                "pulled_tokens": 272,
                "prefills": [{"group": "prefill-p", "outcome": "computed"}],
            },
            "ranked": [
                {
                    "group": "unified-a",
                    "source": "prefill-p",
                    "fetched_tokens": 288,
                    "matched_blocks": 0,
                    "cost_ms": 30.5,
                    "terms_ms": {"queue": 10.0, "prefill": 12.25, "transfer": 8.25},
                },
                {
                    "group": "unified-b",
                    "source": None,
                    "fetched_tokens": 0,
                    "matched_blocks": 3,
                    "cost_ms": 80.0,
                    "terms_ms": {"queue": 0.0, "prefill": 80.0},
                },
            ],
        }
    ],
}


def test_every_term_is_printed(world: World) -> None:
    world.server.explained = {"cmpl-0123": FOUND}
    done = world.run("explain", "cmpl-0123", "--url", world.server.url)
    assert done.exit_code == 0, done.output
    lines = [line.rstrip() for line in done.stdout.splitlines()]
    assert lines[:2] == ["request 0123, placed by router r1", "first token after 50.0 ms"]
    assert [line.split() for line in lines[2:6]] == [
        ["stage", "ms", "share"],
        ["admit", "0.50", "1.0%"],
        ["queue", "9.50", "19.0%"],
        ["prefill", "40.00", "80.0%"],
    ]
    assert lines[6:9] == [
        "prompt: 300 tokens, taken by unified-a at attempt 2",
        "  read from prefill-p: 272 of 288 tokens",
        "  prefill by prefill-p: computed",
    ]
    assert [line.split() for line in lines[9:]] == [
        ["group", "source", "cached", "blocks", "to", "read", "cost", "ms", "queue", "prefill", "transfer"],
        ["unified-a", "prefill-p", "0", "288", "30.5", "10.0", "12.2", "8.2"],
        ["unified-b", "3", "80.0", "0.0", "80.0"],
    ]


@pytest.mark.parametrize("change", [{"prompts": [{}]}, {"prompts": 5}, {"first_token": []}])
def test_an_explanation_in_another_form_is_told(world: World, change: dict[str, Any]) -> None:
    world.server.explained = {"0123": FOUND | change}
    done = world.run("explain", "0123", "--url", world.server.url)
    assert (done.exit_code, type(done.exception)) == (1, SystemExit)
    assert done.stderr == (
        f"error: what {world.server.url} says of it is in no known form: is it another version? "
        "--json prints it\n"
    )


def test_json_is_what_the_router_says(world: World) -> None:
    world.server.explained = {"0123": FOUND}
    done = world.run("explain", "0123", "--url", world.server.url + "/", "--json")
    assert (done.exit_code, json.loads(done.stdout)) == (0, FOUND)


def test_another_router_may_remember_it(world: World) -> None:
    world.server.explained = {"0123": FOUND}
    world.server.num_forgetful = 5
    assert world.run("explain", "0123", "--url", world.server.url).exit_code == 0


def test_an_unknown_id(world: World) -> None:
    done = world.run("explain", "../nothing", "--url", world.server.url)
    assert (done.exit_code, done.stdout) == (1, "")
    assert "no such request: ..%2Fnothing" in done.stderr
    done = world.run("explain", "nothing", "--url", world.server.url, "--json")
    assert json.loads(done.stdout)["message"] == "no such request: nothing"


def test_a_request_without_a_token_and_without_a_group(world: World) -> None:
    prompt = {**FOUND["prompts"][0], "taken_by": None, "fetch": None, "ranked": []}
    world.server.explained = {"0123": {**FOUND, "first_token": None, "prompts": [prompt]}}
    done = world.run("explain", "0123", "--url", world.server.url)
    assert done.stdout.splitlines()[1:3] == [
        "no token has come",
        "prompt: 300 tokens, taken by nobody at attempt 2",
    ]


def test_no_server_and_a_server_that_wants_a_key(world: World) -> None:
    done = world.run("explain", "0123", "--url", "http://127.0.0.1:1")
    assert done.exit_code == 1
    assert "http://127.0.0.1:1 does not answer" in done.stderr
    world.server.key = "secret"
    done = world.run("explain", "0123", "--url", world.server.url)
    assert (done.exit_code, "a key is needed" in done.stderr) == (1, True)
    keys = world.folder / "keys"
    keys.write_text("secret\n")
    keys.chmod(0o600)
    world.server.explained = {"0123": FOUND}
    assert (
        world.run("explain", "0123", "--url", world.server.url, "--api-keys-file", str(keys)).exit_code == 0
    )
