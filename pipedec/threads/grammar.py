"""What a token does in a thread, and which may not stand there: a function of the dialect and of the thread as it is.

``walked`` are always tokens that stand behind the thread's own without being accepted yet, and that do nothing but stand there.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum

from pipedec.threads import anomalies
from pipedec.threads.bound import BoundDialect, OpenerTag
from pipedec.threads.thread import DecodeThread


class Role(Enum):
    """What a token does to its thread."""

    TEXT = "text"
    OPEN = "open"
    CLOSE = "close"
    JOIN = "join"
    END = "end"


class Grammar:
    """A bound dialect and the tokens that end a thread of an answer."""

    def __init__(self, bound: BoundDialect, end_token_ids: frozenset[int]) -> None:
        self._bound = bound
        self._end_token_ids = end_token_ids
        self._breaks_tag = end_token_ids | {bound.opener, bound.child_end, bound.join}

    def is_control(self, token: int) -> bool:
        """Whether the token is none of the text wherever it stands."""
        return token in self._bound.control or token in self._end_token_ids

    def role(self, thread: DecodeThread, token: int, walked: list[int] | None = None) -> Role:
        """What ``token`` would do as the thread's next."""
        walked = walked or []
        if token in self._end_token_ids:
            return Role.END
        if token == self._bound.child_end and thread.parent is not None:
            return Role.CLOSE
        if token == self._bound.join and thread.unjoined:
            return Role.JOIN
        if token == self._bound.opener:
            return Role.TEXT if self._bound.has_tags or self._refusal(thread, walked) else Role.OPEN
        tag = self.tag_after(thread, walked)
        return Role.OPEN if tag is not None and self._completes(tag, token) else Role.TEXT

    def tag_after(self, thread: DecodeThread, walked: list[int]) -> OpenerTag | None:
        """The opener's tag that is not complete yet behind ``walked``."""
        tag = thread.tag
        for count, token in enumerate(walked):
            if token == self._bound.opener and self._bound.has_tags and not self._refusal(thread, walked[:count]):
                tag = OpenerTag(start=thread.num_tokens + count)
            elif tag is not None:
                tag = self._bound.extended(tag, token) if self._stays_open(tag, token) else None
        return tag

    def banned(self, thread: DecodeThread, walked: list[int]) -> frozenset[int]:
        """Tokens that may not be sampled next."""
        if self.tag_after(thread, walked) is not None or self._refusal(thread, walked) is not None:
            return self._bound.never_sampled | {self._bound.opener}
        return self._bound.never_sampled

    def banned_behind_opener(self, thread: DecodeThread, token: int) -> frozenset[int]:
        """Tokens that may not be sampled in ``thread`` right behind ``token``, with which it would open a child."""
        is_full = len(thread.children) + 1 >= self._bound.dialect.max_children
        may_open = not is_full and token not in self._bound.no_opening_after
        return self._bound.never_sampled if may_open else self._bound.never_sampled | {self._bound.opener}

    def oddities(self, thread: DecodeThread, token: int, role: Role) -> Iterator[str]:
        """The anomalies that ``token``, which does ``role``, is as the thread's next."""
        bound = self._bound
        if thread.tag is not None and role is not Role.OPEN and not self._stays_open(thread.tag, token):
            yield anomalies.OPENER_NOT_COMPLETED
        if token == bound.opener and (refusal := self._refusal(thread, [])):
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

    def _refusal(self, thread: DecodeThread, walked: list[int]) -> str | None:
        """The anomaly that an opener would be next; None where it may stand."""
        if thread.depth >= self._bound.dialect.max_depth:
            return anomalies.OPENER_TOO_DEEP
        if len(thread.children) >= self._bound.dialect.max_children:
            return anomalies.TOO_MANY_CHILDREN
        last = walked[-1:] or thread.token_ids[-1:]
        return anomalies.OPENER_OUT_OF_PLACE if last and last[0] in self._bound.no_opening_after else None

    def _completes(self, tag: OpenerTag, token: int) -> bool:
        return token not in self._breaks_tag and self._bound.end_of(self._bound.extended(tag, token)) is not None

    def _stays_open(self, tag: OpenerTag, token: int) -> bool:
        return token not in self._breaks_tag and self._bound.is_open(self._bound.extended(tag, token))
