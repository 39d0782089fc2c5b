"""The required form of an answer: from the fields of a body to a valid grammar. Knows OpenAI's and vLLM's names for it."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from typing import Any

from pipedec.core import StructuredOutputs, UserError
from pipedec.grammar import check
from pipedec.server.errors import ApiError, bad_request
from pipedec.server.protocol import MAX_CHOICE_TEXTS, MAX_STRUCTURE_CHARACTERS, GenerationBody, StructuredFields

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
    wanted: dict[str, dict[str, Any]] = {}  # by field, the arguments of ``StructuredOutputs``
    given = body.response_format
    if given is not None and given.type == "json_object":
        wanted["response_format"] = {"json_object": True}
    elif given is not None and given.type == "json_schema":
        if given.json_schema is None:
            raise bad_request("response_format.json_schema is missing", "response_format")
        wanted["response_format"] = {"json": given.json_schema.document}
    if body.structured_outputs is not None and (kinds := _kinds(body.structured_outputs)):
        wanted["structured_outputs"] = kinds
    for field, kind in _OLDER.items():
        if (value := getattr(body, field)) is not None:
            wanted[field] = {kind: value}
    if len(wanted) > 1:
        raise bad_request(f"give only one of {', '.join(wanted)}", list(wanted)[1])
    for field, kinds in wanted.items():
        try:
            return Structure(StructuredOutputs(**kinds), field)
        except UserError as error:
            raise refusal(error, field, field) from None
    return None


def _kinds(given: StructuredFields) -> dict[str, Any]:
    """Empty if the fields ask for nothing."""
    others = [name for name, value in (given.model_extra or {}).items() if value and name != _CHANGES_NOTHING]
    if others:
        raise bad_request(f"structured_outputs.{others[0]} is not supported by this server: leave it out", "structured_outputs")
    kinds = {
        "json": given.document, "regex": given.regex, "choice": given.choice, "grammar": given.grammar,
        "json_object": given.json_object or None,
    }  # fmt: skip
    return {name: value for name, value in kinds.items() if value is not None}


async def require_possible(structure: Structure, body: GenerationBody) -> None:
    """Raises ApiError with the place of the mistake if there is no such answer, or if it would take seconds to find out."""
    field, outputs = structure.field, structure.outputs
    for other in ("ignore_eos", "threads"):
        if getattr(body, other):
            raise bad_request(f"{field} goes without {other}: leave one of them out", field)
    texts = outputs.choice or (str(outputs.json or outputs.regex or outputs.grammar or ""),)
    size = sum(map(len, texts))
    if size > MAX_STRUCTURE_CHARACTERS:
        raise bad_request(f"{field} has {size} characters, but may have {MAX_STRUCTURE_CHARACTERS}", field)
    if len(texts) > MAX_CHOICE_TEXTS:
        raise bad_request(f"{field} has {len(texts)} choices, but may have {MAX_CHOICE_TEXTS}", field)
    for place, part in (*structure.parts, (field, outputs)):
        try:
            await asyncio.to_thread(check, part)  # a large schema does not delay other requests
        except UserError as error:
            raise refusal(error, place, field) from None


def refusal(error: UserError, place: str, field: str) -> ApiError:
    """With the client's own name of the place."""
    text = str(error) if place == "structured_outputs" else re.sub(r"^structured_outputs\.\w+", place, str(error))
    return bad_request(text, field)
