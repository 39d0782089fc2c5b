"""The required form of an answer: from the fields of a body to a valid grammar. Knows OpenAI's and vLLM's names for it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pipedec.core import StructuredOutputs, UserError
from pipedec.grammar import check
from pipedec.server.errors import ApiError, bad_request
from pipedec.server.protocol import MAX_CHOICE_TEXTS, MAX_STRUCTURE_CHARACTERS, GenerationBody, ResponseFormat, StructuredFields

_OLDER = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}
_CHANGES_NOTHING = "disable_any_whitespace"


@dataclass(frozen=True)
class Structure:
    """The required form of an answer.

    Attributes:
        field: of the body, that says so.
        parts: schemas of which the outputs are made, and their places in the body.
    """

    outputs: StructuredOutputs
    field: str
    parts: tuple[tuple[str, StructuredOutputs], ...] = ()


def structure_of(body: GenerationBody) -> Structure | None:
    """None if the answer is free text. Raises ApiError if several fields ask for one, or for what is not supported."""
    wanted = dict(_wanted(body))
    if len(wanted) > 1:
        raise bad_request(f"give only one of {', '.join(wanted)}", list(wanted)[1])
    for field, kinds in wanted.items():
        try:
            return Structure(StructuredOutputs(**kinds), field)
        except UserError as error:
            raise refusal(error, field, field) from None
    return None


def _wanted(body: GenerationBody) -> Iterator[tuple[str, dict[str, Any]]]:
    """By field, the arguments of ``StructuredOutputs``."""
    if body.response_format is not None and body.response_format.type != "text":
        yield "response_format", _of_format(body.response_format)
    if body.structured_outputs is not None and (kinds := _of_fields(body.structured_outputs)):
        yield "structured_outputs", kinds
    for field, kind in _OLDER.items():
        value = getattr(body, field)
        if value is not None:
            yield field, {kind: value}


def _of_format(given: ResponseFormat) -> dict[str, Any]:
    if given.type == "json_object":
        return {"json_object": True}
    if given.json_schema is None:
        raise bad_request("response_format.json_schema is missing", "response_format")
    return {"json": given.json_schema.document}


def _of_fields(given: StructuredFields) -> dict[str, Any]:
    """Empty if they ask for nothing."""
    others = [name for name, value in (given.model_extra or {}).items() if value and name != _CHANGES_NOTHING]
    if others:
        raise bad_request(f"structured_outputs.{others[0]} is not supported by this server: leave it out", "structured_outputs")
    kinds = {
        "json": given.document, "regex": given.regex, "choice": given.choice, "grammar": given.grammar,
        "json_object": given.json_object or None,
    }  # fmt: skip
    return {name: value for name, value in kinds.items() if value is not None}


def _check_size(structure: Structure) -> None:
    """Refuse structures that would take seconds to read, here and in the cluster."""
    outputs = structure.outputs
    texts = outputs.choice or (str(outputs.json or outputs.regex or outputs.grammar or ""),)
    size = sum(map(len, texts))
    if size > MAX_STRUCTURE_CHARACTERS:
        raise bad_request(f"{structure.field} has {size} characters, but may have {MAX_STRUCTURE_CHARACTERS}", structure.field)
    if len(texts) > MAX_CHOICE_TEXTS:
        raise bad_request(f"{structure.field} has {len(texts)} choices, but may have {MAX_CHOICE_TEXTS}", structure.field)


async def require_possible(structure: Structure, body: GenerationBody) -> None:
    """Raises ApiError with the place of the mistake if there is no such answer. A large schema does not delay other requests."""
    for other in ("ignore_eos", "threads"):
        if getattr(body, other):
            raise bad_request(f"{structure.field} goes without {other}: leave one of them out", structure.field)
    _check_size(structure)
    await asyncio.to_thread(_check, structure)


def _check(structure: Structure) -> None:
    for place, outputs in (*structure.parts, (structure.field, structure.outputs)):
        try:
            check(outputs)
        except UserError as error:
            raise refusal(error, place, structure.field) from None


def refusal(error: UserError, place: str, field: str) -> ApiError:
    """With the client's own name of the place."""
    text = str(error) if place == "structured_outputs" else re.sub(r"^structured_outputs\.\w+", place, str(error))
    return bad_request(text, field)
