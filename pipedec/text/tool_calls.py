"""Calls of tools in the text of an answer: the forms in which models write them, their grammars, and a reader of answers.

Knows chat templates and JSON; no tokens, no HTTP.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pipedec.text.stream import num_begun

_NAME = r'"name"\s*:\s*"(?P<name>[A-Za-z0-9_.-]{1,64})"'
_HEADER = re.compile(rf'\s*\{{\s*{_NAME}\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{{)')
_JSON_GUIDANCE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
_SEPARATORS = " \t\r\n;,"


@dataclass(frozen=True)
class ToolFormat:
    """How a model writes the call of a tool: as a JSON object with ``name`` and the arguments."""

    begin: str  # before each call
    end: str  # after each call
    separator: str  # between two calls
    arguments: str  # the key of the arguments

    def grammar(
        self, tools: Mapping[str, Mapping[str, Any] | None], is_single: bool, is_token: Callable[[str], bool] = lambda _: False
    ) -> str:
        """In Lark's notation, of an answer that only calls tools: once, or also several times unless ``is_single``. ``tools``:
        from the name to the JSON schema of the arguments; None for a tool without any. A mark for which
        ``is_token`` holds is written as that token.
        """
        schemas = [_NO_ARGUMENTS if schema is None else {"type": "object", **schema} for schema in tools.values()]

        def said(mark: str) -> str:
            parts = [part for part in re.split(r"(<\S+>)", mark) if part]
            return " ".join(part if part[0] == "<" and is_token(part) else json.dumps(part) for part in parts)

        begin, end = said(self.begin), said(self.end)
        lines = [
            "start: call" + ("" if is_single else f" ({json.dumps(self.separator)} call)*"),
            f"call: {begin} ({' | '.join(f'call_{index}' for index in range(len(tools)))}) {end}",
        ]
        for index, (name, schema) in enumerate(zip(tools, schemas, strict=True)):
            opening = f'{{"name": "{name}", "{self.arguments}": '
            lines.append(f'call_{index}: {json.dumps(opening)} arguments_{index} "}}"')
            lines.append(f"arguments_{index}: %json {json.dumps({**schema, 'x-guidance': _JSON_GUIDANCE})}")
        return "\n".join(lines)


HERMES = ToolFormat("<tool_call>\n", "\n</tool_call>", "\n", "arguments")
LLAMA3 = ToolFormat("", "", "; ", "parameters")
PLAIN = ToolFormat("", "", "\n", "arguments")


def knows_tools(template: str) -> bool:
    """Whether a chat template shows tools to the model."""
    return re.search(r"\btools\b", template) is not None


def tool_format(template: str) -> ToolFormat | None:
    """The form in which a chat template asks for calls; None for one that is not known here."""
    if not knows_tools(template):
        return None
    if "<tool_call>" in template and "<function=" not in template and re.search(r'arguments\\?"', template):
        return HERMES
    return LLAMA3 if "<tool_call>" not in template and re.search(r'\{\\?"name\\?": .*\\?"parameters\\?": ', template) else None


@dataclass(frozen=True)
class CallPart:
    """A new part of a call."""

    index: int  # counts the calls of an answer, from 0
    name: str | None  # the tool, with the first part of a call; else None
    arguments: str  # a piece of JSON text


class CallReader:
    """Divides the text of an answer into text for the user (str) and calls, as it comes.

    Text that may turn out to be a call is held back. What looks like a call but has none of the tools' ``names`` remains text.
    Blanks around calls are left out. ``num_calls`` have ended.
    """

    def __init__(self, form: ToolFormat, names: Iterable[str]) -> None:
        self._begin, self._end = form.begin.strip(), form.end.strip()
        self._names = frozenset(names)
        self._held = ""  # what is not yet decided
        self._opened = ""  # before it: the beginning of what may be a call
        self._num_seen = 0  # characters of what is held in which the object does not end
        self._object = _ObjectEnd()
        self._step: Callable[[], bool] = self._outside  # returns whether there is more to do with what is held
        self._parts: list[str | CallPart] = []
        self.num_calls = 0

    def add(self, text: str) -> list[str | CallPart]:
        """The new text and calls that are final."""
        self._held += text
        while self._step():
            pass
        parts, self._parts = self._parts, []
        return parts

    def finish(self) -> list[str | CallPart]:
        """The text that was held back, when the answer has ended."""
        if self._step == self._header:
            self._say(self._opened + self._held)
        elif self._step == self._outside and not (self.num_calls and not self._held.strip(_SEPARATORS)):
            self._say(self._held)
        self._held = ""
        parts, self._parts = self._parts, []
        return parts

    def _say(self, text: str) -> None:
        if text:
            self._parts.append(text)

    def _outside(self) -> bool:
        return self._before_mark() if self._begin else self._before_object()

    def _before_object(self) -> bool:
        """Calls without marks are the whole answer, or stand at its beginning."""
        text = self._held.lstrip(_SEPARATORS if self.num_calls else None)
        if not text:
            return False
        return self._open(len(self._held) - len(text)) if text[0] == "{" else self._go_on(self._prose)

    def _before_mark(self) -> bool:
        place = self._held.find(self._begin)
        rest = len(self._held) - num_begun(self._held, [self._begin]) if place < 0 else place
        text = self._held[:rest].rstrip()
        self._say(text)
        self._held = self._held[len(text) :]
        return place >= 0 and self._open(place - len(text) + len(self._begin))

    def _prose(self) -> bool:
        self._say(self._held)
        self._held = ""
        return False

    def _open(self, length: int) -> bool:
        """Note that a call may begin after the first ``length`` characters."""
        self._opened, self._held, self._num_seen = self._held[:length], self._held[length:], 0
        self._object = _ObjectEnd()
        return self._go_on(self._header)

    def _go_on(self, step: Callable[[], bool]) -> bool:
        self._step = step
        return True

    def _header(self) -> bool:
        """Read until it is known which tool is called, if any is."""
        found = _HEADER.match(self._held)
        if found is not None and found["name"] in self._names:
            self._parts.append(CallPart(self.num_calls, found["name"], ""))
            self._held = self._held[found.end() :]
            self._object = _ObjectEnd()
            return self._go_on(self._arguments)
        if self._held.lstrip()[:1] not in ("", "{"):
            return self._reject()
        place = self._object.find(self._held[self._num_seen :])
        if place is None:
            self._num_seen = len(self._held)
            return False
        end = self._num_seen + place  # here ends an object that does not begin as most calls do
        call = _call_in(self._held[:end])
        if call is None or call[0] not in self._names:
            return self._reject()
        self._parts.append(CallPart(self.num_calls, *call))
        self._held = self._held[end:]
        return self._called()

    def _reject(self) -> bool:
        """The held text is no call."""
        self._say(self._opened)
        return self._go_on(self._outside if self._begin else self._prose)

    def _arguments(self) -> bool:
        place = self._object.find(self._held)
        if piece := self._held[:place]:
            self._parts.append(CallPart(self.num_calls, None, piece))
        self._held = self._held[len(piece) :]
        self._object = _ObjectEnd(depth=1) if place is not None else self._object
        return place is not None and self._go_on(self._after_arguments)

    def _after_arguments(self) -> bool:
        place = self._object.find(self._held)
        self._held = "" if place is None else self._held[place:]
        return place is not None and self._called()

    def _called(self) -> bool:
        self.num_calls += 1
        return self._go_on(self._closing)

    def _closing(self) -> bool:
        """Skip the mark after a call; a missing one does not matter."""
        rest = self._held.lstrip()
        if not rest.startswith(self._end) and self._end.startswith(rest):
            return False
        if self._end and rest.startswith(self._end):
            self._held = rest[len(self._end) :]
        return self._go_on(self._outside)


class _ObjectEnd:
    """Finds where a JSON object ends, in text that comes piece by piece. ``depth``: brackets that are open before it."""

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self._is_string = self._is_escaped = False

    def find(self, text: str) -> int | None:
        """The position after the end; None if it is not in this piece."""
        for place, letter in enumerate(text):
            if self._is_escaped:
                self._is_escaped = False
            elif self._is_string:
                self._is_string, self._is_escaped = letter != '"', letter == "\\"
            elif letter == '"':
                self._is_string = True
            else:
                self._depth += (letter in "{[") - (letter in "}]")
                if letter in "}]" and self._depth <= 0:
                    return place + 1
        return None


def _call_in(text: str) -> tuple[str, str] | None:
    """Name and arguments of the call that the text is; None if it is no call."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    name, arguments = found.get("name"), found.get("arguments", found.get("parameters", {}))
    if not isinstance(name, str) or not isinstance(arguments, dict | str):
        return None
    return name, arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
