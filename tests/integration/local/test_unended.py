"""What a client gets that does not send the rest of its request; the last tests of this folder, as it takes
its time."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from tests.integration.local.raw import Answer, assert_refused

pytestmark = pytest.mark.integration


def test_a_request_without_an_end_is_refused(unended: Future[Answer]) -> None:
    assert_refused(unended.result(20.0), 408, "request_timeout")
