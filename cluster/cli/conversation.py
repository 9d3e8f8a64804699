"""A conversation at the terminal, without the terminal: messages, settings, and the slash commands."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster.cli.sse import AnswerStats
from cluster.config.problems import closest
from cluster.figures.words import counted

SETTINGS: Mapping[str, type] = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "max_tokens": int,
    "seed": int,
    "repetition_penalty": float,
    "presence_penalty": float,
    "frequency_penalty": float,
    "stop": str,
}

HELP = """\
/system TEXT    set the system prompt and start over     /system shows it
/set NAME VALUE change a setting, /set NAME takes it back  /set shows all
/reset          forget the conversation
/stats          time to first token, tokens/s, cached tokens of the last answer
/save FILE      write the conversation as JSON
/exit           leave (or Ctrl-D); Ctrl-C stops an answer
\"\"\"             begins and ends a message of several lines"""

COMMANDS = ("/system", "/set", "/reset", "/stats", "/save", "/help", "/exit", "/quit")


class Leave(Exception):
    """The person wants to go."""


@dataclass(slots=True)
class Conversation:
    """What has been said, and how the next answer is asked for."""

    model: str
    system: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    turns: list[dict[str, str]] = field(default_factory=list)  # user and assistant, in order
    last: AnswerStats | None = None

    def messages(self) -> list[dict[str, str]]:
        """What the next request sends."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *self.turns]

    def is_command(self, line: str) -> bool:
        """Whether a line is for us and not for the model."""
        return line.split(maxsplit=1)[0] in COMMANDS if line.startswith("/") and len(line) > 1 else False

    def run(self, line: str) -> str:
        """Carry out a slash command and give what to print. Raises Leave for /exit."""
        name, _, argument = line.strip().partition(" ")
        argument = argument.strip()
        match name:
            case "/system":
                return self._set_system(argument)
            case "/set":
                return self._set(argument)
            case "/reset":
                self.turns.clear()
                return "forgotten"
            case "/stats":
                return stats_text(self.last)
            case "/save":
                return self._save(argument)
            case "/help":
                return HELP
            case "/exit" | "/quit":
                raise Leave
        guess = closest(name, COMMANDS)
        return f"no command {name}" + (f"; did you mean {guess}?" if guess else "; /help lists them")

    def set(self, name: str, text: str) -> None:
        """Change a setting of the requests to come. Raises ValueError saying what is possible."""
        kind = SETTINGS.get(name)
        if kind is None:
            guess = closest(name, SETTINGS)
            known = f"did you mean {guess}?" if guess else f"known: {', '.join(SETTINGS)}"
            raise ValueError(f"no setting {name}; {known}")
        try:
            value = kind(text.strip())
        except ValueError as error:
            raise ValueError(f"{name} takes a value of type {kind.__name__}, not {text.strip()!r}") from error
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{name} takes a finite number, not {text.strip()!r}")
        self.settings[name] = value

    def _set_system(self, text: str) -> str:
        if not text:
            return self.system or "no system prompt of yours; the model's template has its own"
        self.system = text
        self.turns.clear()
        return "system prompt set, conversation started over"

    def _set(self, argument: str) -> str:
        name, _, text = argument.partition(" ")
        if not name:
            return (
                "\n".join(f"{key} {value}" for key, value in self.settings.items())
                or "all as the server has it"
            )
        if name in SETTINGS and not text.strip():
            self.settings.pop(name, None)
            return f"{name} is the server's again"
        try:
            self.set(name, text)
        except ValueError as error:
            return str(error)
        return f"{name} {self.settings[name]}"

    def _save(self, name: str) -> str:
        if not name:
            return "give a file name: /save talk.json"
        content = {"model": self.model, "settings": self.settings, "messages": self.messages()}
        try:
            with Path(name).expanduser().open("x", encoding="utf-8") as stream:
                json.dump(content, stream, indent=2, ensure_ascii=False)
                stream.write("\n")
        except FileExistsError:
            return f"{name} exists; choose another name"
        except OSError as error:
            return f"cannot write {name}: {error.strerror}"
        return f"saved {counted(len(content['messages']), 'message')} to {name}"


def stats_text(stats: AnswerStats | None) -> str:
    """The numbers of an answer on one line."""
    if stats is None:
        return "no answer yet"
    parts = []
    if stats.ttft_s is not None:
        parts.append(f"first token after {stats.ttft_s * 1e3:.0f} ms")
    if stats.completion_tokens is not None:
        parts.append(counted(stats.completion_tokens, "token"))
    if stats.tokens_per_s is not None:
        parts.append(f"{stats.tokens_per_s:.1f} tokens/s")
    if stats.prompt_tokens is not None:
        parts.append(f"prompt {stats.prompt_tokens} tokens, {stats.cached_tokens or 0} of them cached")
    parts.append(f"ended: {stats.finish_reason or 'stopped by you'}")
    return ", ".join(parts)
