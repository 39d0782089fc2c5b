"""Calls that name the tool before a JSON object, with marks around each and around all: DeepSeek and Kimi K2."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import regex

from pipedec.text.parsers.grammars import calls_grammar, literal
from pipedec.text.parsers.json_calls import closing, read_named
from pipedec.text.parsers.parser import TOOL_NAME, Answer, NotACall, Read, Reading, Schemas, TokenId, ToolParser, no_token
from pipedec.text.parsers.source import ANY_BLANKS


@dataclass(frozen=True)
class NamedCalls(ToolParser):
    """A call is ``begin``, the ``header`` with its name, a JSON object, ``after`` and ``end``; ``section`` has the marks around
    all calls. A number in ``header`` stands for any, and its blanks, and what it has before the name, may be missing.
    """

    name: str
    section: tuple[str, str]
    begin: str
    header: str
    after: str
    end: str
    separator: str  # between two calls
    template: str  # a pattern that is found in templates that ask for the form

    @property
    def special(self) -> tuple[str, ...]:
        return (*self.section, self.begin, *re.findall(r"<[^<>\s]+>", self.header), self.end)

    def fits(self, template: str) -> bool:
        return re.search(self.template, template, re.DOTALL) is not None

    def grammar(self, tools: Schemas, is_single: bool, token_id: TokenId = no_token) -> str:
        to_name, _, to_arguments = self.header.partition("{name}")

        def before(name: str) -> str:
            rest = ["/[0-9]{1,3}/" if part.isdigit() else literal(part, token_id) for part in re.split(r"(\d+)", to_arguments)]
            return " ".join([literal(f"{self.begin}{to_name}{name}", token_id), *rest])

        first, last = (literal(mark, token_id) for mark in self.section)
        after = literal(self.after + self.end, token_id)
        return calls_grammar(tools, is_single, literal(self.separator), before, after, first, last)

    def marks(self) -> Mapping[str, Read]:
        return {self.section[0]: self._opened, self.begin: self._called}

    def _opened(self, answer: Answer) -> Reading:
        yield from answer.source.skip()
        if (yield from answer.source.mark((self.begin,))) is None:
            raise NotACall
        yield from self._called(answer)

    def _called(self, answer: Answer) -> Reading:
        yield from read_named(answer, (yield from answer.source.take(self._pattern)))
        for mark in (self.after, self.end, self.section[1]):
            yield from answer.source.take(closing(mark.strip()))

    @cached_property
    def _pattern(self) -> regex.Pattern[str]:
        to_name, _, to_arguments = map(_flexible, self.header.partition("{name}"))
        return regex.compile(rf"{ANY_BLANKS}(?:{to_name})?(?P<name>{TOOL_NAME}){to_arguments}{ANY_BLANKS}(?=\{{)")


def _flexible(text: str) -> str:
    """A pattern for the text with other numbers, and with blanks or without."""
    parts = re.split(r"(\d+|\s+)", text)
    return "".join(r"\d{1,4}" if part.isdigit() else ANY_BLANKS if part.isspace() else regex.escape(part) for part in parts)


_DEEPSEEK_SECTION = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_DEEPSEEK_CALL = ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")

DEEPSEEK_V3 = NamedCalls(
    "deepseek_v3",
    _DEEPSEEK_SECTION,
    _DEEPSEEK_CALL[0],
    "function<｜tool▁sep｜>{name}\n```json\n",
    "\n```",
    _DEEPSEEK_CALL[1],
    "\n",
    "<｜tool▁sep｜>.*```json",
)
DEEPSEEK_V31 = NamedCalls(
    "deepseek_v31",
    _DEEPSEEK_SECTION,
    _DEEPSEEK_CALL[0],
    "{name}<｜tool▁sep｜>",
    "",
    _DEEPSEEK_CALL[1],
    "",
    "<｜tool▁sep｜>",
)
KIMI_K2 = NamedCalls(
    "kimi_k2",
    ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    "<|tool_call_begin|>",
    "functions.{name}:0<|tool_call_argument_begin|>",
    "",
    "<|tool_call_end|>",
    "",
    r"<\|tool_calls_section_begin\|>|<\|im_system\|>tool_declare",
)
