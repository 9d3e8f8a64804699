"""Whether Serve starts groups that will answer: known from the moment an update was accepted.

The directory hears of a group from its front, which on a busy machine runs half a minute after that. Asked
only while a request waits: no group is there, or none that is takes it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from router.tasks import end_tasks
from workers.tasks import start_task
from workers.types import Role

_ANSWERING_POOLS = (Role.UNIFIED.value, Role.DECODE.value)
_STARTING = ("STARTING", "UPDATING", "RECOVERING")  # of Serve's states of a replica
_FRESH_S = 0.5  # between two questions
_PATIENCE_S = 3.0  # with a controller that does not answer: it may be away, and the groups with it

_log = logging.getLogger("ray.serve")

ReplicaStates = Mapping[str, Mapping[str, int]]  # deployment -> state -> number of replicas


class StartingGroups:
    """Asks Serve's controller. Lives on the router's event loop."""

    def __init__(
        self,
        application: str,
        *,
        states: Callable[[str], ReplicaStates] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`states` blocks; it raises RayError or RayServeException."""
        self._application = application
        self._states = states or replica_states
        self._clock = clock
        self._asking: asyncio.Task[None] | None = None
        self._asked_s = self._answered_s = float("-inf")
        self._is_one = False

    def __call__(self) -> bool:
        """By the last answer; asks again when that is old. While none is known, there may be one."""
        now_s = self._clock()
        if (self._asking is None or self._asking.done()) and now_s - self._answered_s > _FRESH_S:
            self._asked_s = now_s
            self._asking = start_task(self._ask(), "question for groups that start")
        if now_s - self._answered_s <= _PATIENCE_S:
            return self._is_one
        return now_s - self._asked_s < _PATIENCE_S

    async def stop(self) -> None:
        """Asks no more."""
        if self._asking is not None:
            await end_tasks(self._asking)

    async def _ask(self) -> None:
        is_one = False
        try:
            states = await asyncio.to_thread(self._states, self._application)
            is_one = any(
                states.get(pool, {}).get(state, 0) for pool in _ANSWERING_POOLS for state in _STARTING
            )
        except (RayError, RayServeException) as error:
            _log.warning("Serve does not say what it starts: %r", error)
        finally:
            self._is_one, self._answered_s = is_one, self._clock()


def replica_states(application: str) -> ReplicaStates:
    """How many replicas each deployment of an application has in which state. Asks Ray: not on a loop."""
    found = serve.status().applications.get(application)
    if found is None:
        return {}
    return {
        name: {str(state): number for state, number in deployment.replica_states.items()}
        for name, deployment in found.deployments.items()
    }
