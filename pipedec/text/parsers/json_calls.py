"""Calls that are JSON objects with the name and the arguments, between marks or as the whole answer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

import regex

from pipedec.text.parsers.grammars import calls_grammar, literal
from pipedec.text.parsers.json_text import rest_of_object
from pipedec.text.parsers.parser import TOOL_NAME, Answer, NotACall, Read, Reading, Schemas, TokenId, ToolParser, no_token
from pipedec.text.parsers.source import ANY_BLANKS as _S
from pipedec.text.parsers.source import each, joined

_FIRST = rf'(?:"(?:type|id|tool_call_id)"{_S}:{_S}"[^"\\]{{0,99}}"{_S},{_S})?'  # a field that may stand before the name
_HEADER = regex.compile(
    rf'\{{{_S}{_FIRST}"(?:tool_)?name"{_S}:{_S}"(?P<name>{TOOL_NAME})"{_S},{_S}'
    rf'"(?:arguments|parameters)"{_S}:{_S}(?=\{{)'
)
_END = regex.compile(rf"{_S}(?:\}}|,(?P<more>))")


@dataclass(frozen=True)
class JsonCalls(ToolParser):
    """Calls as ``{"name": …, "arguments": {…}}``. Those without marks are the whole answer, or stand at its beginning."""

    name: str
    begin: str  # before each call
    end: str  # after each call
    separator: str  # between two calls
    arguments: str  # the key of the arguments

    @property
    def special(self) -> tuple[str, ...]:
        return tuple(mark.strip() for mark in (self.begin, self.end) if mark)

    def fits(self, template: str) -> bool:
        return False

    def grammar(self, tools: Schemas, is_single: bool, token_id: TokenId = no_token) -> str:
        def before(name: str) -> str:
            return literal(f'{self.begin}{{"name": "{name}", "{self.arguments}": ', token_id)

        return calls_grammar(tools, is_single, literal(self.separator), before, literal("}" + self.end, token_id))

    def openings(self) -> Mapping[str, Read]:
        return {} if self.begin else {"{": _begun}

    def marks(self) -> Mapping[str, Read]:
        return {self.begin.strip(): self._marked} if self.begin else {}

    def _marked(self, answer: Answer) -> Reading:
        yield from answer.source.skip()
        yield from read_object(answer)
        yield from answer.source.take(closing(self.end.strip()))


def closing(mark: str) -> regex.Pattern[str]:
    """A pattern for a mark after a call, and the blanks before it."""
    return regex.compile(_S + regex.escape(mark))


def _begun(answer: Answer) -> Reading:
    answer.source.unread("{")
    yield from read_object(answer)


def read_named(answer: Answer, header: regex.Match[str] | None) -> Reading:
    """A call with its name in a header and its arguments in the object after it. Raises NotACall if there is no header."""
    if header is None:
        raise NotACall
    yield answer.call(header["name"])
    yield from each(rest_of_object(answer.source), answer.arguments)


def read_object(answer: Answer) -> Reading:
    """A call that is an object. Its arguments are passed on as they come if they are its second field."""
    header = yield from answer.source.take(_HEADER)
    if header is not None and header["name"] in answer.schemas:
        yield answer.call(header["name"])
        yield from each(rest_of_object(answer.source), answer.arguments)
        yield from _end_of_call(answer)
        return
    answer.source.unread("" if header is None else header[0])
    yield from _whole_object(answer)


def _end_of_call(answer: Answer) -> Reading:
    end = yield from answer.source.take(_END)
    if end is not None and end["more"] is not None:  # other fields
        yield from joined(rest_of_object(answer.source, depth=1))


def _whole_object(answer: Answer) -> Reading:
    """A call that is not written as most are: read when it has ended."""
    if (yield from answer.source.mark("{")) is None:
        raise NotACall
    answer.source.unread("{")
    text = yield from joined(rest_of_object(answer.source))
    name, arguments = _call_in(text)
    yield answer.call(name)
    yield answer.arguments(arguments)


def _call_in(text: str) -> tuple[str, str]:
    """Name and arguments of the call that the text is. Raises NotACall if it is none."""
    try:
        found = json.loads(text)
        name, given = found.get("name", found.get("tool_name")), found.get("arguments", found.get("parameters", {}))
        arguments = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
        arguments.encode()  # ValueError for half of a surrogate pair
    except (ValueError, RecursionError):
        raise NotACall from None
    if not isinstance(name, str) or not isinstance(given, dict | str):
        raise NotACall
    return name, arguments


PLAIN = JsonCalls("plain", "", "", "\n", "arguments")  # for models that know no form
