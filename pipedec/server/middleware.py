"""Middleware of every route, as pure ASGI: request ids and notes for observers, API keys, limits of bodies.

Starlette's own base class for middleware would hide from the routes that a client goes away.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pipedec.server.errors import CLIENT_CLOSED_REQUEST, ApiError, error_response, is_anthropic
from pipedec.server.front import HttpExchange, Observer, ServerSettings

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
_CLOSE = {"Connection": "close"}
_LINGER_SECONDS = 2.0
_GUARDED = re.compile(r"/(v1|api|live/feed|tokenize|detokenize)(/|$)")


class RequestNotes:
    """Gives every request and its response an id, and reports to the observers how the request ended.

    The id is the client's ``X-Request-Id`` if it has one. It is never used as a key, so two requests may have the same.
    """

    def __init__(self, app: ASGIApp, observers: Sequence[Observer]) -> None:
        self._app = app
        self._observers = observers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        started, status = time.perf_counter(), CLIENT_CLOSED_REQUEST

        async def send_noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["X-Request-Id"] = request_id
                if is_anthropic(scope["path"]):
                    headers["request-id"] = request_id  # Anthropic's
            await send(message)

        try:
            await self._app(scope, receive, send_noted)
        except Exception:
            status = 500
            raise
        finally:
            route, client = getattr(scope.get("route"), "path", "other"), (scope.get("client") or ("",))[0]
            exchange = HttpExchange(
                request_id, scope["method"], route, status, time.perf_counter() - started, client, scope["state"].get("error")
            )
            for observer in self._observers:
                observer.responded(exchange)


class ApiKeys:
    """Refuses requests to ``/v1``, ``/api``, ``/tokenize``, ``/detokenize`` and the live feed without one of the keys, which are
    compared in constant time.

    Each key is a tenant. Its name is random, as it leaves this process: nothing about the key can be learned from it.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._tenants = {hashlib.sha256(key.encode()).digest(): uuid.uuid4().hex for key in keys}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        headers = Headers(scope=scope)
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if "x-api-key" in headers:  # Anthropic's
            scheme, key = "bearer", headers["x-api-key"]
        given = hashlib.sha256(key.strip().encode("latin-1", "replace")).digest()
        known = [self._tenants[digest] for digest in self._tenants if hmac.compare_digest(given, digest)]  # all are compared
        is_allowed = scheme.lower() == "bearer" and bool(known)
        if is_allowed:
            scope.setdefault("state", {})["tenant"] = known[0]
        if is_allowed or scope["method"] == "OPTIONS" or not _GUARDED.match(path):
            await self._app(scope, receive, send)
            return
        remedy = "give a valid API key: Authorization: Bearer KEY, or x-api-key: KEY"
        error = ApiError(401, remedy, headers={"WWW-Authenticate": "Bearer"})
        scope["state"]["error"] = error.detail
        await error_response(error, path)(scope, receive, send)


class BodyLimits:
    """Refuses bodies that are too large (413), before they have arrived as a whole, or that arrive too slowly (408)."""

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app = app
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = _Body(receive, send, self._settings)
        declared = Headers(scope=scope).get("content-length", "0")
        if declared.isdecimal() and int(declared) > self._settings.max_body_bytes:
            body.is_complete = False
            scope["state"]["error"] = body.too_large.detail
            await error_response(body.too_large, scope["path"])(scope, receive, body.send)
        else:
            await self._app(scope, body.receive, body.send)


class _Body:
    """One body while it arrives. A client that still sends notices a refusal only if its data is read for a while."""

    def __init__(self, receive: Receive, send: Send, settings: ServerSettings) -> None:
        self._receive = receive
        self._send = send
        self._settings = settings
        self._size = 0
        self._has_come = False
        self._deadline = time.monotonic() + settings.body_seconds
        self.is_complete = True  # a body that no route reads is not waited for
        limit = f"{settings.max_body_bytes:,} bytes"
        self.too_large = ApiError(413, f"the body is too large: at most {limit} are taken", headers=_CLOSE)

    async def receive(self) -> Message:
        """Raises ApiError."""
        if self._has_come:
            return await self._receive()  # the news that the client has gone
        self.is_complete = False
        try:
            async with asyncio.timeout(self._deadline - time.monotonic()):
                message = await self._receive()
        except TimeoutError:
            self.is_complete = True  # there is nothing to take
            seconds = f"{self._settings.body_seconds:g} seconds"
            raise ApiError(408, f"the body has not arrived within {seconds}", headers=_CLOSE) from None
        self._size += len(message.get("body", b""))
        self._has_come = self.is_complete = not message.get("more_body", False)
        if self._size > self._settings.max_body_bytes:
            self.is_complete = False
            raise self.too_large
        return message

    async def send(self, message: Message) -> None:
        ends = message["type"] == "http.response.body" and not message.get("more_body", False)
        if not ends or self.is_complete:
            await self._send(message)
            return
        await self._send({**message, "more_body": True})
        with suppress(TimeoutError):
            async with asyncio.timeout(_LINGER_SECONDS):
                while (await self._receive()).get("more_body", False):
                    continue
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})
