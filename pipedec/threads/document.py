"""The answer in document order: a child's tokens stand right behind the token that opened it.

So an answer reads root, first child, next sibling (APAR §2.3), and a body behind its promise (PASTA §3). Owns that order, the
cut at ``max_tokens``, and the reorder buffer for readers. Knows no control tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

from pipedec.threads.thread import DecodeThread, State


class DocumentToken(NamedTuple):
    """Token ``ordinal`` of ``thread``.

    ``is_control`` holds for a whole tag, and for one that the cut divides. ``tail`` is text behind the end of a tag in its last
    token: readers see it even so.
    """

    thread: int
    token_id: int
    ordinal: int
    is_control: bool
    tail: str


def document(threads: list[DecodeThread], max_tokens: int) -> list[DocumentToken]:
    """The first ``max_tokens`` of all tokens that are known."""
    written = enumerate(islice(_written(threads, threads[0]), max_tokens))
    return [_token(thread, index, max_tokens - place) for place, (thread, index) in written]


def _written(threads: list[DecodeThread], thread: DecodeThread) -> Iterator[tuple[DecodeThread, int]]:
    children = {threads[number].opened_at: threads[number] for number in thread.children}
    for index in range(thread.num_tokens):
        yield thread, index
        if index + 1 in children:
            yield from _written(threads, children[index + 1])


def _token(thread: DecodeThread, index: int, left: int) -> DocumentToken:
    """A token of which ``left`` tokens, itself the first of them, stand before the cut. Nothing is opened inside a tag."""
    is_reverted = thread.reverted.get(index, index + left) < index + left
    is_control = thread.is_control[index] and not is_reverted
    return DocumentToken(thread.number, thread.token_ids[index], index, is_control, thread.tails.get(index, ""))


def next_indices(threads: list[DecodeThread]) -> list[int]:
    """For each thread, where in the document its next token stands, at the earliest: more may still come before it."""
    sizes = [thread.num_tokens for thread in threads]
    for thread in reversed(threads[1:]):  # children have larger numbers than their parents
        assert thread.parent is not None
        sizes[thread.parent] += sizes[thread.number]
    starts = [0] * len(threads)
    for thread in threads:
        earlier = 0
        for number in thread.children:
            starts[number] = starts[thread.number] + threads[number].opened_at + earlier
            earlier += sizes[number]
    return [start + size for start, size in zip(starts, sizes, strict=True)]


class ReorderBuffer:
    """Hands out each token of an answer once, in document order, as soon as nothing can come before it any more."""

    def __init__(self, threads: list[DecodeThread], max_tokens: int) -> None:
        self._threads = threads
        self._left = max_tokens
        self._stack = [0]  # threads whose text is being handed out, the innermost last
        self._taken = [0]  # how many tokens of each
        self._visited: set[int] = set()

    def take(self) -> list[DocumentToken]:
        """The tokens that have become certain since the last call."""
        taken = []
        while self._left and (token := self._next()) is not None:
            taken.append(token)
            self._left -= 1
        return taken

    def _next(self) -> DocumentToken | None:
        while self._stack:
            thread, index = self._threads[self._stack[-1]], self._taken[-1]
            child = self._child_at(thread, index)
            if child is not None:
                self._visited.add(child)
                self._stack.append(child)
                self._taken.append(0)
            elif index < (thread.tag.start if thread.tag else thread.num_tokens):
                self._taken[-1] += 1
                return _token(thread, index, self._left)
            elif thread.state is State.ENDED:
                self._stack.pop()
                self._taken.pop()
            else:
                return None
        return None

    def _child_at(self, thread: DecodeThread, index: int) -> int | None:
        opened = (number for number in thread.children if self._threads[number].opened_at == index)
        return next((number for number in opened if number not in self._visited), None)
