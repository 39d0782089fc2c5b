"""Answers in threads from a transformers model: each forward pass computes the next token of every running thread.

Owns the cache and which slots each row attends to; ``Sequence`` knows the threads. Several answers are decoded in one batch.
Slower than the pipeline, but exact: tuned models are measured with it. Shapes: B answers, K rows, S slots, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import DynamicCache

from pipedec.threads import BoundDialect, Sequence, State


@dataclass(frozen=True)
class Asked:
    """A prompt, and the seed of its sampling."""

    prompt_ids: tuple[int, ...]
    seed: int = 0


class Answers(Protocol):
    """A source of answers in threads."""

    def answer(self, asked: list[Asked]) -> list[Sequence]:
        """A finished sequence for each prompt."""


@dataclass(frozen=True)
class ModelAnswers:
    """Answers of a causal language model, with the dialect's bans.

    Attributes:
        temperature: 0 = greedy; otherwise each answer is sampled with its own seed.
        max_tokens: maximum length of an answer, control and forced tokens included.
    """

    model: Any
    bound: BoundDialect
    end_token_ids: tuple[int, ...]
    max_tokens: int
    temperature: float = 0.0

    @torch.no_grad()
    def answer(self, asked: list[Asked]) -> list[Sequence]:
        """A finished sequence for each prompt; all are decoded in one batch."""
        running = [_Running.start(self, one) for one in asked]
        cache, num_slots = DynamicCache(), 0
        while any(answer.sequence.finished is None for answer in running):
            rows = [answer.take_rows(num_slots) for answer in running]
            logits_BKV = self._forward(rows, cache, num_slots)
            num_slots += logits_BKV.shape[1]
            for answer, logits_KV in zip(running, logits_BKV, strict=True):
                answer.accept(logits_KV, self.temperature)
        return [answer.sequence for answer in running]

    def _forward(self, rows: list[list[_Row]], cache: DynamicCache, num_slots: int) -> Tensor:
        """Logits of the rows, which fill the next slots of the cache: [B, K, V]. Padding attends only to itself."""
        width = max(map(len, rows))
        tokens, positions = torch.zeros(len(rows), width, dtype=torch.int64), torch.zeros(len(rows), width, dtype=torch.int64)
        mask = torch.zeros(len(rows), 1, width, num_slots + width, dtype=torch.bool)
        mask[:, 0, range(width), range(num_slots, num_slots + width)] = True
        for number, answer_rows in enumerate(rows):
            for place, row in enumerate(answer_rows):
                tokens[number, place], positions[number, place] = row.token, row.position
                mask[number, 0, place, row.sees] = True
        device = self.model.device
        logits: Tensor = self.model(
            input_ids=tokens.to(device),
            position_ids=positions.to(device),
            attention_mask=mask.to(device),
            past_key_values=cache,
            use_cache=True,
        ).logits
        return logits.float().cpu()


@dataclass(frozen=True)
class _Row:
    """A token to compute, and the slots that it attends to besides its own."""

    token: int
    position: int
    sees: list[int]


@dataclass
class _Running:
    """One answer being decoded.

    Attributes:
        slots: cache slots of each thread's tokens; the prompt's are under None.
        last: for each thread, the row that predicts its next token.
    """

    sequence: Sequence
    prompt_ids: tuple[int, ...]
    generator: torch.Generator
    slots: dict[int | None, list[int]] = field(default_factory=dict)
    last: dict[int, int] = field(default_factory=dict)

    @classmethod
    def start(cls, how: ModelAnswers, asked: Asked) -> _Running:
        sequence = Sequence(how.bound, len(asked.prompt_ids), how.end_token_ids, how.max_tokens)
        return cls(sequence, asked.prompt_ids, torch.Generator().manual_seed(asked.seed))

    def take_rows(self, first_slot: int) -> list[_Row]:
        """The tokens that are not in the cache yet; they get the slots from ``first_slot`` on."""
        if self.sequence.finished is not None:
            return []
        if not self.slots:
            self.slots[None] = list(range(first_slot, first_slot + len(self.prompt_ids)))
            self.last = {0: len(self.prompt_ids) - 1}
            return [_Row(token, place, self.slots[None][:place]) for place, token in enumerate(self.prompt_ids)]
        return list(self._new_rows(first_slot))

    def _new_rows(self, first_slot: int) -> Iterator[_Row]:
        new = [
            (thread.number, index)
            for thread in self.sequence.threads
            for index in range(len(self.slots.setdefault(thread.number, [])), thread.num_tokens)
        ]
        for place, (number, _) in enumerate(new):
            self.slots[number].append(first_slot + place)
            self.last[number] = place
        for number, index in new:
            thread = self.sequence.threads[number]
            seen = (self.slots[other][:count] for other, count in self.sequence.sees(number, index))
            yield _Row(
                thread.token_ids[index], thread.positions[index], [*self.slots[None], *(slot for part in seen for slot in part)]
            )

    def accept(self, logits_KV: Tensor, temperature: float) -> None:
        """Accept the next token of every running thread."""
        running = [thread.number for thread in self.sequence.threads if thread.state is State.RUNNING]
        for number in running:
            if self.sequence.finished is None:
                logits_V = logits_KV[self.last[number]].clone()
                logits_V[list(self.sequence.banned(number))] = -torch.inf
                self.sequence.accept(number, self._chosen(logits_V, temperature))

    def _chosen(self, logits_V: Tensor, temperature: float) -> int:
        if temperature == 0:
            return int(logits_V.argmax())
        return int((logits_V / temperature).softmax(-1).multinomial(1, generator=self.generator))
