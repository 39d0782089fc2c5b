"""Calls in a list of JSON objects after a mark: Mistral's older models, Phi-4-mini, Granite and Command."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import regex

from pipedec.text.parsers.grammars import calls_grammar, literal
from pipedec.text.parsers.json_calls import closing, read_object
from pipedec.text.parsers.parser import Answer, Read, Reading, Schemas, TokenId, ToolParser, no_token
from pipedec.text.parsers.source import ANY_BLANKS

_NEXT = regex.compile(rf"{ANY_BLANKS},{ANY_BLANKS}(?=\{{)")


@dataclass(frozen=True)
class JsonLists(ToolParser):
    """Calls as ``[{"name": …, "arguments": {…}}, …]``. A single one may go without brackets."""

    name: str
    begin: str  # the mark before the list
    end: str  # after it; empty if there is none
    template: str  # a pattern that is found in templates that ask for the form
    fields: str = '"name": "{name}", "arguments"'  # of a call, up to its arguments

    @property
    def special(self) -> tuple[str, ...]:
        return tuple(mark for mark in (self.begin, self.end) if mark)

    def fits(self, template: str) -> bool:
        return re.search(self.template, template) is not None

    def grammar(self, tools: Schemas, is_single: bool, token_id: TokenId = no_token) -> str:
        def before(name: str) -> str:
            return literal("{" + self.fields.format(name=name) + ": ")

        first, last = f'{literal(self.begin, token_id)} " "? "["', literal("]" + self.end, token_id)
        return calls_grammar(tools, is_single, literal(", "), before, literal("}"), first, last)

    def marks(self) -> Mapping[str, Read]:
        return {self.begin: self._listed}

    def _listed(self, answer: Answer) -> Reading:
        yield from answer.source.skip()
        if (yield from answer.source.mark(("[",))) is not None:
            yield from answer.source.skip()
            yield from read_object(answer)
            yield from _others(answer)
            yield from answer.source.take(closing("]"))
        else:
            yield from read_object(answer)
        if self.end:
            yield from answer.source.take(closing(self.end))


def _others(answer: Answer) -> Reading:
    """The calls of a list after the first one. Those of unknown tools are text."""
    while (comma := (yield from answer.source.take(_NEXT))) is not None:
        text = yield from answer.attempt(read_object, comma[0])
        if text is not None:
            yield text
