"""The table of a router's metrics: what clients saw, and how requests were placed.

Series carry `model` and `replica`. Times begin when the service has the whole request, unless they say
otherwise. What groups say of themselves is in `workers.metrics.group`.
"""

from __future__ import annotations

from router.dispatch.interface import ROUTE_S
from workers.histogram import doubling, one_two_five
from workers.metrics.spec import MetricSpec, counter, gauge, histogram

ROUTER_LABELS = ("model", "replica")

_WAIT_S = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0),
)
_WHOLE_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0)
_TOKEN_S = (
    *(0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075),
    *(0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0),
)
_LAG_S = doubling(0.0005, 12)  # 0.5 ms .. 1 s
_TOKENS = one_two_five(1, 200_000)

# Requests, as clients see them.
REQUESTS = counter("requests", "Admitted requests that ended, by reason", "reason")
GOODPUT = counter("goodput_requests", "Completed requests within the limits of router.http.goodput_*")
REJECTED = counter("rejected", "Requests refused for want of room or groups, by what was full", "reason")
CLIENT_ERRORS = counter("client_errors", "Requests refused as the client's mistake (4xx)", "code")
SERVER_ERRORS = counter("server_errors", "Requests refused or failed for our reasons (5xx)", "code")
DISCONNECTS = counter("client_disconnects", "Clients that left before their answer was complete", "stage")
INFLIGHT = gauge("requests_inflight", "Admitted requests that have not ended")
QUEUED = gauge("queue_requests", "Admitted requests without a token yet")
QUEUED_TOKENS = gauge("queue_tokens", "Prompt tokens of those")
OLDEST = gauge("queue_oldest_age_seconds", "How long the oldest of those has been waiting")
PROMPT_TOKENS = counter("prompt_tokens", "Prompt tokens of admitted requests, as in usage")
CACHED_TOKENS = counter("cached_prompt_tokens", "Of those, found in a prefix cache")
GENERATION_TOKENS = counter("generation_tokens", "Tokens delivered, as in usage")
PROMPT_LENGTH = histogram("request_prompt_tokens", "Prompt tokens of a request", _TOKENS)
OUTPUT_LENGTH = histogram("request_output_tokens", "Tokens delivered to a request that ended", _TOKENS)

# Times.
TTFT = histogram("ttft_seconds", "From the request's arrival to its first token", _WAIT_S)
E2E = histogram("e2e_seconds", "From the request's arrival to its end", _WHOLE_S)
ITL = histogram("itl_seconds", "Gap between tokens of a choice, as they reach the router", _TOKEN_S)
TPOT = histogram("tpot_seconds", "Mean gap between tokens of a choice that ended", _TOKEN_S)
QUEUE = histogram("queue_seconds", "What a request waited in its group's queue", _WAIT_S)
STAGE = histogram(
    "stage_seconds", "Parts of the time to the first token; they add up to it", _WAIT_S, "stage"
)

# Placement.
ROUTE = histogram("route_seconds", "From a tokenized prompt to its being offered to a group", ROUTE_S)
DECISIONS = counter("route_decisions", "Placed requests, by why their group was best", "reason")
RETRIES = counter("retries", "Offers to a further group, by what became of the one before", "reason")
MIGRATIONS = counter("migrations", "Requests whose group ended, by what became of them", "result")
PREDICTED_TOKENS = counter(
    "route_predicted_hit_tokens", "Prompt tokens that placement took to be cached at the group it chose"
)
INDEX_BLOCKS = gauge("index_blocks", "Cached blocks of all groups that placement knows of")
INDEX_EVENTS = counter("index_events", "Entries of block logs that placement has read", "kind")
INDEX_GAPS = counter("index_event_gaps", "Times that entries of a block log were missing")

# KV blocks between groups.
KV_SOURCES = counter(
    "kv_source_decisions", "Placed requests, by who was to give KV blocks of their prompt", "source"
)
KV_REDIRECTS = counter("kv_redirects", "Sources that failed, by who was to give instead", "source")
KV_PULLED = counter("kv_pulled_tokens", "Prompt tokens whose KV blocks were read from another group")
KV_RECOMPUTED = counter("kv_recomputed_tokens", "Prompt tokens that should have been read, and were not")
PREFILLS = counter("prefill_dispatches", "Prompts given to prefill groups, by how it ended", "outcome")
_PAIR = ("source", "reader")
KV_PAIR_READS = counter("kv_pair_reads", "Reads that brought KV blocks from a group to another", *_PAIR)
KV_PAIR_FAILURES = counter("kv_pair_failures", "Those that brought nothing, though it was there", *_PAIR)
KV_PAIR_BYTES = counter("kv_pair_bytes", "What the reads of two groups brought", *_PAIR)
KV_PAIR_RATE = gauge("kv_pair_bytes_per_second", "How fast placement expects a read to be", *_PAIR)

# The router itself.
LOOP_LAG = histogram("event_loop_lag_seconds", "How late the router's event loop runs a timer", _LAG_S)
TELEMETRY_FAILURES = counter(
    "telemetry_failures", "Times these counts could not be exchanged with the other replicas"
)
TELEMETRY_AGE = gauge("telemetry_age_seconds", "Age of the replica's counts in this answer")
BUILD = gauge("build_info", "1; what runs", "version", "ray", "python")

ROUTER_METRICS: tuple[MetricSpec, ...] = (
    *(REQUESTS, GOODPUT, REJECTED, CLIENT_ERRORS, SERVER_ERRORS, DISCONNECTS),
    *(INFLIGHT, QUEUED, QUEUED_TOKENS, OLDEST),
    *(PROMPT_TOKENS, CACHED_TOKENS, GENERATION_TOKENS, PROMPT_LENGTH, OUTPUT_LENGTH),
    *(TTFT, E2E, ITL, TPOT, QUEUE, STAGE),
    *(ROUTE, DECISIONS, RETRIES, MIGRATIONS, PREDICTED_TOKENS, INDEX_BLOCKS, INDEX_EVENTS, INDEX_GAPS),
    *(KV_SOURCES, KV_REDIRECTS, KV_PULLED, KV_RECOMPUTED, PREFILLS),
    *(KV_PAIR_READS, KV_PAIR_FAILURES, KV_PAIR_BYTES, KV_PAIR_RATE),
    *(LOOP_LAG, TELEMETRY_FAILURES, TELEMETRY_AGE, BUILD),
)

# Values of labels, for what is counted from zero on: the step from no series to one is no increase to
# Prometheus.
REASONS = ("stop", "length", "aborted", "error")
DISCONNECT_STAGES = ("waiting", "answering")
