"""Divides the text of an answer into text for the user, thoughts, and calls of tools, as it comes.

Looks for the marks of a reasoning parser and a tool parser, and hands over to them; knows no form itself.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from types import MappingProxyType
from typing import Any

from pipedec.text.parsers.parser import Answer, CallPart, Part, Read, Reading, ReasoningParser, Thought, ToolParser
from pipedec.text.parsers.source import BLANKS, EndOfText, More, Source, TrailingBlanks, each

__all__ = ["AnswerReader", "CallPart", "Part", "Thought"]

_BETWEEN_CALLS = BLANKS + ";,"


class AnswerReader:
    """Reads one answer. The same text gives the same parts, joined, in whichever pieces it comes.

    Text that may turn out to be something else is held back. What looks like a call but calls none of the tools remains text, as
    does a mark that leads to nothing. Blanks around thoughts and before calls are left out, and those after a call if no text
    follows.

    Args:
        reasoning: how thoughts are written; None: they are text.
        tools: how calls are written; None: they are text.
        schemas: the tools that may be called.
        prompt: its end may have begun a thought.
    """

    def __init__(
        self,
        reasoning: ReasoningParser | None,
        tools: ToolParser | None,
        schemas: Mapping[str, Mapping[str, Any] | None] = MappingProxyType({}),
        prompt: str = "",
    ) -> None:
        parsers = [parser for parser in (tools, reasoning) if parser is not None]
        self._marks = {mark: read for parser in parsers for mark, read in parser.marks().items()}
        self._openings = {mark: read for parser in parsers for mark, read in parser.openings().items()} | self._marks
        self._source = Source()
        self._answer = Answer(self._source, schemas if tools is not None else {}, reasoning is not None)
        self._reading = self._divided(reasoning.continued if reasoning is not None and reasoning.is_open(prompt) else None)

    @property
    def num_calls(self) -> int:
        """Calls that have begun."""
        return self._answer.num_calls

    def add(self, text: str) -> list[Part]:
        """The new parts that are final."""
        self._source.add(text)
        return self._parts()

    def finish(self) -> list[Part]:
        """The parts that were held back, when the answer has ended."""
        self._source.close()
        return self._parts()

    def _parts(self) -> list[Part]:
        parts: list[Part] = []
        for part in self._reading:
            if isinstance(part, More):
                break
            if part != "" and part != Thought(""):
                parts.append(part)
        return parts

    def _divided(self, first: Read | None) -> Reading:
        """The whole answer; ``first`` reads on after the prompt."""
        has_divided = first is not None
        if first is not None:
            yield from self._answer.attempt(first, "")
        while True:
            blanks = yield from self._source.skip(_BETWEEN_CALLS if self.num_calls else BLANKS)
            mark = yield from self._source.mark(self._openings)
            if mark is None and self._source.is_over:
                break
            text = "" if mark is None else (yield from self._answer.attempt(self._openings[mark], mark))
            if text is not None and not (yield from self._text(blanks + text)):
                return
            has_divided = True
        if not has_divided:
            yield blanks

    def _text(self, text: str) -> Generator[Part | More, None, bool]:
        """Text for the user that begins with ``text``, and what comes after it. Returns whether the answer goes on."""
        trailing = TrailingBlanks()
        while True:
            yield trailing.add(text)
            try:
                mark = yield from each(self._source.until(self._marks), trailing.add)
            except EndOfText:
                yield trailing.held()
                return False
            refused = yield from self._answer.attempt(self._marks[mark], mark)
            if refused is None:
                return True
            text = refused
