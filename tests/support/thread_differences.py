"""Answers in decode threads, to compare them."""

from __future__ import annotations

from pipedec.threads import Sequence

Written = tuple[tuple[int, ...], int, int, int]  # thread path, index in the thread, token id, position


def written(sequence: Sequence) -> tuple[list[Written], str | None]:
    """The tokens of an answer in document order, up to the cut at ``max_tokens``, and why it has ended."""
    threads = sequence.threads
    tokens = [
        (threads[token.thread].path, token.ordinal, token.token_id, threads[token.thread].positions[token.ordinal])
        for token in sequence.document()
    ]
    return tokens, sequence.finished
