"""Dialects: the control tokens with which a model opens, closes and joins decode threads, described in a JSON file.

Owns the fields, their validation and the shipped files. Bound to a tokenizer, a dialect knows the ids of the control tokens and
parses opener tags. Knows no threads.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta

from pipedec.core.errors import UserError
from pipedec.validation import parse_json, read_text

DIALECTS = ("apar", "pasta", "parallel")
_MAX_DIGITS = 9  # that a stated length may have
_DIRECTORY = Path(__file__).parent / "dialects"
_Text = Annotated[str, Meta(min_length=1)]
_Count = Annotated[int, Meta(ge=1)]


@dataclass(frozen=True)
class Dialect:
    """How an answer marks the parts of it that are decoded in parallel.

    Limits apply to each thread, and so in any order of decoding alike. The effect of APAR's limit, 32 threads in an answer, would
    depend on which thread happens to open a child first.

    Attributes:
        name: name shown to users.
        opener: token that opens a child, or the first token of a tag that opens one.
        opener_end: text that ends the tag, e.g. ``/>``; the child opens at the token that completes it. If not given, the opener
            is a single token.
        opener_form: format of a tag after the opener in training data, with ``{topic}`` and ``{tokens}``.
        opener_tokens: parts of tags that are one token each if the tokenizer has them, and otherwise are spelled out.
        max_topic_words: maximum words of a topic in training data.
        max_opener_tokens: maximum tokens of a tag; one that is not complete by then is ordinary text.
        length_pattern: regular expression searched in the tag; its one group is the predicted length of the child.
        length_scale: tokens per unit of the predicted length.
        length_unit: in training data, the stated length is the child's, rounded up to a multiple of this; if not given, the
            annotator's.
        default_length: predicted tokens if the tag states no length or there is no pattern.
        max_length: maximum predicted tokens; larger predictions are clamped.
        child_start: forced first token of a child.
        child_end: token that closes a child; if not given, the end token does.
        join: token at which a thread waits for its children and then attends to them; if not given, threads never join.
        never_sampled: control tokens that are banned from sampling, besides ``child_start``.
        no_opening_after: tokens after which the opener is banned as the next token.
        markers: further control tokens, without effect on threads.
        after_opening: position of the parent's next token after an opener at position t: ``next`` is t + 1, ``predicted`` is
            t + 1 + the predicted length of the child.
        after_join: position of the join token: ``continue`` is the thread's next position, ``longest`` is the largest next
            position of the thread and those it joins, ``flat`` is the number of tokens that it attends to.
        max_depth: nesting depth of children; 1 if only the main thread may open them.
        max_children: maximum children of one thread.
        max_child_tokens: maximum tokens of one child, the forced token included; it is closed there.
        max_cached_tokens: maximum tokens of prompt and threads together in the KV cache; beyond it the answer ends.
        show_control: whether control tokens appear in the text that users read.
    """

    name: _Text
    opener: _Text
    child_start: _Text
    opener_end: _Text | None = None
    opener_form: _Text | None = None
    opener_tokens: tuple[_Text, ...] = ()
    max_topic_words: _Count = 3
    max_opener_tokens: _Count = 64
    length_pattern: _Text | None = None
    length_scale: _Count = 1
    length_unit: _Count | None = None
    default_length: _Count = 40
    max_length: _Count = 1000
    child_end: _Text | None = None
    join: _Text | None = None
    never_sampled: tuple[_Text, ...] = ()
    no_opening_after: tuple[_Text, ...] = ()
    markers: tuple[_Text, ...] = ()
    after_opening: Literal["next", "predicted"] = "next"
    after_join: Literal["continue", "longest", "flat"] = "continue"
    max_depth: _Count = 1
    max_children: _Count = 16
    max_child_tokens: Annotated[int, Meta(ge=2)] = 2048
    max_cached_tokens: _Count = 65536
    show_control: bool = False

    def __post_init__(self) -> None:
        roles = [text for text in (self.opener, self.child_start, self.child_end, self.join) if text is not None]
        if len(set(roles)) < len(roles):
            raise UserError("opener, child_start, child_end and join must be different tokens")
        if self.length_pattern is not None and self.opener_end is None:
            raise UserError("length_pattern needs opener_end, because only a tag can state a length")
        if self.length_pattern is not None and not _has_one_group(self.length_pattern):
            raise UserError("length_pattern must be a regular expression with one group, which matches the number of tokens")
        if self.opener_form is not None and not self._is_form(self.opener_form):
            raise UserError("opener_form must end with opener_end and hold nothing in braces but {topic} and {tokens}")
        if self.default_length > self.max_length:
            raise UserError(f"default_length must be at most max_length, which is {self.max_length}")

    def _is_form(self, form: str) -> bool:
        try:
            return self.opener_end is not None and form.format(topic="", tokens=0).endswith(self.opener_end)
        except (LookupError, ValueError, AttributeError):
            return False

    @property
    def control_tokens(self) -> tuple[str, ...]:
        """The distinct tokens that the tokenizer must have."""
        named = (self.opener, self.child_start, self.child_end, self.join)
        listed = (*self.never_sampled, *self.no_opening_after, *self.markers)
        return tuple(dict.fromkeys(text for text in (*named, *listed) if text is not None))

    def to_json(self) -> str:
        """The JSON text that is sent to other processes."""
        return json.dumps({name: value for name, value in asdict(self).items() if value is not None})

    @classmethod
    def from_json(cls, text: str) -> Dialect:
        """The inverse of ``to_json``. Raises UserError if the text does not describe a dialect."""
        return parse_json(cls, text, "the dialect")


def _has_one_group(pattern: str) -> bool:
    try:
        return re.compile(pattern).groups == 1
    except (re.error, OverflowError, RecursionError):
        return False


def load_dialect(name_or_path: str | Path) -> Dialect:
    """Load a shipped dialect by its name (see DIALECTS), or one from a JSON file. Raises UserError if there is no such dialect or
    file, or the file does not describe a dialect.
    """
    path = _DIRECTORY / f"{name_or_path}.json" if name_or_path in DIALECTS else Path(name_or_path)
    if path.suffix != ".json" and not path.exists():
        raise UserError(f"unknown dialect {str(name_or_path)!r}: give one of {', '.join(DIALECTS)}, or the path of a JSON file")
    return parse_json(Dialect, read_text(path), str(path))


@dataclass(frozen=True)
class OpenerTag:
    """An opener's tag that is not complete yet."""

    start: int  # index of its first token in the thread
    num_tokens: int = 1
    text: str = ""  # what the tokens after the opener spell


@dataclass(frozen=True)
class BoundDialect:
    """The ids of a dialect's control tokens. ``child_end`` and ``join`` are None if the dialect has no such token.

    Attributes:
        control: all control tokens, those of ``opener_tokens`` included.
        opener_tokens: ids of the dialect's ``opener_tokens`` that the tokenizer has, by text.
        never_sampled: control tokens that are banned from sampling.
        no_opening_after: tokens after which ``opener`` is banned as the next token.
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

    def stated_length(self, text: str) -> int | None:
        """The number of tokens that a complete tag states for its child; None if it states none."""
        found = re.search(self.dialect.length_pattern, text) if self.dialect.length_pattern else None
        if found is None:
            return None
        digits = found.group(1) or ""
        if len(digits) > _MAX_DIGITS:
            return 10**_MAX_DIGITS
        return int(digits) * self.dialect.length_scale if digits.isdecimal() else None


def bind(dialect: Dialect, token_of: Callable[[str], int | None], text_of: Callable[[int], str]) -> BoundDialect:
    """Look up the control tokens of a dialect in a tokenizer; ``token_of`` returns None for text that is not a token. Raises
    UserError if the tokenizer lacks a control token, or gives two of them the same id.
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
