"""A vocabulary small enough to write answers by hand, and the shipped dialects in its ids."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from pipedec.threads import BoundDialect, DecodeThread, Sequence, Start, ThreadedSequence, bind, load_dialect, replay

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


def say(sequence: Sequence, path: tuple[int, ...], text: str) -> list[Start]:
    """Accept tokens in one thread; returns which others enter with them."""
    return [start for token in ids(text) for start in sequence.accept_token(at(sequence, path).number, token)]


def written(sequence: Sequence) -> str:
    """The document as text with spaces between the tokens."""
    return texts(token.token_id for token in sequence.document())
