"""The form of gpt-oss: an answer is a sequence of messages, each in a channel, and each to the user or to a tool.

Both a reasoning parser and a tool parser: messages of the channel ``analysis`` are thoughts, those to a tool are calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import regex

from pipedec.text.parsers.grammars import calls_grammar, literal
from pipedec.text.parsers.parser import (
    Answer,
    NotACall,
    Part,
    Read,
    Reading,
    ReasoningParser,
    Schemas,
    Thought,
    TokenId,
    ToolParser,
    no_token,
)
from pipedec.text.parsers.source import TrailingBlanks, each

_START, _CHANNEL, _TO = "<|start|>", "<|channel|>", "to="
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_BOUNDS = (*_ENDS, _START, _CHANNEL)  # where a message ends
_RECIPIENT = r"(?P<recipient>[^\s<]{1,140})"  # the name of a tool, with what may stand before it
_ROLE = regex.compile(rf"assistant(?:\s{{0,9}}to={_RECIPIENT})?\s{{0,9}}<\|channel\|>")
_TOOL = regex.compile(rf"{_RECIPIENT}\s{{0,9}}<\|channel\|>")
_HEADER = regex.compile(
    rf"(?P<channel>analysis|commentary|final)(?:\s{{1,9}}to={_RECIPIENT})?"
    r"\s{0,9}(?:<\|constrain\|>)?\s{0,9}[A-Za-z]{0,20}\s{0,9}<\|message\|>"
)


class Harmony(ReasoningParser, ToolParser):
    name = "harmony"
    begin = "<|channel|>analysis<|message|>"
    end = "<|end|>"
    before_text = "<|start|>assistant<|channel|>final<|message|>"
    special = (_START, _CHANNEL, "<|constrain|>", "<|message|>", *_ENDS)

    def fits(self, template: str) -> bool:
        return _CHANNEL in template and "<|message|>" in template

    def grammar(self, tools: Schemas, is_single: bool, token_id: TokenId = no_token) -> str:
        def before(name: str) -> str:
            return literal(f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>", token_id)

        start = literal("<|start|>assistant", token_id)
        return calls_grammar(tools, is_single, start, before, literal("<|call|>", token_id), f"({start})?")

    def openings(self) -> Mapping[str, Read]:
        return {_TO: _to_tool}  # a prompt ends with the role

    def marks(self) -> Mapping[str, Read]:
        return {_START: _message, _CHANNEL: _in_channel}

    def thought(self, answer: Answer) -> Reading:
        return _thought(answer)


def _message(answer: Answer) -> Reading:
    role = yield from answer.source.take(_ROLE)
    if role is None:
        raise NotACall
    yield from _in_channel(answer, role["recipient"])


def _to_tool(answer: Answer) -> Reading:
    tool = yield from answer.source.take(_TOOL)
    if tool is None:
        raise NotACall
    yield from _in_channel(answer, tool["recipient"])


def _in_channel(answer: Answer, recipient: str | None = None) -> Reading:
    header = yield from answer.source.take(_HEADER)
    if header is None:
        raise NotACall
    recipient = recipient or header["recipient"]
    if recipient is not None:
        yield from _call(answer, recipient.removeprefix("functions."))
    elif header["channel"] != "analysis":
        yield from _until_end(answer, str)
    elif answer.has_thoughts:
        yield from _thought(answer)
    else:
        raise NotACall


def _call(answer: Answer, name: str) -> Reading:
    yield answer.call(name)
    trailing = TrailingBlanks()
    yield from answer.source.skip()
    if (yield from answer.source.mark(_ENDS)) is not None or answer.source.is_over:
        yield answer.arguments("{}")
        return
    yield from _until_end(answer, lambda piece: answer.arguments(trailing.add(piece)))


def _thought(answer: Answer) -> Reading:
    yield Thought("")
    trailing = TrailingBlanks()
    yield from answer.source.skip()
    yield from _until_end(answer, lambda piece: Thought(trailing.add(piece)))


def _until_end(answer: Answer, change: Callable[[str], Part]) -> Reading:
    """The text of a message. A missing mark at its end does not matter."""
    yield change("")
    end = yield from each(answer.source.until(_BOUNDS), change)
    if end not in _ENDS:
        answer.source.unread(end)


HARMONY = Harmony()
