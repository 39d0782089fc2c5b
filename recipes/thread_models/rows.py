"""Annotated answers as rows of tensors to train on: prompt, answer in a dialect, attention mask and targets.

Owns how pieces become tokens, the marker that names the dialect in the prompt, and both forms of a paragraph tree: the answer as
one row with its mask, or each thread as a row of its own after what it attends to. Knows no model and no optimiser. Shapes:
A tokens of an answer in document order, N tokens of a row.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipedec.threads import BoundDialect, Dialect, Sequence, ThreadedSequence, bind, load_dialect, replay
from recipes.thread_models.one_thread import NO_DIALECT
from recipes.thread_models.records import Annotated
from recipes.thread_models.structure import Fork, JoinPoint, Piece, plain_text

IGNORED = -100  # ``ignore_index`` of torch's cross-entropy
Lengths = Mapping[tuple[int, ...], int]  # tokens of children, by their paths

# Put before a chat template: ``threads="apar"`` adds a system message that names the dialect.
_MARKER = (
    "{%- if threads %}{%- set marker = 'threads: ' + threads %}"
    "{%- if messages and messages[0].role == 'system' %}"
    "{%- set messages = [{'role': 'system', 'content': marker + '\\n' + messages[0].content}] + messages[1:] %}"
    "{%- else %}{%- set messages = [{'role': 'system', 'content': marker}] + messages %}{%- endif %}{%- endif %}"
)


def with_marker(chat_template: str) -> str:
    """The chat template, taking the variable ``threads``: the dialect to answer in. Without it nothing changes."""
    return chat_template if chat_template.startswith(_MARKER) else _MARKER + chat_template


@dataclass(frozen=True)
class TrainingRow:
    """One sequence to train on, of N tokens."""

    token_ids: Tensor  # int64 [N]
    positions: Tensor  # int64 [N]
    mask: Tensor  # bool [N, N], ``mask[i, j]`` = token i attends to token j
    targets: Tensor  # int64 [N], IGNORED where there is no target
    is_avoided: bool = False  # whether the targets are to become unlikely, not likely


@dataclass(frozen=True)
class Unanswered:
    """A prompt in tokens, and the dialect to answer it in (None: in one thread)."""

    dialect: str | None
    prompt: tuple[int, ...]


@dataclass(frozen=True)
class TokenizedSample:
    """A prompt and its answer in tokens."""

    dialect: str | None  # None = answered in one thread, without a marker
    prompt: tuple[int, ...]
    answer: tuple[int, ...]  # in document order, control, forced and end tokens included

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.answer)


@dataclass(frozen=True)
class WrittenSample(TokenizedSample):
    record: Annotated  # that it was made from


class RowWriter:
    """Writes records as token ids of one tokenizer, in dialects by name, or by name and content.

    With ``true_lengths`` the positions after a child follow from the tokens that it has, rounded up as its dialect states them,
    not from a prediction (PASTA §6.2, Oracle). Raises UserError if the tokenizer lacks a dialect's control tokens.
    """

    def __init__(
        self, tokenizer: Any, dialects: Iterable[str] | Mapping[str, Dialect], end_token_id: int, true_lengths: bool = False
    ) -> None:
        self._tokenizer = tokenizer
        self.end_token_id = end_token_id
        vocabulary = tokenizer.get_vocab()
        known = known_dialects(dialects)
        self.bound = {name: bind(dialect, vocabulary.get, self._text_of) for name, dialect in known.items()}
        self._true_lengths = true_lengths

    def bound_to(self, dialect: str | None) -> BoundDialect:
        """The dialect with its token ids; for None, that of an answer in one thread."""
        return NO_DIALECT if dialect is None else self.bound[dialect]

    @property
    def controls(self) -> Tensor:
        """The ids of all control tokens: int64."""
        return torch.tensor(sorted({token for bound in self.bound.values() for token in bound.control}))

    def prompt(self, prompt: str, dialect: str | None) -> tuple[int, ...]:
        """The prompt through the chat template, as the engine tokenizes it."""
        variables = {} if dialect is None else {"threads": dialect}
        turns = [{"role": "user", "content": prompt}]
        return tuple(self._tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False, **variables))

    def unanswered(self, prompt: str, dialect: str | None) -> Unanswered:
        """The prompt, to be answered in a dialect, or in one thread."""
        return Unanswered(dialect, self.prompt(prompt, dialect))

    def sample(self, record: Annotated, dialect: str | None) -> WrittenSample:
        """The record answered in a dialect, or in one thread."""
        if dialect is None:
            answer = [*self.text(plain_text(record.pieces)), self.end_token_id]
        else:
            answer = [*self._answer(_capped(record.pieces, self.bound[dialect]), self.bound[dialect])]
        return WrittenSample(dialect, self.prompt(record.question.prompt, dialect), tuple(answer), record)

    def text(self, text: str) -> list[int]:
        """Text as tokens; text that looks like a control token is encoded as plain text."""
        return list(self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True))

    def decode(self, token_ids: list[int]) -> str:
        """Tokens as text, without special ones."""
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))

    def rows(self, sample: TokenizedSample, form: str) -> list[TrainingRow]:
        """The sample as one row (``tree``), or, if it is written, as one row per thread (``unrolled``)."""
        if sample.dialect is None:
            return [causal_row(list(sample.prompt), list(sample.answer))]
        if form == "unrolled" and isinstance(sample, WrittenSample):
            return list(self._unrolled(sample, self.bound[sample.dialect]))
        return [tree_row(self.sequence(sample), sample.prompt)]

    def sequence(self, sample: TokenizedSample, max_tokens: int | None = None) -> Sequence:
        """The threads of the sample's answer, which had to have at most ``max_tokens`` tokens (None: any number)."""
        limit = len(sample.answer) + 1 if max_tokens is None else max_tokens
        sequence, unit = self._replayed(sample, limit), self.bound_to(sample.dialect).dialect.length_unit or 1
        return self._replayed(sample, limit, true_lengths(sequence, unit)) if self._true_lengths else sequence

    def _replayed(self, sample: TokenizedSample, limit: int, lengths: Lengths | None = None) -> Sequence:
        bound, length = self.bound_to(sample.dialect), len(sample.prompt)
        sequence = ThreadedSequence(bound, length, [self.end_token_id], limit, known_lengths=lengths)
        replay(sequence, sample.answer)
        return sequence

    def _text_of(self, token: int) -> str:
        return str(self._tokenizer.decode([token]))

    def _answer(self, pieces: Iterable[Piece], bound: BoundDialect) -> Iterator[int]:
        """The answer's tokens in document order."""
        for piece in pieces:
            if isinstance(piece, JoinPoint):
                assert bound.join is not None
                yield bound.join
            elif isinstance(piece, Fork):
                yield bound.opener
                if bound.dialect.opener_form is not None:
                    tag = bound.dialect.opener_form.format(topic=piece.topic, tokens=self._stated_length(piece, bound.dialect))
                    yield from self._with_tokens(tag, bound.opener_tokens)
                yield bound.child_start
                yield from self.text(piece.text)
                yield self.end_token_id if bound.child_end is None else bound.child_end
            else:
                yield from self.text(piece)
        yield self.end_token_id

    def _stated_length(self, fork: Fork, dialect: Dialect) -> int | None:
        """The length of a promise: the annotator's, or that of the child with its first and last token."""
        unit = dialect.length_unit
        return fork.tokens if unit is None else rounded_up(len(self.text(fork.text)) + 2, unit)

    def _unrolled(self, sample: WrittenSample, bound: BoundDialect) -> Iterator[TrainingRow]:
        """The main thread, then every child after the path that leads to it. Raises ValueError if there are joins."""
        main: list[int] = []
        children: list[tuple[list[int], list[int]]] = []
        for piece in _capped(sample.record.pieces, bound):
            if isinstance(piece, JoinPoint):
                raise ValueError("a paragraph tree has no joins")
            if isinstance(piece, Fork):
                main.append(bound.opener)
                children.append(([*main, bound.child_start], self.text(piece.text)))
            else:
                main += self.text(piece)
        for path, thread in (([], main), *children):
            yield causal_row([*sample.prompt, *path], [*thread, self.end_token_id])

    def _with_tokens(self, text: str, ids: Mapping[str, int]) -> list[int]:
        """Token ids of a text in which some parts, the keys of ``ids``, are one token each."""
        parts = re.split("|".join(f"({re.escape(part)})" for part in ids), text) if ids else [text]
        return [token for part in parts if part for token in ([ids[part]] if part in ids else self.text(part))]


def known_dialects(dialects: Iterable[str] | Mapping[str, Dialect]) -> Mapping[str, Dialect]:
    """The dialects by name, the shipped ones if only names are given."""
    return dialects if isinstance(dialects, Mapping) else {name: load_dialect(name) for name in dialects}


def rounded_up(length: int, unit: int) -> int:
    """The smallest multiple of ``unit`` that is not below ``length``."""
    return -(-length // unit) * unit


def true_lengths(sequence: Sequence, unit: int = 1) -> Lengths:
    """The tokens that each child has, the forced and the closing one included, rounded up to a multiple of ``unit``."""
    return {one.path: rounded_up(one.num_tokens, unit) for one in sequence.threads if one.parent is not None}


def _capped(pieces: Iterable[Piece], bound: BoundDialect) -> list[Piece]:
    """The pieces with no more forks than a thread may have; further forks become text. Adjacent texts are joined."""
    forks = 0
    capped: list[Piece] = []
    for piece in pieces:
        forks += isinstance(piece, Fork)
        kept = piece.text if isinstance(piece, Fork) and forks > bound.dialect.max_children else piece
        if isinstance(kept, str) and capped and isinstance(capped[-1], str):
            capped[-1] += kept
        else:
            capped.append(kept)
    return capped


def tree_row(sequence: Sequence, prompt: tuple[int, ...]) -> TrainingRow:
    """All threads of an answer in one row, after their prompt.

    The target of a token is the next token of the same thread; there is none inside the prompt and at the end of a thread. So a
    forced token is never a target (APAR §2.2), and the target of an opener is the next token of its own thread (PASTA §4).
    """
    begin = len(prompt)
    if begin != sequence.prompt_length:
        raise ValueError(f"the prompt has {begin} tokens, but the sequence expects {sequence.prompt_length}")
    document = sequence.document()
    length = begin + len(document)
    positions = [sequence.threads[token.thread].positions[token.ordinal] for token in document]
    mask = torch.ones(length, length, dtype=torch.bool).tril()
    mask[begin:, begin:] = visibility(sequence)
    targets = torch.full((length,), IGNORED)
    for number, indices in _document_indices(sequence).items():
        own = torch.tensor(sequence.threads[number].token_ids[: len(indices)])
        targets[begin + indices[:-1]] = own[1:]
        if number == 0 and begin:
            targets[begin - 1] = own[0]
    token_ids = torch.tensor([*prompt, *(token.token_id for token in document)], dtype=torch.int64)
    return TrainingRow(token_ids, torch.tensor([*range(begin), *positions], dtype=torch.int64), mask, targets)


def causal_row(context: list[int], learned: list[int]) -> TrainingRow:
    """One thread with causal attention; the tokens of ``learned`` are the targets."""
    ids = torch.tensor([*context, *learned])
    targets = torch.full_like(ids, IGNORED)
    targets[len(context) - 1 : -1] = ids[len(context) :]
    return TrainingRow(ids, torch.arange(len(ids)), torch.ones(len(ids), len(ids), dtype=torch.bool).tril(), targets)


def visibility(sequence: Sequence) -> Tensor:
    """The attention mask over the document: bool [A, A], ``[i, j]``: token i attends to token j. All attend to the prompt."""
    document = sequence.document()
    indices = _document_indices(sequence)
    mask = torch.zeros(len(document), len(document), dtype=torch.bool)
    for row, token in enumerate(document):
        for number, count in sequence.sees(token.thread, token.ordinal):
            mask[row, indices[number][:count]] = True
    return mask


def _document_indices(sequence: Sequence) -> dict[int, Tensor]:
    """By thread, int64: the indices of its tokens in the document."""
    indices: dict[int, list[int]] = {}
    for index, token in enumerate(sequence.document()):
        indices.setdefault(token.thread, []).append(index)
    return {number: torch.tensor(own) for number, own in indices.items()}
