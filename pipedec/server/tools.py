"""Tools of a chat: which ones the model may call and in which form, and its calls in OpenAI's shape.

Knows the fields of a body and of a message; how calls look in text is the business of ``text.tool_calls``.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pipedec.core import StructuredOutputs, UserError
from pipedec.server.errors import bad_request
from pipedec.server.protocol import MAX_TOOLS, ChatBody, NamedTool, Tool
from pipedec.server.structures import Structure, refusal
from pipedec.text.tokenizer import Tokenizer
from pipedec.text.tool_calls import PLAIN, CallPart, CallReader, ToolFormat, knows_tools, tool_format


@dataclass(frozen=True)
class ToolUse:
    """The tools that an answer may call.

    Attributes:
        shown: the tools as the chat template gets them; None for a template that knows none.
        structure: of an answer that must call; None if it need not.
        is_single: at most one call.
    """

    form: ToolFormat
    names: frozenset[str]
    shown: list[dict[str, Any]] | None
    structure: Structure | None
    is_single: bool


def tool_use_of(body: ChatBody, tokenizer: Tokenizer) -> ToolUse | None:
    """None if the model may not call tools. Raises ApiError for tools that are invalid, or that its template cannot show."""
    choice = body.tool_choice or "auto"
    if not body.tools:
        if choice in ("none", "auto"):
            return None
        raise bad_request("tool_choice needs tools to choose from", "tool_choice")
    _check(body, body.tools)
    if choice == "none":
        return None
    has_template = knows_tools(tokenizer.tool_template)
    form = tool_format(tokenizer.tool_template)
    if form is not None and tokenizer.token_id(form.begin.strip()) in tokenizer.all_special_ids:
        form = None  # no text has the marks of calls
    is_single = body.parallel_tool_calls is False or isinstance(choice, NamedTool)
    if choice != "auto":
        structure = _structure(body, form or PLAIN, is_single)
    elif form is not None:
        structure = None
    elif has_template:
        advice = "set tool_choice to required or to a function"
        raise bad_request(f"how this model writes calls is not known here: {advice}", "tools")
    else:
        advice = "set tool_choice to required or to a function, or leave tools out"
        raise bad_request(f"this model's chat template knows no tools: {advice}", "tools")
    names = frozenset(tool.function.name for tool in body.tools)
    return ToolUse(form or PLAIN, names, shown(body.tools) if has_template else None, structure, is_single)


def shown(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """The tools as they were given."""
    return [tool.model_dump(exclude_unset=True) for tool in tools]


def _check(body: ChatBody, tools: Sequence[Tool]) -> None:
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


def _structure(body: ChatBody, form: ToolFormat, is_single: bool) -> Structure:
    """Calls, and nothing else."""
    named = body.tool_choice.function.name if isinstance(body.tool_choice, NamedTool) else None
    parameters: dict[str, dict[str, Any] | None] = {}
    parts = []
    for index, function in enumerate(tool.function for tool in body.tools or ()):
        if named not in (None, function.name):
            continue
        parameters[function.name] = function.parameters
        if function.parameters:
            place = f"tools[{index}].function.parameters"
            try:
                parts.append((place, StructuredOutputs(json=function.parameters)))
            except UserError as error:
                raise refusal(error, place, "tools") from None
    return Structure(StructuredOutputs(grammar=form.grammar(parameters, is_single)), "tools", tuple(parts))


class CallWriter:
    """Writes the text and the calls of one answer, piece by piece."""

    def __init__(self, use: ToolUse) -> None:
        self._reader = CallReader(use.form, use.names)
        self._is_single = use.is_single

    @property
    def has_called(self) -> bool:
        return self._reader.num_calls > 0

    def delta(self, text: str, is_last: bool) -> dict[str, Any]:
        """``content`` and ``tool_calls`` of the next piece of the answer, as far as there are any."""
        parts = self._reader.add(text) + (self._reader.finish() if is_last else [])
        content = "".join(part for part in parts if isinstance(part, str))
        calls: dict[int, dict[str, Any]] = {}
        for part in parts:
            if not isinstance(part, CallPart) or (self._is_single and part.index > 0):
                continue
            call = calls.setdefault(part.index, {"index": part.index, "function": {"arguments": ""}})
            if part.name is not None:
                call |= {"id": f"call_{uuid.uuid4().hex}", "type": "function"}
                call["function"] = {"name": part.name, "arguments": ""}
            call["function"]["arguments"] += part.arguments
        return ({"content": content} if content else {}) | ({"tool_calls": list(calls.values())} if calls else {})

    def message(self, text: str) -> dict[str, Any]:
        """``content`` and ``tool_calls`` of a whole answer."""
        delta = self.delta(text, is_last=True)
        calls = [{name: value for name, value in call.items() if name != "index"} for call in delta.get("tool_calls", ())]
        content = delta.get("content", None if calls else "")
        return {"content": content, "refusal": None} | ({"tool_calls": calls} if calls else {})
