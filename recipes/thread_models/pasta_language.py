"""The written form of PASTA-LANG (§3): promises, asynchronous blocks and joins as tags in an answer.

Owns how pieces become tags and tags become pieces, and what a topic and a promised length look like. It does not know how
the places of the tags are found.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from recipes.thread_models.structure import Fork, JoinPoint, Piece, plain_text

MAX_TOPIC_WORDS = 3
LENGTH_UNIT = 10
BLOCK, BLOCK_END, JOIN = "<async>", "</async>", "<sync/>"

_FORK_OR_JOIN = re.compile(
    r"(?:<promise\b(?P<promise>[^<>]*?)/>)?<async\b(?P<block>[^<>]*)>(?P<body>.*?)</async\s*>|<sync\s*/>", re.DOTALL
)
_ATTRIBUTE = re.compile(r"(\w+)\s*=\s*(\"[^\"]*\"|'[^']*')")
_LOOKS_LIKE_TAG = re.compile(r"</?(?:promise|async|sync)\b")
_WORD = re.compile(r"\w[\w.()'-]*")
_UNIMPORTANT = frozenset(
    ("a", "an", "and", "are", "as", "at", "be", "by", "can", "do", "does", "for", "from", "has", "have", "if", "in", "is", "it",
     "its", "may", "must", "not", "of", "on", "or", "that", "the", "their", "them", "then", "there", "these", "they", "this",
     "those", "to", "was", "were", "when", "which", "will", "with", "you", "your")
)  # fmt: skip


class Malformed(ValueError):
    """The tags are not PASTA-LANG; the message is a short reason."""


def written(pieces: Sequence[Piece]) -> str:
    """The answer with its tags. Every fork has a topic and a length."""
    text = ""
    for piece in pieces:
        if isinstance(piece, Fork):
            text += f'<promise topic="{piece.topic}" tokens="{piece.tokens}"/>{BLOCK}{piece.text}{BLOCK_END}'
        else:
            text += JOIN if isinstance(piece, JoinPoint) else piece
    return text


def parse(text: str) -> list[Piece]:
    """The pieces of a tagged answer. A block without a promise, ``<async topic='…'>``, is a fork of unknown length.

    Raises Malformed if tags are unpaired, nested, out of place or lack what they must have.
    """
    pieces: list[Piece] = []
    start = num_open = 0
    for found in _FORK_OR_JOIN.finditer(text):
        if before := text[start : found.start()]:
            pieces.append(before)
        start = found.end()
        if found["body"] is not None:
            pieces.append(_fork(found["promise"] or found["block"], found["body"]))
            num_open += 1
        elif not num_open:
            raise Malformed("<sync/> with nothing open")
        else:
            pieces.append(JoinPoint())
            num_open = 0
    if text[start:]:
        pieces.append(text[start:])
    if _LOOKS_LIKE_TAG.search(plain_text(pieces)):
        raise Malformed("a tag is unpaired, nested or misplaced")
    return pieces


def promised_tokens(text: str, length: Callable[[str], int]) -> int:
    """The ``tokens`` of a block: its length with both tags, rounded up to tens, so that the promised positions suffice."""
    return -(-length(f"{BLOCK}{text}{BLOCK_END}") // LENGTH_UNIT) * LENGTH_UNIT


def topic_of(lead: str, most_words: int = MAX_TOPIC_WORDS) -> str | None:
    """The first words of a list item's title or a sentence, the telling ones if they are too many; None if there is no word."""
    line = re.sub(r"^\s*(?:\d+[.)]|[-*+•])\s+", "", lead.rstrip().rpartition("\n")[2])
    words = [word.rstrip(".'-") for word in _WORD.findall(line)]
    if len(words) > most_words:
        words = [word for word in words if word.lower() not in _UNIMPORTANT] or words
    return " ".join(words[:most_words]) or None


def _fork(attributes: str, body: str) -> Fork:
    found = {name: value[1:-1].strip() for name, value in _ATTRIBUTE.findall(attributes)}
    topic, tokens = re.sub(r"[\"<>/]", "", found.get("topic", "")), found.get("tokens")
    if not topic or len(topic.split()) > MAX_TOPIC_WORDS:
        raise Malformed(f"a topic of {len(topic.split())} words" if topic else "a block without a topic")
    if tokens is not None and not (tokens.isdecimal() and int(tokens) > 0 and int(tokens) % LENGTH_UNIT == 0):
        raise Malformed("a length that is no multiple of ten")
    return Fork(body, topic, int(tokens) if tokens else None)
