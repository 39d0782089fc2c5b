"""A vocabulary small enough to write answers by hand, and the shipped dialects in its ids."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from pipedec.threads import BoundDialect, DecodeThread, Sequence, State, ThreadedSequence, bind, load_dialect, replay

CONTROL = (
    "<|end|>", "[Fork]", "[Child]", "<promise", "<async>", "</async>", "<sync/>", "<Parallel>", "</Parallel>", "<Path>",
    "</Path>", "<Conclusion>", "</Conclusion>",
)  # fmt: skip
TAGS = (' topic="', "rolls", '"', ' tokens="', "1", "2", "20", "0", "99999999999", '"/>', '"/>!', "/", ">")
WORDS = tuple("abcdefghijklmnopqrstuvwxyz")
TEXTS = (*CONTROL, *TAGS, *WORDS)
IDS = {text: token for token, text in enumerate(TEXTS)}
END = IDS["<|end|>"]


def toy(name: str, **changes: Any) -> BoundDialect:
    """A shipped dialect, with some fields changed."""
    return bind(replace(load_dialect(name), **changes), IDS.get, TEXTS.__getitem__)


def sequence_of(bound: BoundDialect, prompt_length: int = 10, max_tokens: int = 1000) -> Sequence:
    return ThreadedSequence(bound, prompt_length, (END,), max_tokens)


def behind(said: Iterable[int], sequence: Sequence) -> Sequence:
    """The sequence, with these tokens in it."""
    replay(sequence, said)
    return sequence


def ids(text: str) -> list[int]:
    """Tokens written with spaces between them: ``a [Fork] b``, a tag ``<promise : 20 "/>``."""
    return [IDS[' tokens="' if word == ":" else word] for word in text.split()]


def texts(tokens: Iterable[int]) -> str:
    return " ".join(TEXTS[token].strip() for token in tokens)


def at(sequence: Sequence, path: tuple[int, ...]) -> DecodeThread:
    """The thread with this path. Raises KeyError if it is not open yet."""
    return {thread.path: thread for thread in sequence.threads}[path]


def position_after(sequence: Sequence, number: int, path: list[int]) -> int:
    """Position id of the token after ``path``: tokens that follow the thread's own and are not accepted yet."""
    gaps = sum(sequence.gap(number, path[: count + 1]) for count in range(len(path)))
    return sequence.threads[number].next_position + len(path) + gaps


@dataclass(frozen=True)
class ThreadOpened:
    """``thread`` opened ``child``, whose forced first token is ``token`` at ``position``."""

    thread: int
    child: int
    token: int
    position: int


@dataclass(frozen=True)
class Joined:
    """The join ``token`` of ``thread`` entered at ``position`` and attends to all tokens of the threads ``joined``."""

    thread: int
    joined: tuple[int, ...]
    token: int
    position: int


@dataclass(frozen=True)
class Waiting:
    """``thread`` waits until its open children have ended, and then continues or ends."""

    thread: int


@dataclass(frozen=True)
class ThreadEnded:
    thread: int
    reason: str


@dataclass(frozen=True)
class Finished:
    reason: str


Event = ThreadOpened | Joined | Waiting | ThreadEnded | Finished


def changes_since(sequence: Sequence, states: list[State], joins: list[int], finished: str | None) -> list[Event]:
    """How the threads have changed since they had these states and numbers of joins: by kind, and then by thread."""
    threads = sequence.threads
    opened = threads[len(states) :]
    events: list[Event] = [ThreadOpened(one.parent, one.number, one.token_ids[0], one.positions[0]) for one in opened]
    for one, count in zip(threads, joins, strict=False):
        for join in one.joins[count:]:
            numbers = tuple(number for number, _ in join.context)
            events.append(Joined(one.number, numbers, one.token_ids[join.index], one.positions[join.index]))
    changed = [
        one for one, state in zip(threads, [*states, *[State.RUNNING] * len(opened)], strict=True) if one.state is not state
    ]
    events += [Waiting(one.number) for one in changed if one.state is State.WAITING]
    events += [ThreadEnded(one.number, one.ended_by) for one in changed if one.state is State.ENDED]
    return [*events, Finished(sequence.finished)] if sequence.finished != finished else events


def events_of(sequence: Sequence, number: int, token: int) -> list[Event]:
    """Accept a token in a thread; returns how the threads have changed, and checks which tokens it reports as entered."""
    states, joins = [thread.state for thread in sequence.threads], [len(thread.joins) for thread in sequence.threads]
    finished = sequence.finished
    starts = sequence.accept(number, token)
    events = changes_since(sequence, states, joins, finished)
    entered = {(event.child, event.token) for event in events if isinstance(event, ThreadOpened)}
    entered |= {(event.thread, event.token) for event in events if isinstance(event, Joined)}
    assert len(starts) == len(entered) and {(start.thread, start.token) for start in starts} == entered
    return events


def say(sequence: Sequence, path: tuple[int, ...], text: str) -> list[Event]:
    """Accept tokens in one thread; returns all events."""
    return [event for token in ids(text) for event in events_of(sequence, at(sequence, path).number, token)]


def written(sequence: Sequence) -> str:
    """The document as text with spaces between the tokens."""
    return texts(token.token_id for token in sequence.document())
