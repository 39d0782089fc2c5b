"""Answers that think first: the thought, with a budget of tokens, and what stands between it and the structure.

Owns the marks around a thought and the sets of tokens inside it. In a thought nothing is parsed, and all places with the same
possibilities share one set. (llguidance has budgets, too, but no rollback with them.) Knows no tokenizer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import IntEnum, auto
from functools import lru_cache
from typing import NamedTuple

from llguidance import LLMatcher

from pipedec.core.sampling import ThoughtForm
from pipedec.grammar.grammar import MAX_FORCED, MAX_STATES, NOTHING, STRAYED, Bitmask, Grammar, impossible
from pipedec.text.stream import num_begun

MAX_NEWLINES = 2  # between a thought and the structure
_MAX_KEPT = 64  # sets of tokens
_MAX_STEPS = 4096  # that are kept: those of a tree's paths are asked for again and again


class Phase(IntEnum):
    OPENING = auto()  # in the mark that opens the thought; if it is optional, the structure may have begun instead
    THINKING = auto()
    CLOSING = auto()  # in the forced tokens between the thought and the structure
    BEFORE = auto()  # the structure, or a newline before it
    STRUCTURE = auto()
    NOWHERE = auto()  # after a token that is not allowed


class Place(NamedTuple):
    """A place in an answer. ``at`` counts tokens of the mark, of the thought (if it has a budget) or of the chain that closes it,
    or newlines. ``begun``: with so many bytes of the end mark the thought ends here.
    """

    phase: Phase
    at: int = 0
    begun: int = 0


NOWHERE = Place(Phase.NOWHERE)


class MarkedText:
    """The tokens of a vocabulary in text with marks.

    Args:
        bytes_of: the text of each token that is text.
        marks: ids of tokens by their names, which are read as these tokens.
        encode: returns the tokens of a text without such names.
    """

    def __init__(self, bytes_of: Mapping[int, bytes], marks: Mapping[str, int], encode: Callable[[str], Sequence[int]]) -> None:
        self.bytes_of = bytes_of
        self.marks = marks
        self.encode = encode
        self.newlines = {token: len(text) for token, text in bytes_of.items() if not text.strip(b"\n")}  # and of nothing else
        self._all = Bitmask.of(*bytes_of)
        self._containing = lru_cache(maxsize=_MAX_KEPT)(self._tokens_containing)
        self.up_to = lru_cache(maxsize=_MAX_KEPT)(self._up_to)

    def chain(self, text: str) -> tuple[int, ...]:
        """The tokens of a text with its marks."""
        names = sorted(self.marks, key=len, reverse=True)
        parts = re.split(f"({'|'.join(map(re.escape, names))})", text) if names else [text]
        return tuple(token for part in parts if part for token in self._tokens_of(part))

    def _tokens_of(self, part: str) -> Sequence[int]:
        return [self.marks[part]] if part in self.marks else self.encode(part)

    def _tokens_containing(self, byte: bytes) -> list[int]:
        return [token for token, text in self.bytes_of.items() if byte in text]

    def _up_to(self, mark: bytes, begun: int, max_newlines: int) -> Bitmask:
        """The tokens of text that may follow the first ``begun`` bytes of a mark. A token that completes the mark may go on with
        ``max_newlines`` newlines, but with nothing else; at −1 no token may complete it.
        """
        candidates = [(token, mark[:begun] + self.bytes_of[token]) for token in self._containing(mark[-1:])]
        rests = ((token, text.partition(mark)[2]) for token, text in candidates if mark in text)
        return self._all - Bitmask.of(*(token for token, rest in rests if rest.strip(b"\n") or len(rest) > max_newlines))


class Thought:
    """Places of a thought, and which tokens lead from one to the next. All methods are pure functions."""

    def __init__(self, form: ThoughtForm, text: MarkedText) -> None:
        self.form = form
        self._text = text
        self._end = form.end.encode()
        self._begin_ids, self._end_ids, self._before_ids = map(text.chain, (form.begin, form.end, form.before))
        self._end_token = next((token for token in self._end_ids if token in text.marks.values()), None)  # None: text ends it
        self._inside = lru_cache(maxsize=None)(self._allowed_inside)
        self._closing = lru_cache(maxsize=None)(self._chain_after)
        self.after = lru_cache(maxsize=_MAX_STEPS)(self._after)

    @property
    def start(self) -> Place:
        return Place(Phase.THINKING if self.form.is_open else Phase.OPENING)

    def has_structure(self, place: Place) -> bool:
        """Whether the structure may go on here, as far as the thought allows it."""
        return place.phase in (Phase.BEFORE, Phase.STRUCTURE) or (place.phase is Phase.OPENING and self.form.is_optional)

    def opened(self, place: Place) -> tuple[int, ...]:
        """The tokens of an opening mark that is not complete: they may also belong to the structure."""
        return self._begin_ids[: place.at] if place.phase is Phase.OPENING else ()

    def allowed(self, place: Place) -> Bitmask:
        """The tokens that may follow and do not belong to the structure."""
        if forced := self.forced(place):
            return Bitmask.of(forced[0])
        if place.phase is Phase.OPENING:
            return Bitmask.of(self._begin_ids[place.at])
        if place.phase is Phase.THINKING:
            return self._inside(place.begun)
        if place.phase is Phase.BEFORE:
            return Bitmask.of(*(token for token, count in self._text.newlines.items() if place.at + count <= MAX_NEWLINES))
        return NOTHING

    def forced(self, place: Place) -> tuple[int, ...]:
        """The tokens that must follow, up to the structure; empty if there is a choice."""
        if place.phase is Phase.OPENING and not self.form.is_optional:
            return self._begin_ids[place.at :]
        if place.phase is Phase.CLOSING:
            return self._closing(place.begun)[place.at :]
        is_over = place.phase is Phase.THINKING and place.at == self.form.max_tokens
        return self._closing(place.begun) if is_over else ()

    def rest_of_mark(self, place: Place) -> tuple[int, ...]:
        return self._begin_ids[place.at :]

    def _after(self, place: Place, token: int) -> Place:
        """The place after a token. Before the structure, a newline is assumed to be none of it."""
        if forced := self.forced(place):
            return self._forward(place) if token == forced[0] else NOWHERE
        if place.phase is Phase.OPENING:
            return self._forward(place) if token == self._begin_ids[place.at] else Place(Phase.STRUCTURE)
        if place.phase is Phase.THINKING:
            return self._after_thinking(place, token)
        if place.phase is Phase.BEFORE:
            at = place.at + self._text.newlines.get(token, MAX_NEWLINES + 1)
            return Place(Phase.BEFORE, at) if at <= MAX_NEWLINES else Place(Phase.STRUCTURE)
        return place

    def _forward(self, place: Place) -> Place:
        """The place after the next token of a mark or chain."""
        if place.phase is Phase.OPENING:
            is_open = place.at + 1 == len(self._begin_ids)
            return Place(Phase.THINKING) if is_open else Place(Phase.OPENING, place.at + 1)
        return self._closed(place.begun, 1 if place.phase is Phase.THINKING else place.at + 1)

    def _closed(self, begun: int, at: int) -> Place:
        """The place after ``at`` tokens of the chain that closes a thought."""
        if at < len(self._closing(begun)):
            return Place(Phase.CLOSING, at, begun)
        return Place(Phase.BEFORE, MAX_NEWLINES if self.form.before else 0)

    def _after_thinking(self, place: Place, token: int) -> Place:
        if token == self._end_token:
            return self._closed(0, self._end_ids.index(token) + 1)
        if token not in self._inside(place.begun):
            return NOWHERE
        text = self._end[: place.begun] + self._text.bytes_of[token]
        _, mark, newlines = text.partition(self._end)
        if not mark:
            return Place(Phase.THINKING, place.at + (self.form.max_tokens is not None), num_begun(text, [self._end]))
        return Place(Phase.BEFORE, len(newlines)) if newlines else self._closed(0, len(self._end_ids))

    def _allowed_inside(self, begun: int) -> Bitmask:
        if self._end_token is not None:
            return self._text.up_to(self._end, begun, -1) | Bitmask.of(self._end_token)
        return self._text.up_to(self._end, begun, 0 if self.form.before else MAX_NEWLINES)

    def _chain_after(self, begun: int) -> tuple[int, ...]:
        """The tokens that close a thought: of the end mark, if it is text, those that are left after ``begun`` bytes."""
        if self._end_token is not None or not begun:
            return (*self._end_ids, *self._before_ids)
        try:
            return (*self._text.encode(self._end[begun:].decode()), *self._before_ids)
        except UnicodeDecodeError:  # in the middle of a character
            return (*self._end_ids, *self._before_ids)


class ThinkingGrammar(Grammar):
    """The grammar of an answer that begins with a thought. Its base class has that of the structure, and sees no other tokens.

    Args:
        new_thought: makes the thought when it is first needed. May raise UserError, from ``allowed`` and ``forced``.
    """

    def __init__(
        self,
        new_thought: Callable[[], Thought],
        new_matcher: Callable[[], LLMatcher],
        end_token_ids: tuple[int, ...],
        max_states: int = MAX_STATES,
    ) -> None:
        super().__init__(new_matcher, end_token_ids, max_states)
        self._new_thought = new_thought
        self._thought: Thought | None = None  # None until it is asked for
        self._place = NOWHERE
        self._unread: list[int] = []  # accepted tokens after the place

    def consume(self, token_ids: Iterable[int]) -> None:
        self._unread.extend(token_ids)
        if self._thought is not None:
            self._read()
            if self._place.phase is Phase.NOWHERE:
                raise impossible(STRAYED)

    @property
    def is_possible(self) -> bool:
        self._read()
        return self._place.phase is not Phase.NOWHERE and (self._place.phase is not Phase.STRUCTURE or super().is_possible)

    def allowed(self, path: Sequence[int] = ()) -> Bitmask:
        thought, place, said = self._walked(path)
        own = thought.allowed(place)
        return own | super().allowed(said) if thought.has_structure(place) else own

    def forced(self, path: Sequence[int] = (), most: int = MAX_FORCED) -> tuple[int, ...]:
        chain: list[int] = []
        while len(chain) < most and (following := self._forced([*path, *chain], most - len(chain))):
            chain += following
        return tuple(chain)

    def _forced(self, path: Sequence[int], most: int) -> tuple[int, ...]:
        """The tokens forced after ``path``, up to the end of the thought or of its marks."""
        thought, place, said = self._walked(path)
        if forced := thought.forced(place):
            return forced[:most]
        if not thought.has_structure(place):
            return ()
        if not thought.allowed(place):
            return super().forced(said, most)
        is_opening = place.phase is Phase.OPENING and not super().allowed(said)
        return thought.rest_of_mark(place)[:most] if is_opening else ()

    def _walked(self, path: Sequence[int]) -> tuple[Thought, Place, Sequence[int]]:
        """The place after the accepted tokens and ``path``, and the path as the structure sees it. Raises UserError if nothing
        follows the accepted tokens.
        """
        thought = self._read()
        if self._place.phase is Phase.NOWHERE:
            raise impossible(STRAYED)
        return thought, *self._moved_along(thought, path)

    def _read(self) -> Thought:
        """The thought, after the place has moved past all accepted tokens."""
        if self._thought is None:
            self._thought = self._new_thought()
            self._place = self._thought.start
        unread, self._unread = self._unread, []
        self._place, said = self._moved_along(self._thought, unread)
        if self._place.phase is Phase.STRUCTURE:
            super().consume(said)
        return self._thought

    def _moved_along(self, thought: Thought, token_ids: Sequence[int]) -> tuple[Place, Sequence[int]]:
        """The place after these tokens, and those of them that are, or may be, the structure's."""
        place = self._place
        for index, token in enumerate(token_ids):
            if place.phase is Phase.STRUCTURE:
                return place, token_ids[index:]
            following = thought.after(place, token)
            if following.phase is Phase.BEFORE and place.phase is Phase.BEFORE and token in super().allowed():
                following = Place(Phase.STRUCTURE)
            if following.phase is Phase.STRUCTURE:
                return following, [*thought.opened(place), *token_ids[index:]]
            place = following
        return place, thought.opened(place)
