"""The HTTP application: routes, bodies, answers. Serving is `router.serving.service`, access is `gate`.

Routes: POST /v1/chat/completions, /v1/completions, /tokenize, /detokenize; GET /v1/models, /v1/models/{id},
/health, /ready, /version, /metrics, /load, /explain/{id of an answer}, /openapi.json. Everything else is
404 or 405 in the same error shape.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from fastapi import FastAPI, Request
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import Response

from router.api.auth import Caller, load_api_keys
from router.api.errors import INVALID_REQUEST, ApiError, invalid, quoted
from router.api.json_body import parse_object, read_body
from router.api.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from router.build import new_random
from router.http.disconnect import Deadline, EventStream, StreamLimits, unless_disconnected
from router.http.gate import Gate, count_error
from router.serving.service import Service
from router.serving.work import Work
from router.settings import PASSED_TIMEOUT_HEADER, TIMEOUT_HEADER, RouterSettings
from router.telemetry.publisher import MetricsPublisher

_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Handler = Callable[[Request], Awaitable[Response]]
Prepare = Callable[[dict[str, Any], str, Caller], Coroutine[Any, Any, Work]]


def create_app(
    service: Service,
    settings: RouterSettings,
    *,
    telemetry: MetricsPublisher | None = None,
) -> FastAPI:
    """The application over a service.

    `telemetry` answers `/metrics` for all replicas; None: this one is the only one.

    Reads the API key file; raises ValueError or OSError when it cannot.
    """
    random = new_random()
    app = FastAPI(
        title="Tandem",
        version=settings.version,
        docs_url=None,  # its page loads scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
    )
    routes = _Routes(service, settings, telemetry or MetricsPublisher(service.metrics))
    app.add_middleware(
        Gate,
        settings=settings,
        keys=load_api_keys(settings.api_keys_file),
        metrics=service.metrics,
        new_id=lambda: f"{random.getrandbits(128):032x}",
    )

    async def on_http_error(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return routes.refuse(_of_http_exception(error))

    async def on_api_error(_: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return routes.refuse(error)

    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(ApiError, on_api_error)
    _post(app, "/v1/chat/completions", routes.chat, ChatRequest)
    _post(app, "/v1/completions", routes.completions, CompletionRequest)
    _post(app, "/tokenize", routes.tokenize, TokenizeRequest)
    _post(app, "/detokenize", routes.detokenize, DetokenizeRequest)
    for path, handler in (
        ("/v1/models", routes.models),
        ("/v1/models/{name:path}", routes.model),
        ("/health", routes.health),
        ("/ready", routes.ready),
        ("/version", routes.version),
        ("/metrics", routes.metrics),
        ("/load", routes.load),
        ("/explain/{id}", routes.explain),
    ):
        app.add_api_route(path, handler, methods=["GET"], response_model=None)
    return app


def _post(app: FastAPI, path: str, handler: Handler, body: type[BaseModel]) -> None:
    """A POST route that reads its body itself; the model only describes it in /openapi.json."""
    schema = body.model_json_schema(ref_template=f"#/components/schemas/{body.__name__}.{{model}}")
    schema = _inlined(schema, schema.pop("$defs", {}), f"#/components/schemas/{body.__name__}.")
    app.add_api_route(
        path,
        handler,
        methods=["POST"],
        response_model=None,
        openapi_extra={
            "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}
        },
    )


def _inlined(schema: Any, definitions: dict[str, Any], prefix: str) -> Any:
    """A JSON schema with its (never recursive) references replaced by what they name."""
    if isinstance(schema, dict):
        if isinstance(name := schema.get("$ref"), str):
            return _inlined(definitions[name.removeprefix(prefix)], definitions, prefix)
        return {key: _inlined(value, definitions, prefix) for key, value in schema.items()}
    return [_inlined(value, definitions, prefix) for value in schema] if isinstance(schema, list) else schema


class _Routes:
    """The endpoints."""

    def __init__(self, service: Service, settings: RouterSettings, telemetry: MetricsPublisher) -> None:
        self._service = service
        self._settings = settings
        self._telemetry = telemetry

    async def chat(self, request: Request) -> Response:
        return await self._generate(request, self._service.prepare_chat)

    async def completions(self, request: Request) -> Response:
        return await self._generate(request, self._service.prepare_completion)

    async def tokenize(self, request: Request) -> Response:
        return _json(await self._service.tokenize(await self._body(request)))

    async def detokenize(self, request: Request) -> Response:
        return _json(await self._service.detokenize(await self._body(request)))

    async def models(self, _: Request) -> Response:
        return _json(self._service.models())

    async def model(self, request: Request) -> Response:
        return _json(self._service.model(request.path_params["name"]))

    async def health(self, _: Request) -> Response:
        return Response(status_code=200 if self._service.is_healthy else 503)

    async def ready(self, _: Request) -> Response:
        is_ready = self._service.is_ready
        return _json({"ready": is_ready}, 200 if is_ready else 503)

    async def version(self, _: Request) -> Response:
        return _json({"version": self._settings.version})

    async def metrics(self, _: Request) -> Response:
        return Response(await self._telemetry.text(), headers={"content-type": _METRICS_TYPE})

    async def load(self, _: Request) -> Response:
        return _json(self._service.load())

    async def explain(self, request: Request) -> Response:
        return _json(self._service.explain(request.path_params["id"]))

    def refuse(self, error: ApiError) -> Response:
        """The answer of an error, counted."""
        count_error(self._service.metrics, error)
        return Response(
            error.body(), status_code=error.status, headers=error.headers, media_type="application/json"
        )

    async def _body(self, request: Request) -> dict[str, Any]:
        raw = await read_body(
            request.receive,
            request.headers,
            max_bytes=self._settings.max_body_bytes,
            timeout_s=self._settings.body_timeout_s,
        )
        return parse_object(
            raw, max_depth=self._settings.max_json_depth, max_keys=self._settings.max_json_keys
        )

    def _max_s(self, request: Request) -> float:
        """The longest that an answer may take: what the client says in a header, up to our own limit."""
        asked = request.headers.get(PASSED_TIMEOUT_HEADER, request.headers.get(TIMEOUT_HEADER))
        if asked is None:
            return self._settings.max_request_s
        try:
            seconds = float(asked)
        except ValueError:
            seconds = 0.0
        if not 0 < seconds < math.inf:
            raise invalid(
                f"The header {TIMEOUT_HEADER} must be a number above 0, got {quoted(asked)}.",
                code="invalid_header",
            )
        return min(seconds, self._settings.max_request_s)

    async def _generate(self, request: Request, prepare: Prepare) -> Response:
        max_s = self._max_s(request)
        body_tree = await self._body(request)
        deadline = Deadline(max_s, time.monotonic)
        preparing = prepare(body_tree, request.state.request_id, request.state.caller)
        work = await unless_disconnected(preparing, request.receive, deadline)
        if not work.stream:
            body = await unless_disconnected(self._service.complete(work), request.receive, deadline)
            return Response(body, media_type="application/json")
        return EventStream(
            self._service.stream(work),
            limits=StreamLimits(self._settings.keep_alive_s, self._settings.send_timeout_s),
            deadline=deadline,
            clock=time.monotonic,
            refuse=self.refuse,
            on_error=lambda error: count_error(self._service.metrics, error),
        )


def _json(value: object, status: int = 200) -> Response:
    return Response(json.dumps(value), status_code=status, media_type="application/json")


def _of_http_exception(error: HTTPException) -> ApiError:
    """What the framework found wrong with a request, in our shape."""
    headers = dict(error.headers or {})
    if error.status_code == 404:
        return ApiError(404, "There is no such route.", code="not_found", headers=headers)
    if error.status_code == 405:
        return ApiError(
            405, "This route does not take this method.", code="method_not_allowed", headers=headers
        )
    return ApiError(error.status_code, str(error.detail), code=INVALID_REQUEST, headers=headers)
