"""The form of Llama 3: JSON objects as the whole answer or after ``<|python_tag|>``, and ``<function=name>{…}</function>``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import regex

from pipedec.text.parsers.json_calls import JsonCalls, closing, read_named, read_object
from pipedec.text.parsers.parser import TOOL_NAME, Answer, Read, Reading
from pipedec.text.parsers.source import ANY_BLANKS

_PYTHON_TAG = "<|python_tag|>"
_NAME = regex.compile(rf"(?P<name>{TOOL_NAME})>{ANY_BLANKS}(?=\{{)")
_END = closing("</function>")


@dataclass(frozen=True)
class Llama3(JsonCalls):
    @property
    def special(self) -> tuple[str, ...]:
        return (_PYTHON_TAG,)

    def fits(self, template: str) -> bool:
        return "<tool_call>" not in template and re.search(r'\{\\?"name\\?": .*\\?"parameters\\?": ', template) is not None

    def marks(self) -> Mapping[str, Read]:
        return {_PYTHON_TAG: _tagged, "<function=": _named}


def _tagged(answer: Answer) -> Reading:
    yield from answer.source.skip()
    yield from read_object(answer)


def _named(answer: Answer) -> Reading:
    yield from read_named(answer, (yield from answer.source.take(_NAME)))
    yield from answer.source.take(_END)


LLAMA3 = Llama3("llama3", "", "", "; ", "parameters")
