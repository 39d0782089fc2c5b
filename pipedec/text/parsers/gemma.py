"""The form of Gemma: ``call:name{key:value}`` between marks, with values in a notation of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import regex

from pipedec.text.parsers.gemma_values import ValueRules, as_json_object
from pipedec.text.parsers.grammars import calls_grammar, literal
from pipedec.text.parsers.json_calls import closing
from pipedec.text.parsers.parser import TOOL_NAME, Answer, NotACall, Read, Reading, Schemas, TokenId, ToolParser, no_token
from pipedec.text.parsers.source import ANY_BLANKS, each

_HEADER = regex.compile(rf"{ANY_BLANKS}call:{ANY_BLANKS}(?P<name>{TOOL_NAME}){ANY_BLANKS}(?=\{{)")


@dataclass(frozen=True)
class Gemma(ToolParser):
    name: str
    begin: str
    end: str
    quote: str  # the mark around strings

    @property
    def special(self) -> tuple[str, ...]:
        return self.begin, self.end, self.quote

    def fits(self, template: str) -> bool:
        return self.begin in template and self.quote in template

    def grammar(self, tools: Schemas, is_single: bool, token_id: TokenId = no_token) -> str:
        values = ValueRules(self.quote, token_id)
        calls = calls_grammar(
            tools,
            is_single,
            separator="",
            before=lambda name: literal(f"{self.begin}call:{name}", token_id),
            after=literal(self.end, token_id),
            arguments=values.of_object,
        )
        return f"{calls}\n{values.common}"

    def marks(self) -> Mapping[str, Read]:
        return {self.begin: self._called}

    def _called(self, answer: Answer) -> Reading:
        header = yield from answer.source.take(_HEADER)
        if header is None:
            raise NotACall
        yield answer.call(header["name"])
        if (yield from each(as_json_object(answer.source, self.quote), answer.arguments)):
            yield from answer.source.take(closing(self.end))
        else:  # the client gets what is no value as it is written
            yield from each(answer.source.until((self.end,)), answer.arguments)


GEMMA = Gemma("gemma", "<|tool_call>", "<tool_call|>", '<|"|>')
FUNCTIONGEMMA = Gemma("functiongemma", "<start_function_call>", "<end_function_call>", "<escape>")
