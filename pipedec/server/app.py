"""The HTTP API as one ASGI application: the routes that are about no answer, and what is around all routes."""

from __future__ import annotations

from functools import partial
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request

import pipedec
from pipedec.core.errors import PipedecError
from pipedec.live.page import POLICY, Hub, Viewer, page
from pipedec.server.anthropic.messages import messages_routes
from pipedec.server.bodies import BODY_ERRORS, error_responses
from pipedec.server.conversation import read_messages
from pipedec.server.delivery import EventStream, unless_gone
from pipedec.server.errors import bad_request, on_error, on_internal_error
from pipedec.server.front import Front
from pipedec.server.metrics import ServerMetrics
from pipedec.server.middleware import ApiKeys, BodyLimits, RequestNotes
from pipedec.server.model_lists import lm_studio_routes, models_routes
from pipedec.server.ollama.lists import lists_routes
from pipedec.server.ollama.routes import ollama_routes
from pipedec.server.openai.chat import chat_routes
from pipedec.server.openai.completions import completions_routes
from pipedec.server.openai.responses import responses_routes
from pipedec.server.prompts import READERS, check_tokens, tokenized
from pipedec.server.protocol import (
    DetokenizeBody,
    DetokenizeResponse,
    HealthResponse,
    TokenizeBody,
    TokenizeResponse,
    VersionResponse,
)
from pipedec.server.structures import shown


class Api(FastAPI):
    """Documents what it does: mistakes in a body are 400, as OpenAI has it, and not FastAPI's 422."""

    def openapi(self) -> dict[str, Any]:
        document = super().openapi()
        for path in document["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
        for name in ("HTTPValidationError", "ValidationError"):
            document["components"]["schemas"].pop(name, None)
        return document


def create_app(front: Front, metrics: ServerMetrics | None = None) -> FastAPI:
    """All routes and what is around them. ``front`` may change its state at any time. ``metrics`` are at ``/metrics``."""
    app = Api(title="pipedec: an OpenAI-compatible API", version=pipedec.__version__, redoc_url=None)
    answers = (completions_routes, chat_routes, responses_routes, messages_routes, ollama_routes)
    for add_routes in (*answers, tokens_routes, models_routes, lists_routes, lm_studio_routes, health_routes, live_routes):
        add_routes(app, front)
    if metrics is not None:
        app.add_api_route("/metrics", metrics.response, include_in_schema=False, response_model=None)
    for kind in (HTTPException, RequestValidationError, PipedecError):
        app.add_exception_handler(kind, on_error)
    app.add_exception_handler(Exception, on_internal_error)
    settings = front.settings
    app.add_middleware(BodyLimits, settings=settings)  # the last one is the outermost
    if settings.api_keys:
        app.add_middleware(ApiKeys, keys=settings.api_keys)
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.allowed_origins,
            allow_methods=settings.allowed_methods,
            allow_headers=settings.allowed_headers,
            allow_credentials=settings.allow_credentials,
            allow_private_network="*" not in settings.allowed_origins,
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    app.add_middleware(RequestNotes, observers=front.observers)
    return app


def tokens_routes(app: FastAPI, front: Front) -> None:
    """``/tokenize`` and ``/detokenize``, as vLLM has them."""

    @app.post("/tokenize", response_model_exclude_unset=True, responses=BODY_ERRORS, tags=["tokens"])
    async def tokenize(body: TokenizeBody, request: Request) -> TokenizeResponse:
        """Token ids of a prompt, or of messages after the chat template."""
        served = front.require()
        front.settings.check_model(body.model)
        if body.prompt is not None and body.messages is None:
            [prompt] = await unless_gone(request, tokenized(body.prompt, served, 1, body.add_special_tokens is not False))
        elif body.messages is not None and body.prompt is None:
            prompt = await read_messages(request, body, served, {"tools": shown(body.tools)} if body.tools else {})
        else:
            raise bad_request("give either prompt or messages", "prompt")
        tokens = list(prompt.token_ids)
        found: dict[str, Any] = {"count": len(tokens), "max_model_len": served.max_model_len, "tokens": tokens}
        if body.return_token_strs:
            found["token_strs"] = [served.tokenizer.token(token) for token in tokens]
        return TokenizeResponse(**found)

    @app.post("/detokenize", responses=BODY_ERRORS, tags=["tokens"])
    async def detokenize(body: DetokenizeBody, request: Request) -> DetokenizeResponse:
        """The text of token ids."""
        served = front.require()
        front.settings.check_model(body.model)
        if len(body.tokens) > served.max_model_len:
            raise bad_request(f"tokens are {len(body.tokens)}, but the model's context is {served.max_model_len}", "tokens")
        check_tokens(body.tokens, len(served.tokenizer), "tokens")
        reading = READERS.run(partial(served.tokenizer.decode, body.tokens, skip_special_tokens=False))
        return DetokenizeResponse(prompt=await unless_gone(request, reading))


def health_routes(app: FastAPI, front: Front) -> None:
    """``/health`` and ``/ready``, for load balancers, and ``/version``: none needs a key."""

    def answer(is_ready: bool) -> HealthResponse:
        status = front.require(is_ready).engine.last_status
        if status is None:
            return HealthResponse(status="ok")
        return HealthResponse(status="recovering" if status.is_recovering else "ok", epoch=status.epoch)

    @app.get("/health", responses=error_responses(503), tags=["health"])
    async def check_health() -> HealthResponse:
        """Whether the cluster lives: 503 while it is loading, and when it was lost for good."""
        return answer(is_ready=False)

    @app.get("/ready", responses=error_responses(503), tags=["health"])
    async def check_ready() -> HealthResponse:
        """Whether requests are taken: as /health, and 503 while the server shuts down."""
        return answer(is_ready=True)

    @app.get("/version", tags=["models"])
    async def show_version() -> VersionResponse:
        """The version of pipedec."""
        return VersionResponse(version=pipedec.__version__)


def live_routes(app: FastAPI, front: Front) -> None:
    """The chat page, the live page and the feed that it reads (docs/live.md)."""
    hub, headers = Hub(lambda: front.is_ending), {"Content-Security-Policy": POLICY, "Referrer-Policy": "no-referrer"}

    @app.get("/", include_in_schema=False)
    async def show_chat() -> Response:
        """The page, which needs no key; the API that it asks does."""
        return HTMLResponse(page("chat.html"), headers=headers)

    @app.get("/live", include_in_schema=False)
    async def show_page() -> Response:
        """The page, which needs no key; the feed that it reads does."""
        return HTMLResponse(page("page.html"), headers=headers)

    @app.get("/live/feed", include_in_schema=False)  # it never ends, which OpenAPI cannot say
    async def follow() -> EventStream:
        """The live feed as server-sent events."""
        engine, viewer = front.require().engine, Viewer(hub.going_on)
        return EventStream(hub.events(engine.live, viewer), front.settings, lambda: hub.leave(viewer))
