"""The effect of a token on its thread, and which tokens are banned next: functions of the dialect and the thread's state.

``lookahead`` is always a list of tokens that follow the thread's own but are not accepted yet: text and openers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from pipedec.threads.dialect import BoundDialect, OpenerTag
from pipedec.threads.thread import Anomaly, DecodeThread


class Role(Enum):
    """The effect of a token on its thread."""

    TEXT = "text"
    OPEN = "open"
    CLOSE = "close"
    JOIN = "join"
    END = "end"


@dataclass(frozen=True)
class Lookahead:
    """The state of a thread after a lookahead.

    Attributes:
        tag: its incomplete tag, if any.
        children: their number.
        last: the last token.
    """

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
        ahead = self.ahead(thread, lookahead or [])
        if token in self._end_token_ids:
            return Role.END
        if token == self._bound.child_end and thread.parent is not None:
            return Role.CLOSE
        if token == self._bound.join and (thread.unjoined or ahead.children > len(thread.children)):
            return Role.JOIN
        return Role.OPEN if self._opens(thread, token, ahead) else Role.TEXT

    def banned(self, thread: DecodeThread, lookahead: list[int]) -> frozenset[int]:
        """Tokens that may not be sampled after ``lookahead``."""
        ahead = self.ahead(thread, lookahead)
        if ahead.tag is not None or self._refusal(thread, ahead) is not None:
            return self._bound.never_sampled | {self._bound.opener}
        return self._bound.never_sampled

    def ahead(self, thread: DecodeThread, lookahead: list[int]) -> Lookahead:
        """The state of the thread after ``lookahead``."""
        last = thread.token_ids[-1] if thread.token_ids else None
        ahead = Lookahead(thread.tag, len(thread.children), last)
        for count, token in enumerate(lookahead):
            tag, bound = ahead.tag, self._bound
            opens = self._opens(thread, token, ahead)
            if token == bound.opener and bound.has_tags and not self._refusal(thread, ahead):
                tag = OpenerTag(start=thread.num_tokens + count)
            elif tag is not None:
                tag = bound.extended(tag, token) if self._stays_open(tag, token) else None
            ahead = Lookahead(tag, ahead.children + opens, token)
        return ahead

    def anomalies_of(self, thread: DecodeThread, token: int, role: Role) -> Iterator[Anomaly]:
        """The anomalies that arise if ``token``, whose effect is ``role``, is the thread's next token."""
        bound = self._bound
        if thread.tag is not None and role is not Role.OPEN and not self._stays_open(thread.tag, token):
            yield Anomaly.OPENER_NOT_COMPLETED
        if token == bound.opener and (refusal := self._refusal(thread, self.ahead(thread, []))):
            yield refusal
        if token == bound.child_end and role is Role.TEXT:
            yield Anomaly.CLOSE_OUTSIDE_CHILD
        if token == bound.join and role is Role.TEXT:
            yield Anomaly.JOIN_WITHOUT_CHILDREN
        if token in bound.never_sampled:
            yield Anomaly.FORCED_TOKEN_SAMPLED
        if role is Role.END and thread.parent is not None and bound.child_end is not None:
            yield Anomaly.END_TOKEN_IN_CHILD
        if role in (Role.END, Role.CLOSE) and bound.join is not None and thread.unjoined:
            yield Anomaly.END_WITHOUT_JOIN

    def _refusal(self, thread: DecodeThread, ahead: Lookahead) -> Anomaly | None:
        """The anomaly that an opener would be as the next token; None if it is allowed."""
        if len(thread.path) >= self._bound.dialect.max_depth:
            return Anomaly.OPENER_TOO_DEEP
        if ahead.children >= self._bound.dialect.max_children:
            return Anomaly.TOO_MANY_CHILDREN
        return Anomaly.OPENER_OUT_OF_PLACE if ahead.last in self._bound.no_opening_after else None

    def _opens(self, thread: DecodeThread, token: int, ahead: Lookahead) -> bool:
        if token == self._bound.opener:
            return not self._bound.has_tags and self._refusal(thread, ahead) is None
        if ahead.tag is None or token in self._breaks_tag:
            return False
        return self._bound.end_of(self._bound.extended(ahead.tag, token)) is not None

    def _stays_open(self, tag: OpenerTag, token: int) -> bool:
        """Whether the tag is not complete after ``token`` and further tokens may complete it."""
        if token in self._breaks_tag or tag.num_tokens + 1 >= self._bound.dialect.max_opener_tokens:
            return False
        return self._bound.end_of(self._bound.extended(tag, token)) is None
