"""The answer in document order: a child's tokens come directly after the token that opened it.

So an answer reads root, first child, next sibling (APAR §2.3), and asynchronous text follows its promise (PASTA §3). Owns that
order, the truncation at ``max_tokens``, and the reorder buffer that streams the document. Knows no control tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

from pipedec.threads.thread import DecodeThread, State


class DocumentToken(NamedTuple):
    """One token of the document.

    Attributes:
        thread: number of its thread.
        token_id: its id.
        ordinal: its index in the thread.
        is_control: whether it is control rather than text; true of all tokens of a tag, also of one truncated by ``max_tokens``.
        tail: text after the end of a tag, within the tag's last token. It belongs to the answer's text.
    """

    thread: int
    token_id: int
    ordinal: int
    is_control: bool
    tail: str


def document(threads: list[DecodeThread], max_tokens: int) -> list[DocumentToken]:
    """The tokens generated so far in document order, at most ``max_tokens``."""
    ordered = enumerate(islice(_in_document_order(threads, threads[0]), max_tokens))
    return [_token(thread, index, max_tokens - count) for count, (thread, index) in ordered]


def _in_document_order(threads: list[DecodeThread], thread: DecodeThread) -> Iterator[tuple[DecodeThread, int]]:
    children = {threads[number].opened_at: threads[number] for number in thread.children}
    for index in range(thread.num_tokens):
        yield thread, index
        if index + 1 in children:
            yield from _in_document_order(threads, children[index + 1])


def _token(thread: DecodeThread, index: int, remaining: int) -> DocumentToken:
    """Token ``index`` of a thread.

    Args:
        remaining: number of tokens from this one on that fit into ``max_tokens``. A tag's tokens are consecutive in the
            document, so a token of a broken tag is text if the token that broke the tag is among them.
    """
    is_reverted = thread.reverted.get(index, index + remaining) < index + remaining
    is_control = thread.is_control[index] and not is_reverted
    return DocumentToken(thread.number, thread.token_ids[index], index, is_control, thread.tails.get(index, ""))


def next_indices(threads: list[DecodeThread]) -> list[int]:
    """For each thread, the smallest index that its next token can have in the document; tokens yet to come may precede it."""
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
    """Returns each token of an answer once, in document order, as soon as no other token can still precede it."""

    def __init__(self, threads: list[DecodeThread], max_tokens: int) -> None:
        self._threads = threads
        self._remaining = max_tokens
        self._stack = [0]  # the thread being read and its ancestors, outermost first
        self._taken = [0]  # number of tokens already returned of each thread on the stack
        self._visited: set[int] = set()

    def take(self) -> list[DocumentToken]:
        """The tokens that have become available since the last call."""
        taken = []
        while self._remaining and (token := self._next()) is not None:
            taken.append(token)
            self._remaining -= 1
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
                return _token(thread, index, self._remaining)
            elif thread.state is State.ENDED:
                self._stack.pop()
                self._taken.pop()
            else:
                return None
        return None

    def _child_at(self, thread: DecodeThread, index: int) -> int | None:
        opened = (number for number in thread.children if self._threads[number].opened_at == index)
        return next((number for number in opened if number not in self._visited), None)
