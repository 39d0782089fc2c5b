"""Reconstructs the threads of an answer from its tokens in document order, for training and for measuring."""

from __future__ import annotations

from collections.abc import Iterable

from pipedec.threads.events import ThreadOpened
from pipedec.threads.sequence import Sequence
from pipedec.threads.thread import State


def replay(sequence: Sequence, token_ids: Iterable[int]) -> None:
    """Pass an answer to a new sequence.

    Args:
        token_ids: tokens in document order, control and forced tokens included. The answer may be incomplete.

    Raises:
        ValueError: an opener is not followed by its forced token, or tokens follow the end of the answer.
    """
    open_threads = [0]  # the current thread and its ancestors, outermost first
    tokens = iter(token_ids)
    for token in tokens:
        if not open_threads:
            if sequence.finished == "length":
                return
            raise ValueError("tokens follow the end of the answer")
        for event in sequence.accept(open_threads[-1], token):
            if isinstance(event, ThreadOpened):
                forced = next(tokens, event.token)
                if forced != event.token:
                    raise ValueError(f"token {forced} follows an opener instead of the forced token {event.token}")
                open_threads.append(event.child)
        while open_threads and sequence.threads[open_threads[-1]].state is State.ENDED:
            open_threads.pop()
