"""Which parts of an answer can be decoded in parallel, by the rules of APAR (Appendix B), and samples to train on.

Owns the neutral form, a sequence of pieces: text of the main thread, forks with their child's text, joins. Concatenated, the
pieces are the answer exactly. It knows neither tokenizers nor PASTA's tags.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

MIN_POINTS = 3
MIN_DETAIL_CHARACTERS = 10

# Text whose structure the rules cannot be sure of: code, mathematics, addresses, tables, and the control tokens themselves.
_AMBIGUOUS = {
    "code": re.compile(
        r"```|~~~|^\s*>>> |^(?!\s*(?:[-*+•]|\d+[.)])\s)\S.*\n[ \t]*\n(?: {4}|\t)\s*\S"
        r"|^\s*(?:def \w+\(|return\b(?! \w+ \w+)|import \w+$|from [\w.]+ import )",
        re.MULTILINE,
    ),
    "math": re.compile(r"\$\$|\$[^$\n]*[\\^_=][^$\n]*\$|\\[(\[]|\\[a-zA-Z]{3,}\{|[\d)%]\s*=\s*[-$€£(]?\s*\d|\d\s*[*×÷^]\s*\d"),
    "address": re.compile(r"\b(?:https?|ftp)://|\bwww\.\w"),
    "table": re.compile(r"^\s*\|.*\|\s*$|^\s*[+=][-=+ ]{4,}$", re.MULTILINE),
    "control": re.compile(
        r"\[(?:Fork|Child|SplitMask|SplitSop)\]|</?(?:async|promise|sync|Parallel|Path|Conclusion)\b|<\|\w+\|>", re.IGNORECASE
    ),
}
_NUMBER = re.compile(r"^( *)\d+\.[ \t]+", re.MULTILINE)
_TITLE = re.compile(r"[^\n]+?:(?:\*\*|__|[*_`])?(?=\s)")
_POINT_END = re.compile(r"\n[ \t]*\n(?=\S)")
_PARAGRAPH_END = re.compile(r"\n(?:[ \t]*\n)+")
_NOT_PROSE = re.compile(r"^(?:\s+\S|[-*+•–]\s|\d+[.)]\s|[#>|])", re.MULTILINE)
_SENTENCE_END = re.compile(r"(?:[。！？]|[.!?][\"'”’)\]*_`]*(?=\s))\s*(?=(\S))")
_ABBREVIATION = re.compile(
    r"(?:\b(?:e\.g|i\.e|etc|vs|cf|al|mr|mrs|ms|dr|st|no|fig|prof|approx|incl|resp)|\b[A-Za-z])\.$", re.IGNORECASE
)


@dataclass(frozen=True)
class Fork:
    """A child thread opened here: its text and, for PASTA, topic and length of its promise (``tokens`` is a multiple of ten)."""

    text: str
    topic: str | None = None
    tokens: int | None = None


@dataclass(frozen=True)
class JoinPoint:
    """The main thread waits here for all children."""


Piece = str | Fork | JoinPoint


@dataclass(frozen=True)
class Structured:
    """An answer in pieces, and the rule that found them: ``list`` or ``paragraphs``."""

    rule: str
    pieces: tuple[Piece, ...]

    @property
    def forks(self) -> tuple[Fork, ...]:
        return tuple(piece for piece in self.pieces if isinstance(piece, Fork))


def plain_text(pieces: Sequence[Piece]) -> str:
    """The answer that the pieces were cut from."""
    return "".join(piece if isinstance(piece, str) else piece.text for piece in pieces if not isinstance(piece, JoinPoint))


def ambiguity(answer: str) -> str | None:
    """Why the rules do not apply to this answer (``code``, ``math``, …); None if they do."""
    return next((name for name, pattern in _AMBIGUOUS.items() if pattern.search(answer)), None)


def paragraph_tree(answer: str) -> Structured | None:
    """The answer's root-and-detail structure by the rules of APAR's Appendix B; None if it is unstructured.

    Of an ordered list with ``1. title: content`` in at least three points, all contents are forked; else of the paragraphs with
    more than one sentence, all that follows their first. Where the paper leaves it open: a content ends with its last visible
    character, at the next point or before an unindented paragraph; a point's number begins a line, at the least indentation
    that any has; headings, bullets, quotes and indented text are no paragraphs; a fork that nothing follows is not worth one.
    """
    if ambiguity(answer):
        return None
    for rule, find in (("list", _points), ("paragraphs", _paragraphs)):
        spans = list(find(answer))
        if spans and answer[spans[0][1] :].strip():
            return Structured(rule, tuple(pieces_of(answer, spans)))
    return None


def whole_parts(answer: str) -> tuple[str, list[tuple[int, int]]] | None:
    """Where parts that a topic alone can announce begin and end, and the rule that found them; None if there are none.

    Of an ordered list with ``1. title: content`` in at least two points, all contents; else all paragraphs of prose. Mathematics
    is no obstacle here, since it is not split into sentences.
    """
    if ambiguity(answer) not in (None, "math"):
        return None
    if points := list(_points(answer, least=2)):
        return "list", points
    return "paragraphs", [span for span in _paragraph_spans(answer) if is_prose(answer[slice(*span)])]


def sentences(paragraph: str) -> Iterator[str]:
    """The sentences of a paragraph; the space between two sentences belongs to the first."""
    start = 0
    for end in _SENTENCE_END.finditer(paragraph):
        if not end[1].islower() and not _ABBREVIATION.search(paragraph[start : end.start() + 1]):
            yield paragraph[start : end.end()]
            start = end.end()
    yield paragraph[start:]


def is_prose(paragraph: str) -> bool:
    """Whether it is text in sentences, not a heading, bullets, a quotation or something indented."""
    return bool(paragraph.strip()) and not _NOT_PROSE.search(paragraph)


def _points(answer: str, least: int = MIN_POINTS) -> Iterator[tuple[int, int]]:
    """Where the contents of an ordered list begin and end; nothing if the list is not valid or has fewer than ``least``."""
    numbers = list(_NUMBER.finditer(answer))
    indent = min((len(number[1]) for number in numbers), default=0)
    numbers = [number for number in numbers if len(number[1]) == indent]
    ends = [number.start() for number in numbers[1:]] + [len(answer)]
    spans = []
    for number, end in zip(numbers, ends, strict=False):
        if title := _TITLE.match(answer, number.end(), end):
            region = answer[title.end() : end]
            content = region[: cut.start()] if (cut := _POINT_END.search(region)) else region
            spans.append((title.end(), title.end() + len(content.rstrip())))
    if len(spans) >= least and all(_is_detail(answer, span) for span in spans):
        yield from spans


def _paragraphs(answer: str) -> Iterator[tuple[int, int]]:
    """Where the details of paragraphs begin and end: all but the first sentence, with the space before it."""
    for start, end in _paragraph_spans(answer):
        paragraph = answer[start:end]
        if is_prose(paragraph):
            detail = (start + len(next(sentences(paragraph)).rstrip()), end)
            if _is_detail(answer, detail):
                yield detail


def _paragraph_spans(answer: str) -> Iterator[tuple[int, int]]:
    """Where paragraphs begin and end, without the space between them."""
    start = 0
    for separator in [*(found.span() for found in _PARAGRAPH_END.finditer(answer)), (len(answer), len(answer))]:
        yield start, start + len(answer[start : separator[0]].rstrip())
        start = separator[1]


def _is_detail(answer: str, span: tuple[int, int]) -> bool:
    return len(answer[slice(*span)].strip()) >= MIN_DETAIL_CHARACTERS


def pieces_of(answer: str, spans: Sequence[tuple[int, int]]) -> Iterator[Piece]:
    """The answer in pieces: the spans, in order, are forks."""
    start = 0
    for first, end in spans:
        yield answer[start:first]
        yield Fork(answer[first:end])
        start = end
    if answer[start:]:
        yield answer[start:]
