"""A dialect in the tokens of one tokenizer.

Owns the ids of the control tokens, and how the tag of an opener is read. Knows no threads.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from pipedec.core import UserError
from pipedec.threads.dialect import Dialect

MAX_DIGITS = 9


@dataclass(frozen=True)
class OpenerTag:
    """An opener's tag that is not complete yet: where it began in its thread, how many tokens it has, its text so far."""

    start: int
    num_tokens: int = 1
    text: str = ""


@dataclass(frozen=True)
class BoundDialect:
    """The ids of a dialect's control tokens. ``child_end`` and ``join`` are None where the dialect has none.

    Attributes:
        control: ids of all control tokens.
        never_sampled: ids of those that are entered, never sampled.
        no_opening_after: ids right after which ``opener`` is banned.
        text_of: the text of one token.
    """

    dialect: Dialect
    opener: int
    child_start: int
    child_end: int | None
    join: int | None
    control: frozenset[int]
    never_sampled: frozenset[int]
    no_opening_after: frozenset[int]
    text_of: Callable[[int], str]

    @property
    def has_tags(self) -> bool:
        """Whether an opener is a whole tag, not one token."""
        return self.dialect.opener_end is not None

    def extended(self, tag: OpenerTag, token: int) -> OpenerTag:
        """The tag with one more token."""
        return OpenerTag(tag.start, tag.num_tokens + 1, tag.text + self.text_of(token))

    def may_open(self, token: int) -> bool:
        """Whether some opener might be complete with this token."""
        end = self.dialect.opener_end
        return token == self.opener if end is None else end[-1] in self.text_of(token)

    def end_of(self, tag: OpenerTag) -> int | None:
        """How much of the tag's text it needs to be complete; None if it is not."""
        assert self.dialect.opener_end is not None
        place = tag.text.find(self.dialect.opener_end)
        return None if place < 0 else place + len(self.dialect.opener_end)

    def is_open(self, tag: OpenerTag) -> bool:
        """Whether the tag may still be completed."""
        return self.end_of(tag) is None and tag.num_tokens < self.dialect.max_opener_tokens

    def stated_length(self, text: str) -> int | None:
        """The number of tokens that a complete tag states for its child; None if it states none."""
        found = re.search(self.dialect.length_pattern, text) if self.dialect.length_pattern else None
        if found is None:
            return None
        digits = found.group(1) or ""
        if len(digits) > MAX_DIGITS:
            return 10**MAX_DIGITS
        return int(digits) * self.dialect.length_scale if digits.isdecimal() else None


def bind(dialect: Dialect, token_of: Callable[[str], int | None], text_of: Callable[[int], str]) -> BoundDialect:
    """The dialect in a tokenizer's ids.

    Args:
        token_of: the id of a token by its text; None if the vocabulary lacks it.
        text_of: the text of a token by its id.

    Raises:
        UserError: the tokenizer lacks a control token, or has one id for two of them.
    """
    ids: dict[str, int] = {}
    for text in dialect.control_tokens:
        token = token_of(text)
        if token is None:
            raise UserError(
                f"the tokenizer has no token {text!r}, which dialect {dialect.name} needs: "
                f"give a model trained for it, or a dialect file with the model's own names"
            )
        ids[text] = token
    if len(set(ids.values())) < len(ids):
        raise UserError(f"the tokenizer has one id for two of dialect {dialect.name}'s tokens: {', '.join(ids)}")
    return BoundDialect(
        dialect,
        opener=ids[dialect.opener],
        child_start=ids[dialect.child_start],
        child_end=None if dialect.child_end is None else ids[dialect.child_end],
        join=None if dialect.join is None else ids[dialect.join],
        control=frozenset(ids.values()),
        never_sampled=frozenset(ids[text] for text in (dialect.child_start, *dialect.never_sampled)),
        no_opening_after=frozenset(ids[text] for text in dialect.no_opening_after),
        text_of=text_of,
    )
