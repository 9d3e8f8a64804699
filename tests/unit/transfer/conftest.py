"""Owners in other processes: one launcher a module, its children ended after every test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.transfer.processes import Processes


@pytest.fixture(scope="module")
def all_processes() -> Iterator[Processes]:
    started = Processes()
    yield started
    started.close()


@pytest.fixture
def processes(all_processes: Processes) -> Iterator[Processes]:
    yield all_processes
    all_processes.end_children()
