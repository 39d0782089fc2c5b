"""Thoughts between two marks, before the text for the user."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pipedec.text.parsers.parser import Answer, Read, Reading, ReasoningParser, Thought
from pipedec.text.parsers.source import TrailingBlanks, each


@dataclass(frozen=True)
class ThinkTags(ReasoningParser):
    name: str
    begin: str
    end: str
    token: str = ""  # with which ``begin`` starts, if it is not one as a whole

    @property
    def special(self) -> tuple[str, ...]:
        return self.token or self.begin, self.end

    def fits(self, template: str) -> bool:
        return self.begin in template or self.end in template

    def openings(self) -> Mapping[str, Read]:
        return {self.begin: self.thought}

    def thought(self, answer: Answer) -> Reading:
        yield Thought("")  # from here on it is one
        trailing = TrailingBlanks()
        yield from answer.source.skip()
        yield from each(answer.source.until((self.end,)), lambda piece: Thought(trailing.add(piece)))
        yield from answer.source.skip()
