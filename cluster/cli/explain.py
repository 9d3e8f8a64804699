"""`tandem explain`: why a request went to its group, and where the time to its first token went."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any
from urllib.parse import quote

import httpx
import typer
from rich.markup import escape

from cluster.cli.keys import service_at
from cluster.cli.options import JsonOption, KeysOption, UrlOption
from cluster.cli.services import services_of
from cluster.cli.tables import table
from cluster.cli.terminal import CommandFailed, Terminal, waiting
from cluster.figures.words import counted
from cluster.replies import Reply, ask

_TIMEOUT_S = 5.0
_TRIES = 16  # each over a connection of its own: only the router that placed a request remembers it


def explain(
    context: typer.Context,
    request_id: Annotated[str, typer.Argument(metavar="REQUEST_ID", help="Id of an answer, or of the log.")],
    url: UrlOption = None,
    keys_file: KeysOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print every term of a request's placement, and what its first token waited for."""
    terminal = Terminal(as_json=as_json)
    with terminal.exit_codes():
        service = service_at(services_of(context), url, keys_file)
        with waiting(terminal, f"asking {service.url}"):
            found = _ask(service.url, request_id, service.headers)
        if as_json:
            terminal.emit(**found)
            return
        try:
            _print(terminal, found)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise CommandFailed(
                f"what {service.url} says of it is in no known form: is it another version? --json prints it"
            ) from error


def _ask(url: str, request_id: str, headers: Mapping[str, str]) -> dict[str, Any]:
    """What the router that placed the request says. Raises CommandFailed."""
    address = f"{url}/explain/{quote(request_id, safe='')}"
    problem = ""
    for _ in range(_TRIES):
        try:
            with httpx.Client(trust_env=False) as client:
                reply = ask(client, "GET", address, timeout_s=_TIMEOUT_S, headers=headers)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise CommandFailed(f"{url} does not answer ({error}); is `tandem serve` running?") from error
        body = _object(reply)
        if reply.status == 200 and "prompts" in body:
            return body
        said = body.get("error")
        message = str(said.get("message", "")) if isinstance(said, dict) else ""
        problem = message or f"{url} answers with HTTP {reply.status}; is it a Tandem server?"
        if reply.status != 404:
            break
    raise CommandFailed(problem)


def _object(reply: Reply) -> dict[str, Any]:
    try:
        body = reply.json()
    except ValueError:
        return {}
    return body if isinstance(body, dict) else {}


def _print(terminal: Terminal, found: Mapping[str, Any]) -> None:
    terminal.say(f"request {found['request']}, placed by router {found['replica']}", style="bold")
    _print_first_token(terminal, found.get("first_token"))
    for number, prompt in enumerate(found["prompts"]):
        name = "prompt" if len(found["prompts"]) == 1 else f"prompt {number}"
        terminal.say(
            f"{name}: {counted(prompt['num_prompt_tokens'], 'token')}, "
            f"taken by {prompt['taken_by'] or 'nobody'} at attempt {prompt['num_attempts']}"
        )
        _print_fetch(terminal, prompt["fetch"])
        _print_ranking(terminal, prompt["ranked"])


def _print_first_token(terminal: Terminal, first: Mapping[str, Any] | None) -> None:
    if first is None:
        terminal.say("no token has come")
        return
    whole_ms = first["ttft_ms"]
    terminal.say(f"first token after {whole_ms:.1f} ms")
    found = table("stage", "ms", "share", left=("stage",))
    for stage, milliseconds in first["stages_ms"].items():
        if milliseconds > 0:
            share = milliseconds / whole_ms if whole_ms else 0.0
            found.add_row(escape(f"  {stage}"), f"{milliseconds:.2f}", f"{share:.1%}")
    terminal.show(found)


def _print_fetch(terminal: Terminal, fetch: Mapping[str, Any] | None) -> None:
    if fetch is None:
        return
    pulled = "not known yet" if fetch["pulled_tokens"] is None else fetch["pulled_tokens"]
    source = fetch["source"] or "nobody in the end"
    terminal.say(f"  read from {source}: {pulled} of {counted(fetch['wanted_tokens'], 'token')}")
    for prefill in fetch["prefills"]:
        terminal.say(f"  prefill by {prefill['group']}: {prefill['outcome']}")


def _print_ranking(terminal: Terminal, ranked: list[Mapping[str, Any]]) -> None:
    """Groups with their sources, best first; the terms add up to the cost."""
    names = list(dict.fromkeys(name for choice in ranked for name in choice["terms_ms"]))
    found = table(
        *("  group", "source", "cached blocks", "to read", "cost ms", *map(escape, names)),
        left=("  group", "source"),
    )
    for choice in ranked:
        terms = choice["terms_ms"]
        found.add_row(
            escape(f"  {choice['group']}"),
            escape(choice["source"] or ""),
            str(choice["matched_blocks"]),
            str(choice["fetched_tokens"] or ""),
            f"{choice['cost_ms']:.1f}",
            *(f"{terms[name]:.1f}" if name in terms else "" for name in names),
        )
    terminal.show(found)
