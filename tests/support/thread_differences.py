"""The first difference between two answers in decode threads."""

from __future__ import annotations

from itertools import zip_longest

from pipedec.threads import Sequence


def first_thread_difference(expected: Sequence, found: Sequence) -> str | None:
    """Describe the first difference between two answers to a prompt in one line; None if they are equal.

    The first in document order: all tokens that a token sees precede it, so this difference does not follow from another one.
    Tokens after the cut at ``max_tokens`` are not compared.
    """
    for one, other in zip_longest(_placed_tokens(expected), _placed_tokens(found)):
        if one != other:
            return _describe_difference(one, other)
    if expected.finished != found.finished:
        return f"the answer's finish reason is {found.finished}, not {expected.finished}"
    return None


_PlacedToken = tuple[tuple[int, ...], int, int, int]  # thread path, index in the thread, token id, position


def _placed_tokens(sequence: Sequence) -> list[_PlacedToken]:
    """The tokens of an answer in document order."""
    threads = sequence.threads
    return [
        (threads[token.thread].path, token.ordinal, token.token_id, threads[token.thread].positions[token.ordinal])
        for token in sequence.document()
    ]


def _describe_difference(expected: _PlacedToken | None, found: _PlacedToken | None) -> str:
    """Describe the difference of two tokens, all tokens before them being equal.

    If the paths differ, the thread with the longer path continues in one answer and has ended in the other.
    """
    path, index, _, _ = max((placed for placed in (expected, found) if placed is not None), key=lambda placed: len(placed[0]))
    token, wanted = (placed[2] if placed is not None and placed[0] == path else None for placed in (found, expected))
    if expected is not None and found is not None and token == wanted:
        return f"thread {path}, token {index} ({token}): its position is {found[3]}, not {expected[3]}"
    return f"thread {path}, token {index} is {token}, not {wanted}"
