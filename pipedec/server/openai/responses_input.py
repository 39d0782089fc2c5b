"""From a body of ``/v1/responses`` to that of a chat: items to messages, tools of all kinds to functions.

Knows no response; ``Tools.offered`` has the tools by the names that the model sees.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipedec.core.values import shortened
from pipedec.server.bodies import translated
from pipedec.server.errors import bad_request
from pipedec.server.openai.responses_protocol import (
    LOGPROBS,
    InnerTool,
    InputItem,
    Parts,
    ResponsesBody,
    ToolChoice,
)
from pipedec.server.protocol import ChatBody, SamplingFields
from pipedec.text.chat_template import text_of

INPUT = "input"  # the argument of the function that a custom tool becomes
_IN_NAMESPACE = "__"
_LOCAL_SHELL = "local_shell"
_SEAL = "pipedec:"
_TURN = ("reasoning_content", "content", "tool_calls")  # fields of a message of the assistant, in the order of their items
_NAMES = {  # of fields, from those of a chat
    "messages": "input", "prompt": "input", "max_tokens": "max_output_tokens", "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format", "reasoning_effort": "reasoning.effort",
}  # fmt: skip
_NAME = re.compile(rf"\b({'|'.join(_NAMES)})\b")
_TOOL = re.compile(r"\btools[.[](\d+)]?\.function\b")


@dataclass(frozen=True)
class OfferedTool:
    """A tool as the client has it."""

    tool: InnerTool
    namespace: str | None = None

    @property
    def is_custom(self) -> bool:
        return self.tool.type == "custom"

    def function(self, name: str) -> dict[str, Any]:
        """The tool as a function of a chat."""
        tool = self.tool
        described = {"name": name, "description": tool.description, "parameters": tool.parameters, "strict": tool.strict}
        if self.is_custom:
            described["description"] = "\n\n".join(filter(None, (tool.description, self._form())))
            described["parameters"] = {"type": "object", "properties": {INPUT: {"type": "string"}}, "required": [INPUT]}
        return {"type": "function", "function": {key: value for key, value in described.items() if value is not None}}

    def _form(self) -> str | None:
        form = self.tool.format
        if form is None or form.definition is None:
            return None
        return f"The {INPUT} follows this {'regular expression' if form.syntax == 'regex' else 'grammar'}:\n{form.definition}"


@dataclass(frozen=True)
class Tools:
    """The tools of a body that the client runs; others are left out."""

    offered: Mapping[str, OfferedTool] = field(default_factory=dict)  # by the name that the model sees
    choice: str | dict[str, Any] | None = None  # as a chat has it

    @classmethod
    def of(cls, body: ResponsesBody) -> Tools:
        """Raises ApiError if two have one name, or none can be chosen as the body wants it."""
        offered: dict[str, OfferedTool] = {}
        for name, one in _named(body):
            if name in offered:
                raise bad_request(f"tools has two of the name {shortened(name)}: give each a name of its own", "tools")
            offered[name] = one
        choice = body.tool_choice
        if not isinstance(choice, ToolChoice):
            return cls(offered, choice)
        if choice.tools is None:
            return cls(offered, {"type": "function", "function": {"name": choice.name}})
        allowed = {tool.name for tool in choice.tools}
        return cls({name: one for name, one in offered.items() if one.tool.name in allowed}, choice.mode)

    def functions(self) -> list[dict[str, Any]] | None:
        return [one.function(name) for name, one in self.offered.items()] or None


def _named(body: ResponsesBody) -> Iterator[tuple[str, OfferedTool]]:
    for tool in body.tools or ():
        if tool.type in ("function", "custom"):
            yield str(tool.name), OfferedTool(tool)
        elif tool.type == "namespace":
            inner = [one for one in tool.tools or () if one.type in ("function", "custom")]
            yield from ((_full_name(tool.name, one.name), OfferedTool(one, tool.name)) for one in inner)


def _full_name(namespace: str | None, name: str | None) -> str:
    """The name that the model sees."""
    return f"{namespace}{_IN_NAMESPACE}{name}" if namespace else str(name)


def chat_of_responses(body: ResponsesBody, items: Sequence[InputItem], tools: Tools) -> ChatBody:
    """The body of a chat that continues ``items``. Raises ApiError for what no chat can be."""
    logprobs = body.top_logprobs is not None or LOGPROBS in (body.include or ())
    functions = tools.functions()
    if logprobs and functions and tools.choice != "none":
        raise bad_request("log-probabilities go without tools, or with tool_choice none", "top_logprobs")
    return translated(
        ChatBody,
        **{name: getattr(body, name) for name in SamplingFields.model_fields},
        messages=messages_of(body.instructions, items),
        max_completion_tokens=body.max_output_tokens,
        tools=functions,
        tool_choice=tools.choice,
        parallel_tool_calls=body.parallel_tool_calls,
        response_format=_response_format(body),
        reasoning_effort=body.reasoning and body.reasoning.effort,
        logprobs=logprobs or None,
        top_logprobs=body.top_logprobs,
        chat_template_kwargs=body.chat_template_kwargs,
        thinking_token_budget=body.thinking_token_budget,
    )


def _response_format(body: ResponsesBody) -> dict[str, Any] | None:
    form = None if body.text is None else body.text.format
    if form is None or form.type != "json_schema":
        return None if form is None else {"type": form.type}
    if form.document is None:
        raise bad_request("text.format.schema is missing", "text")
    return {"type": form.type, "schema": form.document}


def own_names(tools: Tools, text: str) -> str:
    """The text with the names of fields of ``/v1/responses``, and of tools instead of their places."""
    names = dict(enumerate(tools.offered))
    text = _NAME.sub(lambda found: _NAMES[found[0]], text)
    return _TOOL.sub(lambda found: f"tools.{shortened(names.get(int(found[1]), found[1]))}", text)


def messages_of(instructions: str | None, items: Iterable[InputItem]) -> list[dict[str, Any]]:
    """Messages of a chat: system messages at the beginning as one, and items that the assistant has made in a row as one.

    Raises ApiError for the output of a call that is not among the items before it.
    """
    messages: list[dict[str, Any]] = []
    calls: set[str | None] = set()
    if instructions:
        _add(messages, "system", "content", instructions)
    for item in items:
        if item.kind in ("function_call_output", "custom_tool_call_output", "local_shell_call_output"):
            call_id = item.call_id or item.id
            if call_id not in calls:
                raise bad_request(f"input has an output of the call {shortened(call_id)!r}, but no such call before it", "input")
            messages.append({"role": "tool", "tool_call_id": call_id, "content": _text(item.output)})
        elif item.kind == "reasoning":
            if thought := _text(item.content or item.summary) or unsealed(item.encrypted_content):
                _add(messages, "assistant", "reasoning_content", thought)
        elif item.kind != "message":
            calls |= {item.call_id, item.id}
            _add(messages, "assistant", "tool_calls", [_call(item)])
        elif item.role == "assistant":
            _add(messages, "assistant", "content", _text(item.content))
        elif item.role == "user" or any(message["role"] != "system" for message in messages):
            messages.append({"role": "user" if item.role == "user" else "system", "content": _text(item.content)})
        else:
            _add(messages, "system", "content", _text(item.content))
    return messages


def _add(messages: list[dict[str, Any]], role: str, name: str, value: Any) -> None:
    """Add to the last message, or begin one if that is of another role or has fields that come later."""
    last = messages[-1] if messages else {}
    if last.get("role") != role or any(last.get(later) for later in _TURN[_TURN.index(name) + 1 :]):
        messages.append(last := {"role": role, "content": ""})
    before = last.get(name)
    if isinstance(value, str) and before:
        before += "\n\n"
    last[name] = before + value if before else value


def _text(content: str | Parts | None) -> str:
    return text_of([dict(part) for part in content] if isinstance(content, list) else content)


def _call(item: InputItem) -> dict[str, Any]:
    if item.kind == "local_shell_call":
        name, arguments = _LOCAL_SHELL, json.dumps(item.action)
    elif item.kind == "custom_tool_call":
        name, arguments = _full_name(item.namespace, item.name), json.dumps({INPUT: item.input})
    else:
        name, arguments = _full_name(item.namespace, item.name), str(item.arguments)
    return {"id": item.call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def sealed(thought: str) -> str:
    """A thought for clients that send back only what they cannot read. It is encoded, not encrypted."""
    return base64.b64encode(f"{_SEAL}{thought}".encode()).decode()


def unsealed(content: str | None) -> str:
    """The thought of ``sealed``; nothing for what another server has made."""
    try:
        text = base64.b64decode(content or "", validate=True).decode()
    except (binascii.Error, ValueError):
        return ""
    return text.removeprefix(_SEAL) if text.startswith(_SEAL) else ""
