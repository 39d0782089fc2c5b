"""A reader that writes an answer in document order, one token after another, with sets instead of threads and states.

A child is written where it is opened, from its first token to its last, so everything that a token sees is written before it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count

from pipedec.threads import BoundDialect
from support.toy_dialects import END, TEXTS

Path = tuple[int, ...]
Model = Callable[[Path, int], int]


@dataclass
class NaiveToken:
    path: Path
    token: int
    position: int
    seen: set[int]
    step: int
    before: set[int] | None  # what the token before it in its thread sees; None if nothing is predicted here
    is_control: bool


class Cut(Exception):
    """The document is full."""


@dataclass
class NaiveAnswer:
    """The tokens that ``model`` says: its i-th in the thread ``path``, forced ones not counted."""

    bound: BoundDialect
    model: Model
    prompt_length: int
    max_tokens: int
    tokens: list[NaiveToken] = field(default_factory=list)

    def write(self) -> NaiveAnswer:
        with suppress(Cut):
            self._thread((), set(), self.prompt_length, 0)
        return self

    def _thread(self, path: Path, inherited: set[int], position: int, step: int) -> tuple[set[int], int, int]:
        """Writes a thread and all below it; returns their places, the position behind the farthest, the last step."""
        dialect, bound = self.bound.dialect, self.bound
        sees, own = set(inherited), list[int]()
        family, unjoined = set[int](), set[int]()
        farthest, reach, latest, children = 0, 0, 0, 0
        tag: int | None = None

        def put(token: int, is_forced: bool = False) -> int:
            nonlocal position, step
            if len(self.tokens) == self.max_tokens:
                raise Cut
            before = None if is_forced else sees | set(own)
            step += not is_forced
            place = len(self.tokens)
            own.append(place)
            family.add(place)
            is_control = token in bound.control or token == END or tag is not None
            self.tokens.append(NaiveToken(path, token, position, sees | set(own), step, before, is_control))
            position += 1
            return token

        def free() -> None:
            """What stands in a tag that is none is text."""
            for place in own[tag:] if tag is not None else []:
                self.tokens[place].is_control = self.tokens[place].token in (*bound.control, END)

        if path:
            put(bound.child_start, is_forced=True)
        for index in count():
            if path and len(own) >= dialect.max_child_tokens:
                free()
                break
            last = self.tokens[own[-1]].token if own else None
            may_open = len(path) < dialect.max_depth and children < dialect.max_children and last not in bound.no_opening_after
            token = self.model(path, index)
            if token == END or (path and token == bound.child_end):
                put(token)
                free()
                break
            if token == bound.join and unjoined:
                sees |= unjoined
                position = {
                    "continue": position,
                    "longest": max(position, farthest),
                    "flat": self.prompt_length + len(sees) + len(own),
                }[dialect.after_join]
                step = max(step, latest - 1)
                put(token)
                free()
                unjoined, farthest, latest, tag = set(), 0, 0, None
                continue
            put(token)
            opens = False
            if token == bound.opener:
                opens = may_open and dialect.opener_end is None
                free()
                tag = len(own) - 1 if may_open and dialect.opener_end is not None else None
            elif tag is not None and token in (bound.join, bound.child_end):
                free()
                tag = None
            elif tag is not None:
                text = "".join(TEXTS[self.tokens[place].token] for place in own[tag + 1 :])
                opens = dialect.opener_end is not None and dialect.opener_end in text
                if not opens and len(own) - tag >= dialect.max_opener_tokens:
                    free()
                    tag = None
            if opens:
                body, end, body_step = self._thread((*path, children), sees | set(own), position, step)
                children += 1
                family |= body
                unjoined |= body
                farthest, reach, latest = max(farthest, end), max(reach, end), max(latest, body_step)
                position += self._offset(own[tag:] if tag is not None else [])
                tag = None
        every = [step, latest, *(self.tokens[place].step for place in family)]
        return family, max(position, reach), max(every)

    def _offset(self, tag: list[int]) -> int:
        dialect = self.bound.dialect
        if dialect.after_opening == "next":
            return 0
        text = "".join(TEXTS[self.tokens[place].token] for place in tag[1:])
        found = re.search(dialect.length_pattern, text.partition("/>")[0]) if dialect.length_pattern else None
        return min(max(int(found.group(1)), 1), dialect.max_length) if found else dialect.default_length

    def most_cached(self) -> int:
        """Answer tokens known before a step and seen by one predicted in it or later, at the worst step."""
        last = {place: 0 for place in range(len(self.tokens))}
        for place, token in enumerate(self.tokens):
            for seen in token.seen - {place}:
                last[seen] = max(last[seen], token.step)
        longest = max((token.step for token in self.tokens), default=0)
        counts = [sum(self.tokens[x].step < step <= last[x] for x in last) for step in range(longest + 1)]
        return max(counts, default=0)
