"""What a model's authors recommend for sampling, for requests that do not say (as vLLM does)."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from router.api.protocol import GenerationFields
from workers.regular_file import read_regular

NAMES = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")

_MAX_BYTES = 1 << 20
_log = logging.getLogger(__name__)


def load_sampling_defaults(folder: str) -> dict[str, Any]:
    """The sampling values of a checkpoint's generation_config.json; empty without one.

    A file that is not readable, or a value that a request could not give either, is left out with a warning.
    """
    file = Path(folder) / "generation_config.json"
    try:
        given = json.loads(read_regular(file, max_bytes=_MAX_BYTES))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        _log.warning("%s is not used: %s", file, error)
        return {}
    if not isinstance(given, dict):
        _log.warning("%s is not used: it holds no JSON object", file)
        return {}
    found = {}
    for name in NAMES:
        if given.get(name) is None:
            continue
        try:
            GenerationFields.model_validate({name: given[name]})
        except ValidationError:
            _log.warning("%s: %s is %r, which is not used", file, name, given[name])
        else:
            found[name] = given[name]
    return found


def with_defaults(body: Mapping[str, Any], defaults: Mapping[str, Any]) -> Mapping[str, Any]:
    """A request body in which what is absent or null has its default. A beam search draws nothing: it has
    the penalty's only."""
    is_search = body.get("use_beam_search") is True
    missing = {
        name: value
        for name, value in defaults.items()
        if body.get(name) is None and not (is_search and name != "repetition_penalty")
    }
    return {**body, **missing} if missing else body
