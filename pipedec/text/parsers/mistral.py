"""The forms of Mistral: ``[TOOL_CALLS]name[ARGS]{…}`` for each call, and a list of JSON objects in older models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import regex

from pipedec.text.parsers.grammars import calls_grammar, literal
from pipedec.text.parsers.json_calls import read_named
from pipedec.text.parsers.json_lists import JsonLists
from pipedec.text.parsers.parser import TOOL_NAME, Answer, Read, Reading, Schemas, TokenId, no_token
from pipedec.text.parsers.source import ANY_BLANKS as _S

_CALLS, _ID, _ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_HEADER = regex.compile(rf"{_S}(?P<name>{TOOL_NAME}){_S}(?:\[CALL_ID\]{_S}[A-Za-z0-9_-]{{0,64}}{_S})?(?:\[ARGS\])?{_S}(?=\{{)")


@dataclass(frozen=True)
class Mistral(JsonLists):
    @property
    def special(self) -> tuple[str, ...]:
        return _CALLS, _ID, _ARGUMENTS

    def grammar(self, tools: Schemas, is_single: bool, token_id: TokenId = no_token) -> str:
        """The newer form if the mark of its arguments is a token."""
        if token_id(_ARGUMENTS) is None:
            return super().grammar(tools, is_single, token_id)
        return calls_grammar(
            tools, is_single, literal(""), lambda name: literal(f"{_CALLS}{name}{_ARGUMENTS}", token_id), literal("")
        )

    def marks(self) -> Mapping[str, Read]:
        return {_CALLS: self._called}

    def _called(self, answer: Answer) -> Reading:
        header = yield from answer.source.take(_HEADER)
        yield from self._listed(answer) if header is None else read_named(answer, header)


MISTRAL = Mistral("mistral", _CALLS, "", r"\[TOOL_CALLS\]")
