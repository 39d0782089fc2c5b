"""Chat templates: from messages to the text of a prompt, as transformers renders them.

A template is a program that comes with a checkpoint. It runs in Jinja's sandbox, for a limited time, and writes a limited text.
Knows no tokens.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from pipedec.core.errors import UserError

MAX_CHARS = 4_000_000
MAX_SECONDS = 5.0

_REASONING = ("reasoning_content", "thinking", "reasoning")  # names of one field; templates read the first
_PROBE = "what-the-user-says"
_END = "CONTINUE_FINAL_MESSAGE_TAG "  # marks where the last message ends: without its blank if the template strips the message
_TICK, _WITHIN = "__tick__", "__within__"


class ChatTemplate:
    """One compiled template. Raises UserError if it is no valid Jinja."""

    def __init__(self, source: str, max_seconds: float = MAX_SECONDS) -> None:
        self._max_seconds = max_seconds
        environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        environment.filters |= {"tojson": _tojson, _WITHIN: _within_limits}
        environment.globals |= {"raise_exception": _refuse, "strftime_now": _now}
        try:
            self._template = environment.from_string(_Guarded().visit(environment.parse(source)))
        except TemplateError as error:
            raise UserError(f"the chat template is no valid Jinja: {_first_line(error)}") from None

    def render(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, in_parts: bool = False, **variables: Any
    ) -> str:
        """The text of a prompt.

        Args:
            messages: JSON objects, by convention with ``role`` and ``content``, which is text or a list of parts like
                ``{"type": "text", "text": "Hi"}``; fields that are None are left out.
            add_generation_prompt: end where the answer of the assistant begins.
            in_parts: give the template all content as parts, else as text: a line for each part.
            variables: what else the template may ask for.

        Raises UserError if the template refuses the messages, fails on them, takes too long or writes too much.
        """
        ends = time.monotonic() + self._max_seconds
        variables = {"tools": None, "documents": None, **variables, _TICK: lambda: _check_time(ends)}
        chat = [_message(message, in_parts) for message in messages]
        pieces, length = [], 0
        try:
            for piece in self._template.generate(messages=chat, add_generation_prompt=add_generation_prompt, **variables):
                _check_time(ends)
                length += len(_within_limits(piece))
                if length > MAX_CHARS:
                    raise SecurityError(f"writes more than {MAX_CHARS} characters")
                pieces.append(piece)
        except Exception as error:  # anything that a program can do wrong: a type, a missing field, an endless recursion
            raise UserError(f"the chat template cannot render these messages: {_first_line(error)}") from None
        return "".join(pieces)

    def render_open(self, messages: Sequence[Mapping[str, Any]], in_parts: bool = False, **variables: Any) -> str:
        """The text of a prompt that ends with the content of the last message, as far as the template writes it: no blank ends
        the text if the template leaves out those that end the content.

        Raises UserError as ``render``, or if the last message has no text, or the template changes it.
        """
        *earlier, last = messages
        content = last.get("content")
        parts = [part["text"] for part in content if part.get("text") is not None] if isinstance(content, list) else [content]
        if not parts or parts[-1] is None:
            raise UserError("continue_final_message: the last message has no text to continue")
        rendered = self.render([*earlier, {**last, "content": _marked(content)}], False, in_parts, **variables)
        end = rendered.rfind(_END.rstrip())
        if end < 0 or parts[-1].strip() not in rendered[:end]:
            raise UserError("continue_final_message: the chat template does not write the last message as it is: leave it out")
        text = rendered[:end]
        return text if rendered.startswith(_END, end) else text.rstrip()

    def wants_parts(self, **variables: Any) -> bool:
        """Whether only content in parts reaches the prompt, as where the template walks over them without looking for text.

        Raises UserError if content does not reach it either way.
        """

        def writes(in_parts: bool) -> bool | None:
            try:
                return _PROBE in self.render([{"role": "user", "content": _PROBE}], True, in_parts, **variables)
            except UserError:
                return None

        if as_text := writes(False):
            return False
        in_parts = writes(True)
        if as_text is False and in_parts is False:
            raise UserError("the chat template leaves out what the user says: correct it, or send the prompt as it is")
        return bool(in_parts)


@lru_cache(maxsize=8)
def compiled(source: str) -> ChatTemplate:
    """The template of a source, compiled once. Raises UserError as ``ChatTemplate``."""
    return ChatTemplate(source)


def text_of(content: Any) -> str:
    """The text of content that is text, parts, or not there."""
    return "\n".join(part.get("text") or "" for part in content) if isinstance(content, list) else content or ""


def _marked(content: Any) -> Any:
    """Content with ``_END`` at the end of its text."""
    if not isinstance(content, list):
        return content + _END
    index = max(index for index, part in enumerate(content) if part.get("text") is not None)
    return [*content[:index], {**content[index], "text": content[index]["text"] + _END}, *content[index + 1 :]]


def _message(message: Mapping[str, Any], in_parts: bool) -> dict[str, Any]:
    fields = {name: value for name, value in message.items() if value is not None}
    content = fields.get("content")
    if in_parts and isinstance(content, str):
        fields["content"] = [{"type": "text", "text": content}]
    elif isinstance(content, list) and not in_parts:
        fields["content"] = text_of(content)
    reasoning = next((fields[name] for name in _REASONING if name in fields), None)
    return fields if reasoning is None else {"thinking": reasoning, **fields, "reasoning_content": reasoning}


def _first_line(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:200]


def _check_time(ends: float) -> str:
    """An empty text while there is time, else SecurityError."""
    if time.monotonic() > ends:
        raise SecurityError("takes too long")
    return ""


def _within_limits(value: Any) -> Any:
    """The value itself. Raises SecurityError if it is too large to go on with."""
    if isinstance(value, (str, list, tuple)) and len(value) > MAX_CHARS:
        raise SecurityError(f"makes a value of more than {MAX_CHARS} characters")
    return value


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's, with limits on what an operator may make."""

    intercepted_binops = frozenset(["*", "**", "+", "%"])

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and (abs(left) > 1000 or abs(right) > 1000):
            raise SecurityError("raises a number to a power that is too large")
        if operator == "*":
            for many, times in ((left, right), (right, left)):
                if isinstance(many, (str, list, tuple)) and isinstance(times, int) and len(many) * times > MAX_CHARS:
                    raise SecurityError(f"makes a value of more than {MAX_CHARS} characters")
        return _within_limits(super().call_binop(context, operator, left, right))


class _Guarded(NodeTransformer):
    """Puts a look at the clock into each turn of every loop and each call of every macro, and a limit on what ``~`` joins."""

    def visit_For(self, node: nodes.For | nodes.Macro) -> nodes.For | nodes.Macro:  # noqa: N802
        self.generic_visit(node)
        name = nodes.Name(_TICK, "load", lineno=node.lineno)
        tick = nodes.Call(name, [], [], None, None, lineno=node.lineno)
        node.body.insert(0, nodes.ExprStmt(tick, lineno=node.lineno))
        return node

    visit_Macro = visit_For

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:  # noqa: N802
        self.generic_visit(node)
        return nodes.Filter(node, _WITHIN, [], [], None, None, lineno=node.lineno)


class _Generation(Extension):
    """``{% generation %}``, with which templates mark the assistant's words for training: here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


def _tojson(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False) -> str:
    """Jinja's own would escape for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
