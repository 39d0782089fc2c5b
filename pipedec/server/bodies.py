"""The base of every body of a request, for any API: fields that are unknown, and lists with many mistakes.

Null means that a field is not given. A field that is unknown here is refused, at any depth, if the answer would be another one
with it (``unsupported`` of its object), and else ignored.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Any, ClassVar, Self, TypeVar

from pydantic import BaseModel, ConfigDict, FailFast, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from pipedec.core.values import shortened
from pipedec.server.errors import UNSUPPORTED, invalid

Given = TypeVar("Given", bound=BaseModel)


class FirstMistake(FailFast):
    """Validates a list up to its first mistake. Unlike pydantic's own it may stand in a union."""

    def __hash__(self) -> int:
        return hash(type(self))


Texts = Annotated[list[str], FirstMistake()]
TokenIds = Annotated[list[int], FirstMistake()]
_CHANGE_NOTHING = ("name", "description", "strict", "disable_any_whitespace", "disable_fallback")
ASKS_NOTHING: Collection[Any] = (False, 0, "", [], {})  # values that ask for nothing, besides null


class Extensible(BaseModel):
    """Accepts unknown fields but those that are ``unsupported``, each with the values that ask for nothing."""

    model_config = ConfigDict(extra="allow")
    unsupported: ClassVar[Mapping[str, Collection[Any]]] = {}

    @model_validator(mode="after")
    def _refuse_unsupported(self) -> Self:
        for name, value in (self.model_extra or {}).items():
            accepted = self._accepted(name)
            if accepted is not None and value is not None and value not in accepted:
                raise unsupported(shortened(name))
        return self

    @classmethod
    def _accepted(cls, name: str) -> Collection[Any] | None:
        """The values of an unknown field that ask for nothing; None if all do."""
        return cls.unsupported.get(name)


class Closed(Extensible):
    """Accepts no unknown fields that ask for something, but those that change nothing."""

    @classmethod
    def _accepted(cls, name: str) -> Collection[Any] | None:
        return None if name in _CHANGE_NOTHING else ASKS_NOTHING


def unsupported(what: str, remedy: str = "leave it out") -> PydanticCustomError:
    """The error for what is known elsewhere and not here."""
    writable = what.encode(errors="backslashreplace").decode()  # it may quote half a surrogate pair
    return PydanticCustomError(
        UNSUPPORTED, "{what} is not supported by this server: {remedy}", {"what": writable, "remedy": remedy}
    )


def translated(kind: type[Given], **fields: Any) -> Given:
    """A body of this kind for one of another API; None is left out. Raises ApiError as for a body that has come from outside."""
    try:
        return kind.model_validate({name: value for name, value in fields.items() if value is not None})
    except ValidationError as error:
        raise invalid([{**mistake, "loc": ("body", *mistake["loc"])} for mistake in error.errors()]) from None


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: int


class ErrorResponse(BaseModel):
    error: ErrorDetail


def error_responses(*statuses: int, model: type[BaseModel] = ErrorResponse) -> dict[int | str, dict[str, Any]]:
    """For the OpenAPI document."""
    return {status: {"model": model} for status in statuses}


def body_errors(model: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """Those of a route that takes a body."""
    return error_responses(400, 401, 404, 408, 413, 500, 503, model=model)


def streamed(description: str) -> dict[int | str, dict[str, Any]]:
    """The response of a route that may answer with events: the schema is that of each of them."""
    fields = {name: {"type": "string"} for name in ("event", "data")}
    event = {"type": "object", "description": description, "properties": fields, "required": ["data"]}
    return {200: {"content": {"text/event-stream": {"schema": event}}}}


BODY_ERRORS = body_errors(ErrorResponse)
STREAMED = streamed("Chunks, and at last [DONE].")
