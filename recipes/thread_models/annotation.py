"""Annotation: annotators find the parts of answers that can be decoded in parallel, and their records are appended to a file.

Annotators are APAR's rules, the same rules with PASTA's promises, or a language model. Owns when an annotation is refused, and
the shares of structured and unstructured answers; does not know where answers come from. A killed run continues.
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from statistics import mean, median
from typing import Protocol

from rich.progress import track

from pipedec.text.prompt import load_tokenizer
from recipes.thread_models import pasta_language, structure
from recipes.thread_models.chat_endpoint import ChatEndpoint
from recipes.thread_models.records import UNSTRUCTURED, Annotated, Question, drop_unfinished_line, read_annotated, write_annotated
from recipes.thread_models.structure import Fork, JoinPoint, Structured

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
        return structure.paragraph_tree(answer)


@dataclass(frozen=True)
class PastaRules:
    """Promises of the contents of a list's points and of whole paragraphs, cut at ends of sentences into blocks worth a thread.

    A promise and its block's tags cost about eight tokens. Parts shorter than ``min_tokens`` therefore stay in the main thread.
    Since a thread waits for its longest child, longer parts are cut into blocks of about ``block_tokens``. A join precedes a
    closing.
    """

    length: Length  # counts the tokens of a text
    max_topic_words: int = pasta_language.MAX_TOPIC_WORDS  # maximum words of a topic
    min_tokens: int = 30
    block_tokens: int = 60
    name: str = "rules"

    def annotate(self, question: str, answer: str) -> Structured | None:
        found = structure.whole_parts(answer)
        if found is None:
            return None
        rule, parts = found
        blocks = [block for part in parts for block in self._blocks(answer, *part)]
        if len(blocks) < _MIN_FORKS:
            return None
        pieces = list(structure.pieces_of(answer, blocks))
        places = [place for place, piece in enumerate(pieces) if isinstance(piece, Fork)]
        for number, place in enumerate(places, start=1):
            fork = pieces[place]
            assert isinstance(fork, Fork)
            lead = pieces[place - 1] if place else ""
            title = str(lead).rpartition("\n")[2] if isinstance(lead, str) and rule == "list" else ""
            topic = self._topic(title) or self._topic(fork.text) or f"part {number}"
            pieces[place] = with_promise(fork, topic, self.length)
        after_forks = places[-1] + 1
        if structure.plain_text(pieces[after_forks:]).strip():
            pieces.insert(after_forks, JoinPoint())
        return Structured(rule, tuple(pieces))

    def _topic(self, text: str) -> str | None:
        return pasta_language.topic_of(" ".join(text.split()), self.max_topic_words)

    def _blocks(self, answer: str, start: int, end: int) -> Iterator[tuple[int, int]]:
        """A part in one block or, if it is long, in several of similar length; nothing if it is too short.

        Steps of a calculation stay together: each needs the ones before it.
        """
        tokens = self.length(answer[start:end])
        count = 1 if structure.ambiguity(answer[start:end]) == "math" else max(1, round(tokens / self.block_tokens))
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

    It is not asked for lengths: ``length`` counts the tokens of a text.
    """

    def __init__(self, endpoint: ChatEndpoint, length: Length) -> None:
        self.name = endpoint.model
        self._endpoint = endpoint
        self._length = length

    def annotate(self, question: str, answer: str) -> Structured | None:
        if structure.ambiguity(answer) == "control":
            raise Rejected("the answer holds control tokens")
        reply = self._endpoint.complete(annotation_prompt(question, answer))
        if reply is None:
            raise Rejected("the model gave no reply")
        try:
            pieces = pasta_language.parse(_value(reply))
        except pasta_language.Malformed as wrong:
            raise Rejected(str(wrong)) from None
        if structure.plain_text(pieces) != answer:
            raise Rejected("the text was changed")
        forks = [piece for piece in pieces if isinstance(piece, Fork)]
        if any(len(fork.text.split()) < MIN_BLOCK_WORDS for fork in forks):
            raise Rejected("a block of fewer than five words")
        for place, piece in enumerate(pieces):
            if isinstance(piece, Fork):
                pieces[place] = with_promise(piece, piece.topic or "", self._length)
        return Structured("model", tuple(pieces)) if forks else None


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
        for sentence in structure.sentences(line[0]):
            place += len(sentence)
            yield place - (len(sentence) - len(sentence.rstrip()))


def _value(reply: str) -> str:
    """The annotated answer in a reply: the ``value`` of the JSON object in it, or else the reply itself."""
    try:
        found = json.loads(reply[reply.find("{") : reply.rfind("}") + 1], strict=False)
    except json.JSONDecodeError:
        return reply.strip()
    return str(found["value"]).strip() if isinstance(found, dict) and "value" in found else reply.strip()


def choose(questions: Iterable[Question], rules: Annotator, unstructured_share: float, seed: int) -> list[Question]:
    """All questions whose answers the rules find structured, and enough others to make up their share, shuffled.

    Any prefix of the result has about the same shares, so that it can be cut off.
    """
    structured: list[Question] = []
    others: list[Question] = []
    for question in track(list(questions), "rules"):
        (others if rules.annotate(question.prompt, question.answer) is None else structured).append(question)
    rng = random.Random(seed)
    wanted = round(len(structured) * unstructured_share / (1 - unstructured_share))
    chosen = structured + rng.sample(others, min(wanted, len(others)))
    return rng.sample(chosen, len(chosen))


@dataclass
class AnnotationCounts:
    """Counts of a run: records written, found in the file from an earlier run, and refused (by reason)."""

    written: int = 0
    present: int = 0
    rejected: Counter[str] = field(default_factory=Counter)


def annotate(
    questions: list[Question], dialect: str, annotator: Annotator, fallback: Annotator | None, out: Path
) -> AnnotationCounts:
    """Annotate what ``out`` does not hold yet and append it there.

    ``fallback`` annotates what ``annotator`` cannot; None leaves that out, and a later run tries it again. Raises UserError if
    ``out`` is no such file or of another dialect.
    """
    outcome = AnnotationCounts()
    if out.exists():
        drop_unfinished_line(out)
    known = [record.question for record in read_annotated(out, dialect)] if out.exists() else []
    present = {(question.prompt, question.answer) for question in known}
    with out.open("a", encoding="utf-8") as file:
        for question in track(questions, f"{dialect}: {annotator.name}"):
            if (question.prompt, question.answer) in present:
                outcome.present += 1
                continue
            record = _annotated(question, annotator, fallback, outcome.rejected)
            if record is not None:
                file.write(write_annotated(record, dialect))
                file.flush()
                outcome.written += 1
    return outcome


def _annotated(question: Question, annotator: Annotator, fallback: Annotator | None, rejected: Counter[str]) -> Annotated | None:
    try:
        found = annotator.annotate(question.prompt, question.answer)
    except Rejected as reason:
        rejected[str(reason)] += 1
        return _annotated(question, fallback, None, rejected) if fallback is not None else None
    if found is None:
        return Annotated(question, (question.answer,), UNSTRUCTURED, annotator.name)
    return Annotated(question, found.pieces, found.rule, annotator.name)


def rule_of(record: Annotated) -> str:
    return record.rule


def kind_of(record: Annotated) -> str:
    """The kind of a record's question if it has one, else its source."""
    question = record.question
    return question.source if question.kind in ("", "file") else question.kind


SUMMARY_COLUMNS = ("", "answers", "structured", "forks", "most", "median fork", "mean answer")


def summaries(records: list[Annotated], name_of: Callable[[Annotated], str]) -> Iterator[tuple[str, ...]]:
    """A line for each name: its records, those with forks, mean and most forks of these, and lengths in characters."""
    for name, group in groupby(sorted(records, key=name_of), key=name_of):
        named = list(group)
        forks = [record.forks for record in named if record.forks]
        counts, lengths = [len(row) for row in forks] or [0], [len(fork.text) for row in forks for fork in row] or [0]
        answer = mean(len(record.question.answer) for record in named)
        figures = f"{mean(counts):.1f}", str(max(counts)), f"{median(lengths):.0f}", f"{answer:.0f}"
        yield name, f"{len(named):,}", f"{len(forks):,}", *figures
