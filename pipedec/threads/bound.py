"""A dialect bound to a tokenizer.

Owns the ids of the control tokens and the parsing of opener tags. Knows no threads.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from pipedec.core import UserError
from pipedec.threads.dialect import Dialect

MAX_DIGITS = 9


@dataclass(frozen=True)
class OpenerTag:
    """An opener's tag that is not complete yet.

    Attributes:
        start: index of its first token in the thread.
        num_tokens: number of tokens so far.
        text: their text, without that of the opener itself.
    """

    start: int
    num_tokens: int = 1
    text: str = ""


@dataclass(frozen=True)
class BoundDialect:
    """The ids of a dialect's control tokens. ``child_end`` and ``join`` are None if the dialect has no such token.

    Attributes:
        control: all control tokens, those of ``opener_tokens`` included.
        opener_tokens: ids of the dialect's ``opener_tokens`` that the tokenizer has, by text.
        never_sampled: control tokens that are banned from sampling.
        no_opening_after: tokens directly after which ``opener`` is banned.
        text_of: the text of a token id.
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
    opener_tokens: Mapping[str, int] = field(default_factory=dict)

    @property
    def has_tags(self) -> bool:
        """Whether an opener is a tag of several tokens rather than a single token."""
        return self.dialect.opener_end is not None

    def extended(self, tag: OpenerTag, token: int) -> OpenerTag:
        """The tag with one more token."""
        return OpenerTag(tag.start, tag.num_tokens + 1, tag.text + self.text_of(token))

    def may_open(self, token: int) -> bool:
        """Whether this token might complete an opener."""
        end = self.dialect.opener_end
        return token == self.opener if end is None else end[-1] in self.text_of(token)

    def end_of(self, tag: OpenerTag) -> int | None:
        """Index in the tag's text just after ``opener_end``; None if the tag is not complete."""
        assert self.dialect.opener_end is not None
        found = tag.text.find(self.dialect.opener_end)
        return None if found < 0 else found + len(self.dialect.opener_end)

    def is_open(self, tag: OpenerTag) -> bool:
        """Whether the tag is not complete yet and further tokens may complete it."""
        return self.end_of(tag) is None and tag.num_tokens < self.dialect.max_opener_tokens

    def stated_length(self, text: str) -> int | None:
        """The length in tokens that a complete tag states for its child; None if it states none."""
        found = re.search(self.dialect.length_pattern, text) if self.dialect.length_pattern else None
        if found is None:
            return None
        digits = found.group(1) or ""
        if len(digits) > MAX_DIGITS:
            return 10**MAX_DIGITS
        return int(digits) * self.dialect.length_scale if digits.isdecimal() else None


_NEVER = -(2**62)  # no vocabulary has this token
_UNLIMITED = 2**62

# Of an answer in one thread: nothing opens another one, and every token is text.
NO_DIALECT = BoundDialect(
    Dialect(name="none", opener="none", child_start="never", max_cached_tokens=_UNLIMITED, show_control=True),
    opener=_NEVER,
    child_start=_NEVER,
    child_end=None,
    join=None,
    control=frozenset(),
    never_sampled=frozenset(),
    no_opening_after=frozenset(),
    text_of=str,
)


def bind(dialect: Dialect, token_of: Callable[[str], int | None], text_of: Callable[[int], str]) -> BoundDialect:
    """Look up the control tokens of a dialect in a tokenizer.

    Args:
        token_of: token text to id; None if the vocabulary lacks it.
        text_of: token id to text.

    Raises:
        UserError: the tokenizer lacks a control token, or gives two of them the same id.
    """
    ids: dict[str, int] = {}
    for text in dialect.control_tokens:
        token = token_of(text)
        if token is None:
            raise UserError(
                f"the tokenizer has no token {text!r}, which dialect {dialect.name} needs: "
                f"use a model trained for this dialect, or a dialect file with the control tokens of your model"
            )
        ids[text] = token
    if len(set(ids.values())) < len(ids):
        raise UserError(f"the tokenizer gives two control tokens of dialect {dialect.name} the same id: {', '.join(ids)}")
    opener_tokens = {text: token for text in dialect.opener_tokens if (token := token_of(text)) is not None}
    return BoundDialect(
        dialect,
        opener=ids[dialect.opener],
        child_start=ids[dialect.child_start],
        child_end=None if dialect.child_end is None else ids[dialect.child_end],
        join=None if dialect.join is None else ids[dialect.join],
        control=frozenset((*ids.values(), *opener_tokens.values())),
        never_sampled=frozenset(ids[text] for text in (dialect.child_start, *dialect.never_sampled)),
        no_opening_after=frozenset(ids[text] for text in dialect.no_opening_after),
        text_of=text_of,
        opener_tokens=opener_tokens,
    )
