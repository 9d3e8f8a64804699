"""`tandem chat`: a conversation at the terminal, or one answer through a pipe (`echo hi | tandem chat`)."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import asdict
from io import TextIOWrapper
from typing import Annotated

import typer

from cluster.cli.conversation import SETTINGS, Conversation, Leave
from cluster.cli.keys import service_at
from cluster.cli.options import KeysOption, UrlOption, json_lines
from cluster.cli.services import services_of
from cluster.cli.sse import AnswerStats, ChatClient
from cluster.cli.terminal import CommandFailed, Terminal, UsageError, waiting

_BLOCK = '"""'
# A model's text must not steer the terminal: control characters but tab and newline are dropped.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def chat(
    context: typer.Context,
    url: UrlOption = None,
    model: Annotated[
        str | None, typer.Option("--model", help="Model name; the first served by default.")
    ] = None,
    system: Annotated[str, typer.Option("--system", help="System prompt.")] = "",
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help=f"Sampling setting: {', '.join(SETTINGS)}."),
    ] = None,
    keys_file: KeysOption = None,
    as_json: Annotated[bool, json_lines("each answer")] = False,
) -> None:
    """Talk to the model. From a pipe, the input is one message; lines like /system TEXT are commands."""
    terminal = Terminal(as_json=as_json, has_lines=True)
    with terminal.exit_codes():
        client = ChatClient(*service_at(services_of(context), url, keys_file))
        try:
            with waiting(terminal, f"asking {client.url} for its models"):
                served = client.models()
            if model is not None and model not in served:
                raise CommandFailed(f"{client.url} does not serve {model!r}; it serves {', '.join(served)}")
            conversation = Conversation(model=model or served[0], system=system)
            for setting in settings or ():
                name, _, value = setting.partition("=")
                try:
                    conversation.set(name, value)
                except ValueError as error:
                    raise UsageError(f"--set {setting}: {error}") from error
            talk = _Talk(terminal, client, conversation)
            if isinstance(sys.stdin, TextIOWrapper):
                sys.stdin.reconfigure(errors="replace")  # bytes that are no text become U+FFFD
            if sys.stdin.isatty() and not as_json:
                talk.converse()
            else:
                talk.answer_all(_piped(conversation, sys.stdin.read()))
        finally:
            client.close()


class _Talk:
    """The loop between a person (or a pipe) and the server."""

    def __init__(self, terminal: Terminal, client: ChatClient, conversation: Conversation) -> None:
        self._terminal = terminal
        self._client = client
        self._conversation = conversation

    def converse(self) -> None:
        """Read, answer, repeat, until Ctrl-D or /exit. A failed answer ends only itself."""
        _enable_line_editing()
        self._terminal.say(
            f"{self._conversation.model} at {self._client.url}   /help for commands", style="dim"
        )
        while True:
            try:
                text = read_message()
            except KeyboardInterrupt:
                self._terminal.say("\nCtrl-D leaves")
                continue
            except EOFError:
                self._terminal.say()
                return
            if not text.strip():
                continue
            if text.startswith("/"):
                try:
                    self._terminal.say(self._conversation.run(text), style="dim")
                except Leave:
                    return
                continue
            try:
                self._answer(text)
            except CommandFailed as error:
                self._terminal.say(f"error: {error}", style="red")

    def answer_all(self, items: Iterator[str]) -> None:
        """Answer each message of a pipe in turn; commands say what they did on standard error."""
        for item in items:
            if not self._conversation.is_command(item):
                self._answer(item)
                continue
            try:
                self._terminal.note(self._conversation.run(item), event="note")
            except Leave:
                return

    def _answer(self, text: str) -> None:
        """Ask, print the answer as it comes, and keep it. Ctrl-C keeps what has come."""
        conversation = self._conversation
        stats = AnswerStats()
        conversation.turns.append({"role": "user", "content": text})
        pieces: list[str] = []
        stream = self._client.stream(
            conversation.model, conversation.messages(), conversation.settings, stats
        )
        try:
            for piece in stream:
                pieces.append(piece)
                if not self._terminal.as_json:
                    sys.stdout.write(_CONTROLS.sub("", piece))
                    sys.stdout.flush()
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                raise
            self._terminal.say(" [stopped]", style="dim")
        except CommandFailed:
            conversation.turns.pop()  # the question can be asked again
            if pieces:
                self._terminal.say()
            raise
        finally:
            stream.close()  # the server notices and frees what the request held
        conversation.last = stats
        conversation.turns.append({"role": "assistant", "content": "".join(pieces)})
        if self._terminal.as_json:
            self._terminal.emit(answer="".join(pieces), **asdict(stats), tokens_per_s=stats.tokens_per_s)
        else:
            sys.stdout.write("\n")
            sys.stdout.flush()


def read_message() -> str:
    '''One message from the terminal: a line, or the lines between two """. Raises EOFError at Ctrl-D.'''
    line = input("> ")
    if not line.startswith(_BLOCK):
        return line
    lines = [line.removeprefix(_BLOCK)]
    while not lines[-1].endswith(_BLOCK) or (len(lines) == 1 and not lines[0]):
        lines.append(input("... "))
    lines[-1] = lines[-1].removesuffix(_BLOCK)
    return "\n".join(lines).strip("\n")


def _piped(conversation: Conversation, text: str) -> Iterator[str]:
    """Messages and commands of a pipe: command lines stand alone, all text between is one message."""
    message: list[str] = []
    for line in text.split("\n"):  # text may hold other Unicode line ends
        if conversation.is_command(line):
            if "\n".join(message).strip():
                yield "\n".join(message).strip()
            message = []
            yield line
        else:
            message.append(line)
    if "\n".join(message).strip():
        yield "\n".join(message).strip()


def _enable_line_editing() -> None:
    """History and line editing for `input`, where Python has them; pasted lines then come as one message."""
    try:
        import readline
    except ImportError:  # built without it: plain lines work
        return
    readline.set_history_length(200)
