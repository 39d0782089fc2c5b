"""The HTTP API as one ASGI application."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

import pipedec
from pipedec.core import PipedecError
from pipedec.server.chat import chat_router
from pipedec.server.completions import completions_router
from pipedec.server.errors import on_engine_error, on_http_error, on_internal_error, on_invalid
from pipedec.server.front import Front
from pipedec.server.health import health_router
from pipedec.server.live import live_router
from pipedec.server.middleware import ApiKeys, BodyLimits, RequestNotes
from pipedec.server.models import models_router
from pipedec.server.tokens import tokens_router

_TITLE = "pipedec: an OpenAI-compatible API"


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


def create_app(front: Front) -> FastAPI:
    """All routes and what is around them. ``front`` may change its state at any time."""
    app = Api(title=_TITLE, version=pipedec.__version__, redoc_url=None)
    for make_router in (completions_router, chat_router, tokens_router, models_router, health_router, live_router):
        app.include_router(make_router(front))
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(RequestValidationError, on_invalid)
    app.add_exception_handler(PipedecError, on_engine_error)
    app.add_exception_handler(Exception, on_internal_error)
    _add_middleware(app, front)
    return app


def _add_middleware(app: FastAPI, front: Front) -> None:
    """The last one is the outermost."""
    settings = front.settings
    app.add_middleware(BodyLimits, settings=settings)
    if settings.api_keys:
        app.add_middleware(ApiKeys, keys=settings.api_keys)
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.allowed_origins,
            allow_methods=settings.allowed_methods,
            allow_headers=settings.allowed_headers,
            allow_credentials=settings.allow_credentials,
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    app.add_middleware(RequestNotes, observer=front.observer)
