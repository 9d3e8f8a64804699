"""How many requests a router replica takes on, and what it says to the others.

A request is *queued* from admission to its first token and *running* from then to its end. Bounds: queued
requests, queued prompt tokens, requests in flight, and optionally requests in flight for one API key. A full
queue is 503, a caller's own limit 429; both carry Retry-After, spread so that refused clients do not come
back together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import TracebackType

from router.api.errors import ApiError, overloaded
from router.settings import RouterSettings

# Why requests were refused: what was full, or not there.
REJECTIONS = (
    "draining",
    "inflight",
    "queue_requests",
    "queue_tokens",
    "key_limit",
    "text_busy",
    "no_group",
    "group_busy",
)
_SMOOTHING = 0.1  # weight of the newest queue time in the moving mean
_MIN_RETRY_S, _MAX_RETRY_S = 1.0, 60.0  # OpenAI's client follows up to 120 s


class Admission:
    """Counts the requests of this replica. Used from one event loop."""

    def __init__(
        self, settings: RouterSettings, *, clock: Callable[[], float], random: Callable[[], float]
    ) -> None:
        """`random`: uniform in [0, 1), for the spread of Retry-After."""
        self._settings = settings
        self._clock = clock
        self._random = random
        self.num_inflight = 0
        self.queued_tokens = 0
        self.is_draining = False
        self.rejected: Counter[str] = Counter()  # by REJECTIONS
        self._queued: dict[AdmittedRequest, float] = {}  # when they came, in that order
        self._inflight_of_tenant: Counter[str] = Counter()
        self._mean_queue_s = 0.0

    @property
    def num_queued(self) -> int:
        """Admitted requests without a token yet."""
        return len(self._queued)

    def check(self, tenant: str, num_tokens: int = 0) -> None:
        """Raises ApiError 503 or 429 when a request would not be admitted now."""
        limits = self._settings
        if self.is_draining:
            raise self._refusal(
                "draining", "This router is shutting down; another one will answer.", code="draining"
            )
        if self.num_inflight >= limits.max_inflight_requests:
            raise self._refusal(
                "inflight", f"{self.num_inflight} requests are in flight, which is the limit."
            )
        if self.num_queued >= limits.max_queued_requests:
            raise self._refusal(
                "queue_requests", f"{self.num_queued} requests are waiting, which is the limit."
            )
        # One request alone is always admitted, however long.
        if self.num_queued and self.queued_tokens + num_tokens > limits.max_queued_tokens:
            raise self._refusal(
                "queue_tokens", f"{self.queued_tokens} prompt tokens are waiting; the limit is near."
            )
        own_limit = limits.max_requests_per_key
        if tenant and own_limit is not None and self._inflight_of_tenant[tenant] >= own_limit:
            raise self._refusal(
                "key_limit",
                f"This API key has {own_limit} requests in flight, which is its limit.",
                code="rate_limit_exceeded",
                status=429,
            )

    def admit(self, tenant: str, num_tokens: int) -> AdmittedRequest:
        """A place for one request of `num_tokens` prompt tokens, to be used in `with`. Raises as `check`."""
        self.check(tenant, num_tokens)
        self.num_inflight += 1
        self.queued_tokens += num_tokens
        self._inflight_of_tenant[tenant] += 1
        now = self._clock()
        place = AdmittedRequest(self, tenant, num_tokens, now)
        self._queued[place] = now
        return place

    @property
    def oldest_s(self) -> float:
        """How long the request that has waited longest for its first token has done so."""
        return self._clock() - next(iter(self._queued.values())) if self._queued else 0.0

    def unavailable(
        self,
        reason: str,
        message: str,
        *,
        code: str = "server_is_overloaded",
        retry_after_s: float = _MIN_RETRY_S,
    ) -> ApiError:
        """503 for one of REJECTIONS outside of this replica, with a Retry-After around `retry_after_s`."""
        self.rejected[reason] += 1
        return overloaded(message, retry_after_s=self._spread(retry_after_s), code=code)

    def _refusal(
        self, reason: str, message: str, *, code: str = "server_is_overloaded", status: int = 503
    ) -> ApiError:
        self.rejected[reason] += 1
        wait_s = min(max(self._mean_queue_s, _MIN_RETRY_S), _MAX_RETRY_S)
        return overloaded(message, retry_after_s=self._spread(wait_s), code=code, status=status)

    def _spread(self, wait_s: float) -> float:
        """A waiting time around `wait_s`, so that those who are told at once do not come back at once."""
        return wait_s * (0.75 + 0.5 * self._random())

    def _leave_queue(self, place: AdmittedRequest, num_tokens: int, waited_s: float | None) -> None:
        del self._queued[place]
        self.queued_tokens -= num_tokens
        if waited_s is not None:
            self._mean_queue_s += _SMOOTHING * (waited_s - self._mean_queue_s)

    def _leave(self, tenant: str) -> None:
        self.num_inflight -= 1
        self._inflight_of_tenant[tenant] -= 1
        if not self._inflight_of_tenant[tenant]:
            del self._inflight_of_tenant[tenant]


class AdmittedRequest:
    """The place of one request; leaving the `with` block frees it."""

    def __init__(self, admission: Admission, tenant: str, num_tokens: int, admitted_at: float) -> None:
        self._admission = admission
        self._tenant = tenant
        self._num_tokens = num_tokens
        self._admitted_at = admitted_at
        self.is_queued = True  # no token yet

    def first_token(self) -> None:
        """The request has left the queue. Only the first call counts."""
        if self.is_queued:
            self.is_queued = False
            waited_s = self._admission._clock() - self._admitted_at
            self._admission._leave_queue(self, self._num_tokens, waited_s)

    def __enter__(self) -> AdmittedRequest:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.is_queued:
            self.is_queued = False
            self._admission._leave_queue(self, self._num_tokens, None)
        self._admission._leave(self._tenant)
