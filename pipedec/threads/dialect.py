"""Dialects: with which control tokens a model opens, closes and joins threads, as data in a JSON file.

Owns the fields, their checks and the shipped files. Knows no token ids: those come from a tokenizer (see ``bound``).
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Ge, MinLen

from pipedec.config import load_json, parse_json
from pipedec.core import UserError

DIALECTS = ("apar", "pasta", "parallel")
_DIRECTORY = Path(__file__).parent / "dialects"
_Text = Annotated[str, MinLen(1)]
_Count = Annotated[int, Ge(1)]


@dataclass(frozen=True)
class Dialect:
    """How an answer says which parts of it are decoded side by side.

    The caps hold for one thread each. A cap on all threads of an answer (APAR's 32) would depend on which thread opens a child
    first in time; depth and children of one thread bound the same number, and every order of decoding meets them alike.

    Attributes:
        name: what users call it.
        opener: the token that opens a child, or with which a tag begins that does.
        opener_end: what completes the tag, e.g. ``/>``: the child opens at the token whose text completes it. Without it, the
            opener alone opens.
        max_opener_tokens: a tag that is not complete within so many tokens is text.
        length_pattern: regular expression with one group, the predicted number of the child's tokens; searched in the tag.
        length_scale: what the number is multiplied by.
        default_length: the prediction if the tag has none, or there is no pattern.
        max_length: larger predictions are taken for this.
        child_start: the forced first token of a child.
        child_end: the token that closes a child; without it the end token does.
        join: the token that waits for the thread's children; without it no thread ever sees another's.
        never_sampled: control tokens that are never sampled, besides ``child_start``.
        no_opening_after: tokens right after which the opener is banned.
        markers: further control tokens, which do nothing.
        after_opening: where the parent goes on if the opener ended at position t: ``next`` at t + 1, ``predicted`` at t + 1 +
            the predicted length.
        after_join: the position of the join token: ``continue`` where the thread was, ``longest`` behind the farthest of the
            thread and those it joins, ``flat`` as if all it sees stood in one sequence.
        max_depth: 1 if only the main thread opens children, 2 if they do, too, and so on.
        max_children: of one thread.
        max_child_tokens: of one child, its forced token included; it is closed there.
        max_cached_tokens: of the prompt and all threads together that have to be kept at one time; beyond, the answer ends.
        show_control: readers see control tokens.
    """

    name: _Text
    opener: _Text
    child_start: _Text
    opener_end: _Text | None = None
    max_opener_tokens: _Count = 64
    length_pattern: _Text | None = None
    length_scale: _Count = 1
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
    max_child_tokens: Annotated[int, Ge(2)] = 2048
    max_cached_tokens: _Count = 65536
    show_control: bool = False

    def __post_init__(self) -> None:
        roles = [text for text in (self.opener, self.child_start, self.child_end, self.join) if text is not None]
        if len(set(roles)) < len(roles):
            raise UserError("opener, child_start, child_end and join must be different tokens")
        if self.length_pattern is not None and self.opener_end is None:
            raise UserError("length_pattern needs opener_end: a length can only stand in a tag")
        if self.length_pattern is not None and not _has_one_group(self.length_pattern):
            raise UserError("length_pattern must be a regular expression with one group, the number")
        if self.default_length > self.max_length:
            raise UserError(f"default_length must be at most max_length, which is {self.max_length}")

    @property
    def control_tokens(self) -> tuple[str, ...]:
        """Every token that the tokenizer must have, each once."""
        named = (self.opener, self.child_start, self.child_end, self.join)
        listed = (*self.never_sampled, *self.no_opening_after, *self.markers)
        return tuple(dict.fromkeys(text for text in (*named, *listed) if text is not None))

    def to_json(self) -> str:
        """As it goes to other processes."""
        return json.dumps({name: value for name, value in asdict(self).items() if value is not None})

    @classmethod
    def from_json(cls, text: str) -> Dialect:
        """Raises UserError if the text describes no dialect."""
        return parse_json(cls, text, "the dialect")


def _has_one_group(pattern: str) -> bool:
    try:
        return re.compile(pattern).groups == 1
    except (re.error, OverflowError, RecursionError):
        return False


def load_dialect(name_or_path: str | Path) -> Dialect:
    """A shipped dialect by its name (of DIALECTS), or one of your own by the path of its file.

    Raises:
        UserError: no such dialect, or the file is not one.
    """
    if name_or_path in DIALECTS:
        return load_json(Dialect, _DIRECTORY / f"{name_or_path}.json")
    path = Path(name_or_path)
    if path.suffix != ".json" and not path.exists():
        raise UserError(f"unknown dialect {str(name_or_path)!r}: give one of {', '.join(DIALECTS)}, or the path of a JSON file")
    return load_json(Dialect, path)
