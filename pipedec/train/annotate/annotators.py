"""Annotators: they find the parts of an answer that can be decoded in parallel.

APAR's rules, the same rules with PASTA's promises, or a language model. Owns when an annotation is refused; does not know where
answers come from.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from pipedec.text.prompt import load_tokenizer
from pipedec.train.annotate import pasta_language
from pipedec.train.annotate.structure import (
    Fork,
    Join,
    Piece,
    Structured,
    ambiguity,
    paragraph_tree,
    plain_text,
)
from pipedec.train.chat_endpoint import ChatEndpoint

MIN_BLOCK_WORDS = 5
_MIN_FORKS = 2  # one block and a join behind it save nothing
_TEMPLATE = Path(__file__).with_name("annotation_prompt.txt")

Length = Callable[[str], int]


class Rejected(Exception):
    """An annotation that cannot be used; the message is a short reason."""


class Annotator(Protocol):
    """Finds the structure of answers."""

    name: str

    def annotate(self, question: str, answer: str) -> Structured | None:
        """The answer in pieces; None if it has no parallel structure. Raises Rejected."""


class AparRules:
    """Appendix B of APAR."""

    name = "rules"

    def annotate(self, question: str, answer: str) -> Structured | None:
        return paragraph_tree(answer)


class PastaRules:
    """APAR's structures as PASTA promises. Details of fewer than five words stay in the main thread; a join precedes a closing.

    Args:
        length: counts the tokens of a text.
    """

    name = "rules"

    def __init__(self, length: Length) -> None:
        self._length = length

    def annotate(self, question: str, answer: str) -> Structured | None:
        found = paragraph_tree(answer)
        if found is None:
            return None
        pieces = list(_merged(found.pieces))
        forks = {place: piece for place, piece in enumerate(pieces) if isinstance(piece, Fork)}
        if len(forks) < _MIN_FORKS:
            return None
        for number, (place, fork) in enumerate(forks.items(), start=1):
            lead = str(pieces[place - 1]).rpartition("\n" if found.rule == "list" else "\n\n")[2]
            topic = pasta_language.topic_of(" ".join(lead.split())) or f"part {number}"
            pieces[place] = with_promise(fork, topic, self._length)
        after_forks = max(forks) + 1
        if plain_text(pieces[after_forks:]).strip():
            pieces.insert(after_forks, Join())
        return replace(found, pieces=tuple(pieces))


class ModelAnnotator:
    """A language model, prompted as in PASTA's Appendix A. Its reply is used only if tags are all that it adds.

    Args:
        length: counts the tokens of a text; the model is not asked for lengths.
    """

    def __init__(self, endpoint: ChatEndpoint, length: Length) -> None:
        self.name = endpoint.model
        self._endpoint = endpoint
        self._length = length

    def annotate(self, question: str, answer: str) -> Structured | None:
        if ambiguity(answer) == "control":
            raise Rejected("the answer holds control tokens")
        reply = self._endpoint.complete(annotation_prompt(question, answer))
        if reply is None:
            raise Rejected("the model gave no reply")
        return self._checked(_value(reply), answer)

    def _checked(self, annotated: str, answer: str) -> Structured | None:
        try:
            pieces = pasta_language.parse(annotated)
        except pasta_language.Malformed as wrong:
            raise Rejected(str(wrong)) from None
        if plain_text(pieces) != answer:
            raise Rejected("the text was changed")
        forks = [piece for piece in pieces if isinstance(piece, Fork)]
        if any(len(fork.text.split()) < MIN_BLOCK_WORDS for fork in forks):
            raise Rejected("a block of fewer than five words")
        return Structured("model", tuple(map(self._with_length, pieces))) if forks else None

    def _with_length(self, piece: Piece) -> Piece:
        return with_promise(piece, piece.topic or "", self._length) if isinstance(piece, Fork) else piece


def length_in_tokens(directory: Path) -> Length:
    """Counts tokens as the checkpoint in ``directory`` does. Raises UserError if there is no tokenizer."""
    tokenizer = load_tokenizer(directory)
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False))


def annotation_prompt(question: str, answer: str) -> str:
    """The prompt for the model: the paper's instructions and this conversation."""
    turns = [{"from": "human", "value": question}, {"from": "chatbot", "value": answer}]
    conversation = json.dumps(turns, indent=2, ensure_ascii=False)
    return _TEMPLATE.read_text(encoding="utf-8").replace("{conversation}", conversation)


def with_promise(fork: Fork, topic: str, length: Length) -> Fork:
    """The fork with its topic and the length of its block."""
    return replace(fork, topic=topic, tokens=pasta_language.promised_tokens(fork.text, length))


def _merged(pieces: tuple[Piece, ...]) -> Iterator[Piece]:
    """The pieces, forks that are too short turned into text of the main thread; a text precedes every fork."""
    text = ""
    for piece in pieces:
        if isinstance(piece, Fork) and len(piece.text.split()) >= MIN_BLOCK_WORDS:
            yield text
            yield piece
            text = ""
        else:
            text += plain_text([piece])
    if text:
        yield text


def _value(reply: str) -> str:
    """The annotated answer in a reply: the ``value`` of the JSON object in it, or else the reply itself."""
    try:
        found = json.loads(reply[reply.find("{") : reply.rfind("}") + 1], strict=False)
    except json.JSONDecodeError:
        return reply.strip()
    return str(found["value"]).strip() if isinstance(found, dict) and "value" in found else reply.strip()
