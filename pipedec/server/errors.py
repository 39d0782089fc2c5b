"""Errors of any origin in the shape of the API that was asked: one line about what was wrong and what to do.

OpenAI's is ``{"error": {"message": …, "type": …, "param": …, "code": …}}``, with vLLM's types and the HTTP status as the code.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from pipedec.core.errors import PipedecError, QueueFull, RequestFailed, SchedulerBusy, UserError
from pipedec.core.values import shortened

UNSUPPORTED = "unsupported"  # type of a mistake: what is known elsewhere and not here
CLIENT_CLOSED_REQUEST = 499  # nginx's status for a client that went away
_TYPES = {
    400: "BadRequestError", 401: "AuthenticationError", 404: "NotFoundError", 405: "MethodNotAllowedError",
    408: "RequestTimeoutError", 413: "RequestTooLargeError", 500: "InternalServerError", 503: "ServiceUnavailableError",
}  # fmt: skip
_ANTHROPIC_TYPES = {
    401: "authentication_error", 404: "not_found_error", 408: "timeout_error", 413: "request_too_large", 503: "overloaded_error",
}  # fmt: skip
_SEVERAL_TYPES = {
    "prompt": "a text, a list of texts, token ids, or a list of lists of token ids",
    "stop": "a text or a list of texts",
    "guided_json": "a JSON schema, as an object or as text",
    "tool_choice": "none, auto, required, or an object with the type and the name of one of the tools",
    "input": 'a text or a list of items like {"role": "user", "content": "text"}',
    "format": "json, or a JSON schema",
    "think": "true, false, low, medium or high",
    "messages": 'a list of objects like {"role": "user", "content": "text"}',
}
_ANTHROPIC_SEVERAL_TYPES = {
    "messages": 'a list of objects like {"role": "user", "content": "text or blocks"}',
    "system": "a text or a list of text blocks",
}
_MAX_MESSAGE = 1000  # characters
_MAX_MISTAKES = 10
_UNION_MEMBER = re.compile(r"\[|^(str|int|bool|float|NamedTool)$")
_RETRY_AFTER_SECONDS = 1
_BODY_FAULTS = {400: "the body cannot be read: it must be JSON in UTF-8", 404: "there is no such page", 405: "wrong method"}


class ApiError(HTTPException):
    """A refusal; ``param`` is the field of the request that it is about."""

    def __init__(self, status: int, message: str, param: str | None = None, headers: Mapping[str, str] | None = None) -> None:
        writable = message[:_MAX_MESSAGE].encode(errors="backslashreplace").decode()  # it may quote half a surrogate pair
        super().__init__(status, writable, headers)
        self.param = param

    def body(self, path: str = "") -> dict[str, Any]:
        """The document of the response, or of an event in a stream, as the API of a path has it."""
        if is_anthropic(path):
            kind = _ANTHROPIC_TYPES.get(self.status_code, "invalid_request_error" if self.status_code < 500 else "api_error")
            return {"type": "error", "error": {"type": kind, "message": self.detail}}
        if path.startswith("/api/"):  # Ollama's
            return {"error": self.detail}
        kind = _TYPES.get(self.status_code, "BadRequestError" if self.status_code < 500 else "InternalServerError")
        return {"error": {"message": self.detail, "type": kind, "param": self.param, "code": self.status_code}}


def is_anthropic(path: str) -> bool:
    """Whether a path is of Anthropic's API."""
    return path.startswith("/v1/messages")


def bad_request(message: str, param: str | None = None) -> ApiError:
    return ApiError(400, message, param)


def unavailable(message: str, retry_after_seconds: int) -> ApiError:
    return ApiError(503, message, headers={"Retry-After": str(retry_after_seconds)})


@contextmanager
def renamed_fields(rename: Callable[[str], str]) -> Iterator[None]:
    """Raises ApiError for one of the block, about fields with the names that ``rename`` puts into a text."""
    try:
        yield
    except ApiError as error:
        param = None if error.param is None else rename(error.param).partition(".")[0]
        raise ApiError(error.status_code, rename(error.detail), param, error.headers) from None


def api_error(error: Exception) -> ApiError:
    """The error that a client receives for an exception of the engine."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFull | SchedulerBusy):
        return unavailable(str(error), _RETRY_AFTER_SECONDS)
    if isinstance(error, UserError):
        return bad_request(str(error))
    if isinstance(error, RequestFailed):
        return ApiError(500, str(error))
    if isinstance(error, PipedecError):
        return unavailable(f"the cluster was lost: {error}", _RETRY_AFTER_SECONDS)
    return ApiError(500, "an internal error; the server's log says more")


def error_response(error: ApiError, path: str) -> Response:
    """Pure ASCII, so that nothing that is echoed can fail to be encoded."""
    return Response(json.dumps(error.body(path)), error.status_code, error.headers, "application/json")


async def on_error(request: Request, error: Exception) -> Response:
    """Refusals, mistakes in a body, errors of the engine, and what Starlette and FastAPI raise themselves."""
    if isinstance(error, RequestValidationError):
        error = invalid(error.errors(), request.url.path)
    elif isinstance(error, HTTPException) and not isinstance(error, ApiError):
        message = _BODY_FAULTS.get(error.status_code, error.detail)
        if error.status_code in (404, 405):
            message = f"{message}: {request.method} {shortened(request.url.path)}; /docs lists all"
        error = ApiError(error.status_code, message, headers=error.headers)
    refusal = api_error(error)
    request.state.error = refusal.detail
    return error_response(refusal, request.url.path)


async def on_internal_error(request: Request, error: Exception) -> Response:
    return error_response(api_error(error), request.url.path)


def invalid(mistakes: Sequence[Mapping[str, Any]], path: str = "") -> ApiError:
    """The error for the mistakes that pydantic found, at most ``_MAX_MISTAKES``; ``param`` is the field of the first. ``path``:
    of the API.
    """
    several_types = _ANTHROPIC_SEVERAL_TYPES if is_anthropic(path) else _SEVERAL_TYPES
    first = mistakes[0]
    if first["type"] == "json_invalid":
        return bad_request(f"the body is not valid JSON: {first['ctx']['error']} at character {first['loc'][-1]}")
    for mistake in mistakes[:_MAX_MISTAKES]:
        if mistake["type"] in (UNSUPPORTED, "too_long"):  # says more than those of other members of a union
            place, what = _place(mistake), mistake["msg"]
            return bad_request(f"{place}: {what}" if place else what, str([*mistake["loc"], mistake["ctx"].get("what")][1]))
    if first["loc"] == ("body",):
        return bad_request("the body must be a JSON object, sent as content-type application/json")
    field = shortened(first["loc"][1]) if len(first["loc"]) > 1 else None
    if field in several_types and (first["type"] != "missing" or len(first["loc"]) > 2):
        deepest = max(mistakes[:_MAX_MISTAKES], key=lambda mistake: len(mistake["loc"]))
        return bad_request(f"{field} must be {several_types[field]}: {_finding(deepest)}", field)
    lines = list(dict.fromkeys(map(_mistake, mistakes[: 10 * _MAX_MISTAKES])))[:_MAX_MISTAKES]
    if len(mistakes) > len(lines):
        lines.append(f"… ({len(mistakes)} mistakes)")
    return bad_request("; ".join(lines), field)


def _mistake(mistake: Mapping[str, Any]) -> str:
    if mistake["type"] == "missing":
        return _finding(mistake)
    return f"{_place(mistake)}: {mistake['msg'].removeprefix('Input ')}, not {_shown(mistake.get('input'))}"


def _finding(mistake: Mapping[str, Any]) -> str:
    return f"{_place(mistake)} is {'missing' if mistake['type'] == 'missing' else _shown(mistake.get('input'))}"


def _place(mistake: Mapping[str, Any]) -> str:
    """Like ``messages.0.content``, without the members of unions."""
    parts = [part for part in mistake["loc"][1:] if not isinstance(part, str) or not _UNION_MEMBER.search(part)]
    return ".".join(map(shortened, parts[:5]))


def _shown(value: object) -> str:
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    return shortened(json.dumps(value, default=str)) if isinstance(value, str | int | float | bool | None) else "this"
