"""The required form of an answer, and the tools that it may call: from the fields of a body to a valid grammar.

Knows OpenAI's and vLLM's names; how calls look in text is the business of ``text.parsers``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from msgspec.structs import replace as replace_fields

from pipedec.core.errors import QueueFull, UserError
from pipedec.core.sampling import StructuredOutputs, ThoughtForm
from pipedec.grammar import TOO_DEEP, without_annotations
from pipedec.grammar.apart import StructureChecks
from pipedec.server.errors import ApiError, bad_request
from pipedec.server.front import Front
from pipedec.server.protocol import (
    MAX_CHOICE_TEXTS,
    MAX_STRUCTURE_CHARACTERS,
    MAX_TOOLS,
    ChatBody,
    GenerationBody,
    NamedTool,
    Tool,
)
from pipedec.text.parsers import PLAIN, knows_tools
from pipedec.text.parsers.parser import ToolParser
from pipedec.text.tokenizer import Tokenizer

_OTHER_NAMES = {
    "guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar",
    "json_schema": "json", "regex": "regex", "grammar": "grammar", "ebnf": "grammar",
}  # fmt: skip


@dataclass(frozen=True)
class Structure:
    outputs: StructuredOutputs
    field: str  # the one in the body that asks for it
    parts: tuple[tuple[str, StructuredOutputs], ...] = ()  # schemas of which it is made, with their places in the body


def structure_of(body: GenerationBody) -> Structure | None:
    """None if the answer is free text. Raises ApiError if several fields ask for one, or for what is not supported."""
    wanted: dict[str, dict[str, Any]] = {}  # by field, the arguments of ``StructuredOutputs``
    given = body.response_format
    if given is not None and given.type != "text":
        if len(given.schemas) > 1:
            raise bad_request("response_format has several schemas: give one", "response_format")
        if not given.schemas and given.type != "json_object":
            missing = "json_schema" if given.type == "json_schema" else "value"
            raise bad_request(f"response_format.{missing} is missing", "response_format")
        wanted["response_format"] = {"json": given.schemas[0]} if given.schemas else {"json_object": True}
    elif given is not None and given.schemas:
        raise bad_request("response_format has a schema, but its type is text", "response_format")
    if (fields := body.structured_outputs) is not None:
        kinds: dict[str, Any] = {"json": fields.document, "json_object": fields.json_object or None}
        kinds |= {name: getattr(fields, name) for name in ("regex", "choice", "grammar")}
        if asked := {name: value for name, value in kinds.items() if value is not None}:
            wanted["structured_outputs"] = asked
    for field, kind in _OTHER_NAMES.items():
        if (value := getattr(body, field)) not in (None, ""):
            wanted[field] = {kind: value}
    if len(wanted) > 1:
        raise bad_request(f"give only one of {', '.join(wanted)}", list(wanted)[1])
    for field, arguments in wanted.items():
        try:
            return Structure(StructuredOutputs(**arguments), field)
        except UserError as error:
            raise refusal(error, field, field) from None
    return None


def after_thoughts(structure: Structure | None, thought: ThoughtForm) -> Structure | None:
    """The structure that begins after the thought; without one, the thought's own if it has a budget."""
    if structure is not None:
        return replace(structure, outputs=replace_fields(structure.outputs, thought=thought))
    if thought.max_tokens is None:
        return None
    return Structure(StructuredOutputs(thought=thought), "thinking_token_budget")


async def require_possible(structure: Structure, body: GenerationBody, checks: StructureChecks) -> None:
    """Raises ApiError with the place of the mistake if there is no such answer, or if it would take seconds to find out;
    QueueFull if too many others wait for that.
    """
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
    try:
        await checks.check(outputs)
    except QueueFull:
        raise
    except UserError as error:
        await _find_place(structure, checks)
        raise refusal(error, field, field) from None


async def _find_place(structure: Structure, checks: StructureChecks) -> None:
    """Raises ApiError for the first part that is wrong by itself."""
    for place, part in structure.parts:
        try:
            await checks.check(part)
        except QueueFull:
            raise
        except UserError as error:
            raise refusal(error, place, structure.field) from None


def refusal(error: UserError, place: str, field: str) -> ApiError:
    """The error under the client's own name for the place of the mistake."""
    text = str(error) if place == "structured_outputs" else re.sub(r"^structured_outputs\.\w+", place, str(error))
    return bad_request(text, field)


@dataclass(frozen=True)
class ToolUse:
    form: ToolParser
    schemas: Mapping[str, Mapping[str, Any] | None]  # of the arguments, by the tool's name
    shown: list[dict[str, Any]] | None  # the tools as the chat template gets them; None for a template that knows none
    structure: Structure | None  # if the answer must call a tool
    is_single: bool  # at most one call


def tool_use_of(body: ChatBody, front: Front) -> ToolUse | None:
    """None if the model may not call tools. Raises ApiError for tools that are invalid, or that its template cannot show."""
    choice = body.tool_choice or "auto"
    if not body.tools:
        if choice in ("none", "auto"):
            return None
        raise bad_request("tool_choice needs tools to choose from", "tool_choice")
    _check_tools(body, body.tools)
    if choice == "none":
        return None
    tokenizer, form = front.require().tokenizer, front.tool_parser
    has_template, advice = knows_tools(tokenizer.tool_template), "set tool_choice to required or to a function"
    is_single = body.parallel_tool_calls is False or isinstance(choice, NamedTool)
    if choice != "auto":
        structure = _calls_only(body, form or PLAIN, is_single, tokenizer)
    elif form is not None:
        structure = None
    elif has_template:
        raise bad_request(f"how this model writes calls is not known here: {advice}", "tools")
    else:
        raise bad_request(f"this model's chat template knows no tools: {advice}, or leave tools out", "tools")
    schemas = {tool.function.name: tool.function.parameters for tool in body.tools}
    return ToolUse(form or PLAIN, schemas, shown(body.tools) if has_template else None, structure, is_single)


def shown(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """The tools as they were given."""
    return [tool.model_dump(exclude_unset=True) for tool in tools]


def _check_tools(body: ChatBody, tools: Sequence[Tool]) -> None:
    names = [tool.function.name for tool in tools]
    if len(names) > MAX_TOOLS:
        raise bad_request(f"tools must be at most {MAX_TOOLS}, not {len(names)}", "tools")
    for index, tool in enumerate(tools):
        if (tool.function.parameters or {}).get("type", "object") != "object":
            raise bad_request(f"tools[{index}].function.parameters must be of the type object", "tools")
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise bad_request(f"tools has two functions {twice}: give each a name of its own", "tools")
    if isinstance(body.tool_choice, NamedTool) and body.tool_choice.function.name not in names:
        raise bad_request(f"tool_choice names {body.tool_choice.function.name[:64]!r}, which is none of the tools", "tool_choice")
    if body.threads is not None:
        raise bad_request("tools go without threads: leave one of them out", "tools")


def _calls_only(body: ChatBody, form: ToolParser, is_single: bool, tokenizer: Tokenizer) -> Structure:
    named = body.tool_choice.function.name if isinstance(body.tool_choice, NamedTool) else None
    parameters: dict[str, dict[str, Any] | None] = {}
    parts = []
    for index, function in enumerate(tool.function for tool in body.tools or ()):
        if named not in (None, function.name):
            continue
        place = f"tools[{index}].function.parameters"
        try:
            parameters[function.name] = without_annotations(function.parameters)
        except RecursionError:
            raise bad_request(f"{place}: {TOO_DEEP}", "tools") from None
        if function.parameters:
            try:
                parts.append((place, StructuredOutputs(json=function.parameters)))
            except UserError as error:
                raise refusal(error, place, "tools") from None
    grammar = form.grammar(parameters, is_single, tokenizer.token_id)
    return Structure(StructuredOutputs(grammar=grammar), "tools", tuple(parts))
