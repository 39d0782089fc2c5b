"""The effect of a token on its thread, and which tokens are banned next: functions of the dialect and the thread's state.

``lookahead`` is always a list of tokens that follow the thread's own but are not accepted yet: text and openers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from pipedec.threads import anomalies
from pipedec.threads.bound import BoundDialect, OpenerTag
from pipedec.threads.thread import DecodeThread


class Role(Enum):
    """The effect of a token on its thread."""

    TEXT = "text"
    OPEN = "open"
    CLOSE = "close"
    JOIN = "join"
    END = "end"


@dataclass(frozen=True)
class _Lookahead:
    """The state of a thread after a lookahead: its incomplete tag, its number of children and its last token."""

    tag: OpenerTag | None
    children: int
    last: int | None


class DialectGrammar:
    """The rules of a bound dialect, with the model's end tokens."""

    def __init__(self, bound: BoundDialect, end_token_ids: frozenset[int]) -> None:
        self._bound = bound
        self._end_token_ids = end_token_ids
        self._breaks_tag = end_token_ids | {bound.opener, bound.child_end, bound.join}

    def is_control(self, token: int) -> bool:
        """Whether the token is control rather than text in every context."""
        return token in self._bound.control or token in self._end_token_ids

    def role(self, thread: DecodeThread, token: int, lookahead: list[int] | None = None) -> Role:
        """The effect of ``token`` if it is the thread's next token after ``lookahead``."""
        ahead = self._ahead(thread, lookahead or [])
        if token in self._end_token_ids:
            return Role.END
        if token == self._bound.child_end and thread.parent is not None:
            return Role.CLOSE
        if token == self._bound.join and (thread.unjoined or ahead.children > len(thread.children)):
            return Role.JOIN
        return Role.OPEN if self._opens(thread, token, ahead) else Role.TEXT

    def tag_after(self, thread: DecodeThread, lookahead: list[int]) -> OpenerTag | None:
        """The incomplete tag after ``lookahead``, if any."""
        return self._ahead(thread, lookahead).tag

    def banned(self, thread: DecodeThread, lookahead: list[int]) -> frozenset[int]:
        """Tokens that may not be sampled after ``lookahead``."""
        ahead = self._ahead(thread, lookahead)
        if ahead.tag is not None or self._refusal(thread, ahead) is not None:
            return self._bound.never_sampled | {self._bound.opener}
        return self._bound.never_sampled

    def opened(self, thread: DecodeThread, lookahead: list[int]) -> int:
        """The number of children that ``lookahead`` would open."""
        return self._ahead(thread, lookahead).children - len(thread.children)

    def _ahead(self, thread: DecodeThread, lookahead: list[int]) -> _Lookahead:
        """The state of the thread after ``lookahead``."""
        last = thread.token_ids[-1] if thread.token_ids else None
        ahead = _Lookahead(thread.tag, len(thread.children), last)
        for count, token in enumerate(lookahead):
            tag, bound = ahead.tag, self._bound
            opens = self._opens(thread, token, ahead)
            if token == bound.opener and bound.has_tags and not self._refusal(thread, ahead):
                tag = OpenerTag(start=thread.num_tokens + count)
            elif tag is not None:
                tag = bound.extended(tag, token) if self._stays_open(tag, token) else None
            ahead = _Lookahead(tag, ahead.children + opens, token)
        return ahead

    def _opens(self, thread: DecodeThread, token: int, ahead: _Lookahead) -> bool:
        if token == self._bound.opener:
            return not self._bound.has_tags and self._refusal(thread, ahead) is None
        return ahead.tag is not None and self._completes(ahead.tag, token)

    def anomalies_of(self, thread: DecodeThread, token: int, role: Role) -> Iterator[str]:
        """The anomalies that arise if ``token``, whose effect is ``role``, is the thread's next token."""
        bound = self._bound
        if thread.tag is not None and role is not Role.OPEN and not self._stays_open(thread.tag, token):
            yield anomalies.OPENER_NOT_COMPLETED
        if token == bound.opener and (refusal := self._refusal(thread, self._ahead(thread, []))):
            yield refusal
        if token == bound.child_end and role is Role.TEXT:
            yield anomalies.CLOSE_OUTSIDE_CHILD
        if token == bound.join and role is Role.TEXT:
            yield anomalies.JOIN_WITHOUT_CHILDREN
        if token in bound.never_sampled:
            yield anomalies.FORCED_TOKEN_SAMPLED
        if role is Role.END and thread.parent is not None and bound.child_end is not None:
            yield anomalies.END_TOKEN_IN_CHILD
        if role in (Role.END, Role.CLOSE) and bound.join is not None and thread.unjoined:
            yield anomalies.END_WITHOUT_JOIN

    def _refusal(self, thread: DecodeThread, ahead: _Lookahead) -> str | None:
        """The anomaly that an opener would be as the next token; None if it is allowed."""
        if thread.depth >= self._bound.dialect.max_depth:
            return anomalies.OPENER_TOO_DEEP
        if ahead.children >= self._bound.dialect.max_children:
            return anomalies.TOO_MANY_CHILDREN
        return anomalies.OPENER_OUT_OF_PLACE if ahead.last in self._bound.no_opening_after else None

    def _completes(self, tag: OpenerTag, token: int) -> bool:
        return token not in self._breaks_tag and self._bound.end_of(self._bound.extended(tag, token)) is not None

    def _stays_open(self, tag: OpenerTag, token: int) -> bool:
        return token not in self._breaks_tag and self._bound.is_open(self._bound.extended(tag, token))
