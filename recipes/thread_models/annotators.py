"""Annotators: they find the parts of an answer that can be decoded in parallel.

APAR's rules, the same rules with PASTA's promises, or a language model. Owns when an annotation is refused; does not know where
answers come from.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from pipedec.text.prompt import load_tokenizer
from recipes.thread_models import pasta_language
from recipes.thread_models.chat_endpoint import ChatEndpoint
from recipes.thread_models.structure import (
    Fork,
    JoinPoint,
    Piece,
    Structured,
    ambiguity,
    paragraph_tree,
    pieces_of,
    plain_text,
    sentences,
    whole_parts,
)

MIN_BLOCK_WORDS = 5
_MIN_FORKS = 2  # one block with a join after it saves nothing
_TEMPLATE = Path(__file__).with_name("annotation_prompt.txt")

Length = Callable[[str], int]


class Rejected(Exception):
    """An annotation that cannot be used; the message is a short reason."""


class Annotator(Protocol):
    """Finds the structure of answers."""

    @property
    def name(self) -> str: ...

    def annotate(self, question: str, answer: str) -> Structured | None:
        """The answer in pieces; None if it has no parallel structure. Raises Rejected."""


class AparRules:
    """Appendix B of APAR."""

    name = "rules"

    def annotate(self, question: str, answer: str) -> Structured | None:
        return paragraph_tree(answer)


@dataclass(frozen=True)
class PastaRules:
    """Promises of the contents of a list's points and of whole paragraphs, cut at ends of sentences into blocks worth a thread.

    A promise and its block's tags cost about eight tokens. Parts shorter than ``min_tokens`` therefore stay in the main thread.
    Since a thread waits for its longest child, longer parts are cut into blocks of about ``block_tokens``. A join precedes a
    closing.

    Attributes:
        length: counts the tokens of a text.
        max_topic_words: maximum words of a topic.
    """

    length: Length
    max_topic_words: int = pasta_language.MAX_TOPIC_WORDS
    min_tokens: int = 30
    block_tokens: int = 60
    name: str = "rules"

    def annotate(self, question: str, answer: str) -> Structured | None:
        found = whole_parts(answer)
        if found is None:
            return None
        rule, parts = found
        blocks = [block for part in parts for block in self._blocks(answer, *part)]
        if len(blocks) < _MIN_FORKS:
            return None
        pieces = list(pieces_of(answer, blocks))
        places = [place for place, piece in enumerate(pieces) if isinstance(piece, Fork)]
        for number, place in enumerate(places, start=1):
            fork = pieces[place]
            assert isinstance(fork, Fork)
            lead = pieces[place - 1] if place else ""
            title = str(lead).rpartition("\n")[2] if isinstance(lead, str) and rule == "list" else ""
            topic = self._topic(title) or self._topic(fork.text) or f"part {number}"
            pieces[place] = with_promise(fork, topic, self.length)
        after_forks = places[-1] + 1
        if plain_text(pieces[after_forks:]).strip():
            pieces.insert(after_forks, JoinPoint())
        return Structured(rule, tuple(pieces))

    def _topic(self, text: str) -> str | None:
        return pasta_language.topic_of(" ".join(text.split()), self.max_topic_words)

    def _blocks(self, answer: str, start: int, end: int) -> Iterator[tuple[int, int]]:
        """A part in one block or, if it is long, in several of similar length; nothing if it is too short.

        Steps of a calculation stay together: each needs the ones before it.
        """
        tokens = self.length(answer[start:end])
        count = 1 if ambiguity(answer[start:end]) == "math" else max(1, round(tokens / self.block_tokens))
        if tokens < self.min_tokens:
            return
        first = start
        for sentence in _ends_of_sentences(answer, start, end):
            so_far = self.length(answer[first:sentence])
            enough = so_far >= max(tokens / count, self.min_tokens)
            if count > 1 and enough and self.length(answer[sentence:end]) >= self.min_tokens:
                yield first, sentence
                first, tokens, count = sentence, tokens - so_far, count - 1
        yield first, end


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


def _ends_of_sentences(answer: str, start: int, end: int) -> Iterator[int]:
    """Where the sentences of a part end, without the space after them; so do its lines."""
    for line in re.finditer(r"[^\n]+", answer[start:end]):
        place = start + line.start()
        for sentence in sentences(line[0]):
            place += len(sentence)
            yield place - (len(sentence) - len(sentence.rstrip()))


def _value(reply: str) -> str:
    """The annotated answer in a reply: the ``value`` of the JSON object in it, or else the reply itself."""
    try:
        found = json.loads(reply[reply.find("{") : reply.rfind("}") + 1], strict=False)
    except json.JSONDecodeError:
        return reply.strip()
    return str(found["value"]).strip() if isinstance(found, dict) and "value" in found else reply.strip()
