"""A written answer, its children's tokens where a reader finds them, read back into threads: for training and for measuring."""

from __future__ import annotations

from collections.abc import Iterable

from pipedec.threads.events import Opened
from pipedec.threads.sequence import Sequence
from pipedec.threads.thread import State


def replay(sequence: Sequence, token_ids: Iterable[int]) -> None:
    """Give a fresh sequence an answer in document order, control and forced tokens included. It may stop anywhere.

    Raises:
        ValueError: no forced token stands behind an opener, or tokens stand behind the end of the answer.
    """
    writing = [0]
    tokens = iter(token_ids)
    for token in tokens:
        if not writing:
            if sequence.finished == "length":
                return
            raise ValueError("tokens stand behind the end of the answer")
        for event in sequence.accept(writing[-1], token):
            if isinstance(event, Opened):
                forced = next(tokens, event.token)
                if forced != event.token:
                    raise ValueError(f"token {forced} stands behind an opener, where the forced token {event.token} should")
                writing.append(event.child)
        while writing and sequence.threads[writing[-1]].state is State.ENDED:
            writing.pop()
