"""The parts of an answer, and what a parser of one form of answers declares.

A parser names the marks after which it reads, each with the generator that does so. A form may be a reasoning parser, a tool
parser, or both: an answer knows which of the two are in use. Knows JSON schemas; no single form.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any

from pipedec.text.parsers.source import BLANKS, MORE, EndOfText, More, Source

TOOL_NAME = "[A-Za-z0-9_.-]{1,128}"  # a pattern

Schemas = Mapping[str, Mapping[str, Any] | None]  # the JSON schema of a tool's arguments, by the tool's name; None: it has none


@dataclass(frozen=True)
class Thought:
    """A new piece of the model's reasoning."""

    text: str


@dataclass(frozen=True)
class CallPart:
    """A new part of a call."""

    index: int  # counts the calls of an answer, from 0
    name: str | None  # the tool, with the first part of a call; else None
    arguments: str  # a piece of JSON text


TokenId = Callable[[str], int | None]  # the id of the token with a name; None if there is none


def no_token(_: str) -> None:
    """A ``TokenId`` without any."""


Part = str | Thought | CallPart  # str: text for the user
Reading = Generator[Part | More, None, None]


class NotACall(Exception):
    """Neither a call of a known tool nor a thought follows the mark: what was read is text."""


class Answer:
    """One answer while it is read.

    Args:
        schemas: the tools that it may call; none if nothing reads calls.
        has_thoughts: whether thoughts are read.
    """

    def __init__(self, source: Source, schemas: Schemas, has_thoughts: bool) -> None:
        self.source, self.schemas, self.has_thoughts = source, schemas, has_thoughts
        self.num_calls = 0

    def call(self, name: str | None) -> CallPart:
        """The first part of a call. Raises NotACall if there is no such tool."""
        if name not in self.schemas:
            raise NotACall
        self.num_calls += 1
        return CallPart(self.num_calls - 1, name, "")

    def arguments(self, text: str) -> CallPart:
        """The next part of the latest call."""
        return CallPart(self.num_calls - 1, None, text)

    def attempt(self, read: Read, mark: str) -> Generator[Part | More, None, str | None]:
        """Read on after a mark. Returns the text that it was, with the mark; None if it was something else."""
        self.source.hold(mark)
        try:
            for part in read(self):
                if part is not MORE:
                    self.source.release()
                yield part
        except NotACall:
            pass
        except EndOfText:
            self.source.read()
        else:
            self.source.release()
        return self.source.release() if self.source.is_holding else None


Read = Callable[[Answer], Reading]


class Parser(ABC):
    """A form of answers.

    A ``Read`` starts after its mark. Before its first part, which may be empty, it may raise NotACall: then the mark and what it
    has read since are text, and reading goes on from there. It lets EndOfText pass: if that comes before the first part, the rest
    of the answer is text.
    """

    name: str

    @property
    def special(self) -> tuple[str, ...]:
        """Names of the tokens that are part of the text to read, although a tokenizer may hide them."""
        return ()

    @abstractmethod
    def fits(self, template: str) -> bool:
        """Whether answers to prompts of this chat template have the form."""

    def openings(self) -> Mapping[str, Read]:
        """By mark: read only where no text for the user has begun, which is at first and after a thought or a call."""
        return {}

    def marks(self) -> Mapping[str, Read]:
        """By mark: read anywhere in text for the user."""
        return {}


class ReasoningParser(Parser):
    """A form of thoughts."""

    begin: str  # the marks
    end: str
    before_text: str = ""  # what a model writes between the end of a thought and text for the user

    @abstractmethod
    def thought(self, answer: Answer) -> Reading:
        """Read on after ``begin``, and skip the blanks after the thought."""

    def is_open(self, prompt: str) -> bool:
        """Whether a prompt ends in a thought that has just begun."""
        return prompt.rstrip(BLANKS).endswith(self.begin.rstrip(BLANKS))

    def is_closed(self, prompt: str) -> bool:
        """Whether a prompt ends after a thought, so that the answer has none."""
        return prompt.rstrip(BLANKS).endswith(self.end)

    def continued(self, answer: Answer) -> Reading:
        """Read on after a prompt with an open thought: the model may repeat the mark."""
        yield Thought("")
        yield from answer.source.skip()
        yield from answer.source.mark((self.begin,))
        yield from self.thought(answer)


class ToolParser(Parser):
    """A form of calls."""

    @abstractmethod
    def grammar(self, tools: Schemas, is_single: bool, token_id: TokenId = no_token) -> str:
        """In Lark's notation, of an answer that only calls tools: once, or also several times unless ``is_single``.

        A mark that has a ``token_id`` is written as that token.
        """
