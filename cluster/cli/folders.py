"""The folder of the model that a person names."""

from __future__ import annotations

from pathlib import Path

from cluster.cli.services import Services
from cluster.cli.terminal import Phases, Terminal
from cluster.config.problems import ConfigError, Problem
from cluster.config.tree import EMBEDDED_MODEL
from cluster.models.embedded import EmbeddedModelError, canonical_path, model_folder


def folder_of(terminal: Terminal, services: Services, name: str) -> Path:
    """Folder of the model that a person names; the embedded one is converted first when needed. Raises
    ConfigError and EmbeddedModelError."""
    try:
        folder = model_folder(name)
    except EmbeddedModelError as error:
        raise ConfigError([Problem(path="", message=str(error))]) from error
    return embedded_folder(terminal, services) if canonical_path(name) == EMBEDDED_MODEL else folder


def embedded_folder(terminal: Terminal, services: Services) -> Path:
    """That of the embedded model, converted first when needed. Raises EmbeddedModelError."""
    with Phases(terminal) as phases:
        return services.ensure_model(phases.start)
