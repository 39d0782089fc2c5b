"""Repetition in answers: small models may repeat themselves until the token limit."""

from __future__ import annotations

from pipedec.threads import Sequence

_REPEATED = 8
_TAIL = 96


def repeats(token_ids: list[int]) -> list[bool]:
    """For every token of a thread: whether it and the seven before it occurred before."""
    seen: set[tuple[int, ...]] = set()
    found = []
    for end in range(1, len(token_ids) + 1):
        part = tuple(token_ids[max(0, end - _REPEATED) : end])
        found.append(part in seen)
        if len(part) == _REPEATED:
            seen.add(part)
    return found


def in_circles(sequence: Sequence) -> bool:
    """Whether the answer ran to its token limit, and a thread had mostly repeated itself in its last 96 tokens."""
    if sequence.finished == "stop":
        return False
    tails = [repeats(thread.token_ids)[-_TAIL:] for thread in sequence.threads if thread.num_tokens >= _TAIL]
    return any(2 * sum(tail) > _TAIL for tail in tails)
