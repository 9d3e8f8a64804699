"""Chat templates: a checkpoint's Jinja program, run in a sandbox with limits of time and size.

Same language as in transformers' `apply_chat_template` (trim_blocks, lstrip_blocks, loop controls, generation
blocks, `raise_exception`, `strftime_now`, `tojson`), which cannot be used here: importing it loads torch.
Templates come from the checkpoint only, never from a request.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from router.api.errors import ApiError, internal_error, invalid


class _GenerationBlock(Extension):
    """`{% generation %}...{% endgeneration %}` marks the answer for training; here it is only its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja's own declaration

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A compiled template. `render` may run in any thread."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], clock: Callable[[], float]) -> None:
        """`special_tokens`: bos_token and the like, as the template's variables. Raises ValueError if it is
        no valid template."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, LoopControlExtension]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"chat template, line {error.lineno}: {error.message}") from None
        except Exception as error:  # a program that is too large or too deep to be compiled
            raise ValueError(f"chat template: {type(error).__name__}: {error}") from None
        self._special_tokens = dict(special_tokens)
        self._clock = clock

    def render(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        add_generation_prompt: bool,
        max_chars: int,
        timeout_s: float,
    ) -> str:
        """The prompt's text.

        Raises ApiError: 400 when the template itself refuses the messages, 500 `template_error` when it
        fails, takes longer than `timeout_s` or writes more than `max_chars`. Time is checked whenever the
        template writes something; a template that loops without writing is the caller's to time out.
        """
        deadline = self._clock() + timeout_s
        pieces: list[str] = []
        size = 0
        try:
            for piece in self._template.generate(
                messages=list(messages),
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            ):
                pieces.append(piece)
                size += len(piece)
                if size > max_chars or self._clock() > deadline:
                    raise internal_error(
                        "template_error",
                        f"The chat template wrote more than {max_chars} characters or took longer than "
                        f"{timeout_s:g} s.",
                    )
        except _Refused as error:
            raise invalid(f"The chat template refuses the messages: {error}", param="messages") from None
        except ApiError:
            raise
        except Exception as error:  # the template is a program: anything can go wrong inside
            raise internal_error(
                "template_error", f"The chat template failed with {type(error).__name__}."
            ) from error
        return "".join(pieces)


class _Refused(jinja2.TemplateError):
    """raise_exception() was called."""


def _raise_exception(message: object) -> NoReturn:
    raise _Refused(str(message)[:500])


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
