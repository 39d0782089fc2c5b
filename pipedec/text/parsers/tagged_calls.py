"""Calls whose arguments are written one by one between tags, as text or as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Any

import regex

from pipedec.text.parsers.grammars import json_value, literal
from pipedec.text.parsers.json_text import as_json, properties, property_schema, standalone, types_of
from pipedec.text.parsers.parser import TOOL_NAME, Answer, NotACall, Read, Reading, Schemas, TokenId, ToolParser, no_token
from pipedec.text.parsers.source import ANY_BLANKS as _S
from pipedec.text.parsers.source import each, joined
from pipedec.text.parsers.text_values import text_value

_MAX_CHARACTERS = 1_000_000  # of a grammar
_MAX_FOLLOWING = 16  # parameters that are looked for where the end of one is missing: the next ones, in the schema's order
_FIELDS = {
    "{name}": f"(?P<name>{TOOL_NAME})",
    "{key}": r'(?P<key>[^<>"\r\n]{1,99})',
    "{is_string}": '(?P<is_string>[^<>"]{0,9})',
}


@dataclass(frozen=True)
class TaggedCalls(ToolParser):
    """Calls as ``begin``, a call's begin, ``parameter``, value, ``end_parameter``, …, ``end_call``, ``end``.

    Blanks between tags are written as they are given here, and read in any number. A value has a newline before and after it that
    is not its own if ``parameter`` ends in one. Where ``end_parameter`` is missing, the value ends before the line with the next
    parameter, or the end of the call.
    """

    name: str
    begin: str  # before each call, or before all of them
    call: str  # the begin of a call, with ``{name}``
    parameter: str  # the begin of a parameter, with ``{key}``; where it says so, ``{is_string}``: ``true`` or ``false``
    end_parameter: str
    end_call: str
    end: str  # what ends what ``begin`` begins
    shown: tuple[str, ...]  # texts of a chat template that asks for such calls
    is_joint: bool = False  # one ``begin`` and ``end`` for all calls
    separator: str = "\n"  # between two calls

    @property
    def special(self) -> tuple[str, ...]:
        tags = "".join((self.begin, self.call, self.parameter, self.end_parameter, self.end_call, self.end))
        return tuple(dict.fromkeys(re.findall(r"<[^<>\s{}]+>|｜\w+｜", tags)))

    def fits(self, template: str) -> bool:
        return all(text in template for text in self.shown)

    def grammar(self, tools: Schemas, is_single: bool, token_id: TokenId = no_token) -> str:
        """Schemas that are long and often referred to make it longer than any server takes; then only a part is returned."""
        begin, end = literal(self.begin, token_id), literal(self.end, token_id)
        calls = "call" if is_single else f"call ({literal(self.separator)} call)*"
        any_call = " | ".join(f"call_{index}" for index in range(len(tools)))
        if self.is_joint:
            lines = [f"start: {begin} {calls} {end}", f"call: {any_call}"]
        else:
            lines = [f"start: {calls}", f"call: {begin} ({any_call}) {end}"]
        length = 0
        for index, (name, schema) in enumerate(tools.items()):
            parameters = []
            for number, (key, is_required) in enumerate(properties(schema).items()):
                rule = f"parameter_{index}_{number}"
                parameters.append(rule if is_required else f"{rule}?")
                lines += self._parameter_rules(rule, key, standalone(property_schema(schema, key), schema or {}), token_id)
                if (length := length + sum(map(len, lines[-2:]))) > _MAX_CHARACTERS:
                    return "\n".join(lines)
            written = literal(self.call.replace("{name}", name), token_id)
            lines.append(f"call_{index}: {written} {' '.join(parameters)} {literal(self.end_call, token_id)}")
        return "\n".join(lines)

    def _parameter_rules(self, rule: str, key: str, schema: Mapping[str, Any], token_id: TokenId) -> list[str]:
        def start(is_string: str) -> str:
            return literal(self.parameter.replace("{key}", key).replace("{is_string}", is_string), token_id)

        blanks, tag, rest = re.split(r"(<.*>)", self.end_parameter)
        text = text_value(schema, (tag, f"\n{self.parameter_mark}", f"\n{self.end_call.partition('>')[0]}"))
        end, name = literal(self.end_parameter, token_id), rule.upper()
        if text is None:
            return [f"{rule}: {start('false')} {rule}_value {end}", f"{rule}_value: {json_value(schema)}"]
        null = f' | {start("false")} "null" {end}' if "null" in types_of(schema) else ""
        if token_id(tag) is not None:  # which is no part of a terminal
            return [f"{rule}: {start('true')} {name} {literal(tag + rest, token_id)}{null}", f"{name}: {text} {literal(blanks)}"]
        return [f"{rule}: {start('true')} {name} {literal(rest)}{null}", f"{name}: {text} {literal(blanks + tag)}"]

    def marks(self) -> Mapping[str, Read]:
        marks: dict[str, Read] = {self.begin.strip(): self._begun}
        return marks | ({self.call_mark: self._call} if self.call_mark else {})

    @property
    def call_mark(self) -> str:
        """The first tag of a call, up to its name; empty if a call begins with its name."""
        return re.split(r"(?<=>)|{", self.call)[0]

    @property
    def parameter_mark(self) -> str:
        return self.parameter.partition("{key}")[0]

    def _begun(self, answer: Answer) -> Reading:
        yield from answer.source.skip()
        if self.call_mark and (yield from answer.source.mark((self.call_mark,))) is None:
            raise NotACall
        yield from self._call(answer)

    def _call(self, answer: Answer) -> Reading:
        header = yield from answer.source.take(_header(self))
        if header is None:
            raise NotACall
        yield answer.call(header["name"])
        yield from self._arguments(answer, answer.schemas[header["name"]])
        for tags in filter(None, (self.end_call, self.end)):
            yield from answer.source.take(_ending(tags))

    def _arguments(self, answer: Answer, schema: Mapping[str, Any] | None) -> Reading:
        """A parameter that comes again is left out, as its first value has been passed on."""
        found: list[str] = []
        while (start := (yield from answer.source.take(_start_of_parameter(self)))) is not None:
            key = start["key"]
            is_new = key not in found
            found += [key] * is_new
            following = (name for name in properties(schema) if name not in found)
            pieces = answer.source.search(_end_of_value(self, tuple(islice(following, _MAX_FOLLOWING))))
            if is_new:
                yield answer.arguments(("{" if len(found) == 1 else ", ") + json.dumps(key, ensure_ascii=False) + ": ")
                yield from each(as_json(pieces, self._schema(start, schema), schema), answer.arguments)
            else:
                yield from joined(pieces)
        yield answer.arguments("}" if found else "{}")

    def _schema(self, start: regex.Match[str], schema: Mapping[str, Any] | None) -> Mapping[str, Any]:
        if "is_string" in start.groupdict():
            return {"type": "string"} if start["is_string"] == "true" else {}
        return property_schema(schema, start["key"])


@lru_cache(maxsize=64)
def _header(form: TaggedCalls) -> regex.Pattern[str]:
    """The begin of a call after its mark, and before a parameter or the end."""
    following = _any_of(form.parameter_mark, form.end_call, form.end)
    return regex.compile(_loose(form.call.removeprefix(form.call_mark)) + rf"{_S}(?={following})")


@lru_cache(maxsize=64)
def _ending(tags: str) -> regex.Pattern[str]:
    return regex.compile(_S + _loose(tags))


@lru_cache(maxsize=64)
def _start_of_parameter(form: TaggedCalls) -> regex.Pattern[str]:
    return regex.compile(_S + _loose(form.parameter) + (r"(?:\n|(?=[^\n]))" if form.parameter.endswith("\n") else ""))


@lru_cache(maxsize=1024)
def _end_of_value(form: TaggedCalls, names: tuple[str, ...]) -> regex.Pattern[str]:
    """The end of a value that the parameters ``names`` may follow."""
    newline = r"\n?" if form.end_parameter.startswith("\n") else ""
    end = rf"{_loose(form.end_call)}\s{{0,9}}(?:{_any_of(form.end, form.begin, form.call_mark)})"
    following = [_loose(form.parameter.split("{is_string}")[0].replace("{key}", name)) for name in names]
    return regex.compile(rf"{newline}{_loose(form.end_parameter)}|\n(?={'|'.join([end, *following])})")


def _any_of(*texts: str) -> str:
    return "|".join(_loose(text) for text in texts if text)


def _loose(text: str) -> str:
    """A pattern for the text, with any number of blanks between its tags."""
    pattern = _S.join(regex.escape(part) for part in re.split(r"\s+|(?<=>)(?=<)", text.strip()))
    for field, value in _FIELDS.items():
        pattern = pattern.replace(regex.escape(field), value)
    return pattern
