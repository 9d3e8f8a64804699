"""What a router replica is told at start: limits and names. Data only, no environment, no defaults
elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# A client's own limit for its request, seconds. Serve acts on the first name too, with an answer of its own
# (408 in plain text), so its HAProxy passes the header on under the second (`cluster.launch.haproxy_rules`).
TIMEOUT_HEADER = "x-request-timeout-seconds"
PASSED_TIMEOUT_HEADER = "x-generation-timeout-seconds"


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSettings:
    """Limits and names of the HTTP service. Every limit answers with an error that names it."""

    model_name: str  # served name: `/v1/models`, and what `model` in a request must say
    replica: str = "router"  # label of this replica in metrics
    version: str = "0.1.0"  # answer of `/version`
    api_keys_file: str | None = None  # absolute or ~/...; one key a line; None: no key is asked for
    cors_origins: tuple[str, ...] = ()  # browsers' origins that may call; "*" for all; empty: no CORS header
    # What a request that says no temperature, top_k, top_p, min_p or repetition_penalty gets: those
    # of the checkpoint's generation_config.json, or OpenAI's (temperature 1, nothing cut off).
    sampling_defaults: Literal["model", "openai"] = "model"
    lenient: bool = False  # ignore unknown request fields instead of refusing them

    # One HTTP request.
    max_body_bytes: int = 4 << 20
    max_header_bytes: int = 16 << 10
    body_timeout_s: float = 30.0  # for the whole body to arrive
    max_json_depth: int = 64
    max_json_keys: int = 100_000  # and array elements other than numbers
    max_prompts: int = 32  # prompts in one completions request
    max_choices: int = 8  # `n` and `best_of`
    max_logprobs: int = 20
    max_stops: int = 4
    max_stop_chars: int = 256
    max_stop_token_ids: int = 64
    max_logit_bias: int = 300
    max_template_chars_per_token: int = 4  # rendered chat: at most this times the context length
    keep_alive_s: float = 15.0  # a silent stream gets an SSE comment this often
    send_timeout_s: float = 60.0  # a client that takes nothing of its stream for so long has left
    max_request_s: float = 3600.0  # the longest generation; a client may ask for less

    # Limits that goodput is counted by, seconds; None: not one. With neither, it is not counted.
    goodput_ttft_s: float | None = None  # to the first token
    goodput_tpot_s: float | None = None  # mean gap between the tokens of a choice

    # Text work off the event loop.
    text_threads: int = 2
    render_timeout_s: float = 1.0
    tokenize_timeout_s: float = 10.0

    # Admission, over all requests of this replica.
    # For the first group of pools that may be at zero. 0: one waits only for a group that is being started.
    group_wait_s: float = 0.0
    max_queued_requests: int = 512  # admitted, no token yet; as many before, whose text is worked on
    max_queued_tokens: int = 1_000_000  # prompt tokens of those
    max_inflight_requests: int = 2048  # queued and running
    max_requests_per_key: int | None = None  # in flight for one API key; None: no own limit
