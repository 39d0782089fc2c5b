"""Answers in threads from a transformers model: each forward pass computes the next token of every running thread.

Owns which slots of the cache each row attends to; ``Sequence`` knows the threads. Several answers are decoded in one batch, each
of which fills slots of its own, so that answers of different lengths waste none. Slower than the pipeline, but exact: tuned
models are measured with it. Shapes: B answers, D head size, H heads, K rows, R running threads, S slots, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.cache_utils import Cache, DynamicLayer

from pipedec.threads import BoundDialect, Sequence, State, ThreadedSequence

_GROWTH = 64  # slots of the cache
_GROUPED = "grouped_sdpa"
_RUNNING_SHARE = 0.75  # of a batch; if fewer answers of it are left, the others' rows are dropped


@dataclass(frozen=True)
class SeededPrompt:
    prompt_ids: tuple[int, ...]
    seed: int = 0  # of its sampling


class AnswerSource(Protocol):
    """A source of answers in threads."""

    def answer(self, asked: list[SeededPrompt]) -> list[Sequence]:
        """A finished sequence for each prompt."""


@dataclass(frozen=True)
class ModelAnswers:
    """Answers of a causal language model, with the dialect's bans."""

    model: Any
    bound: BoundDialect
    end_token_ids: tuple[int, ...]
    max_tokens: int  # maximum length of an answer, control and forced tokens included
    temperature: float = 0.0  # 0 = greedy; otherwise each answer is sampled with its own seed

    @torch.no_grad()
    def answer(self, asked: list[SeededPrompt]) -> list[Sequence]:
        """A finished sequence for each prompt; all are decoded in one batch. A prompt that is asked twice is computed once."""
        prompts = list(dict.fromkeys(one.prompt_ids for one in asked))
        answers = [_Running.start(self, one, prompts.index(one.prompt_ids)) for one in asked]
        cache = SlotCache(len(prompts))
        rows = [[_TokenRow(token, place, list(range(place))) for place, token in enumerate(prompt)] for prompt in prompts]
        with grouped_attention(self.model):
            self._accept(answers, self._forward(rows, cache))
            batch = running = self._batch(answers, cache)
            while running:
                rows = [[] for _ in batch]
                for answer in running:
                    rows[answer.number] = list(answer.take_rows())
                self._accept(running, self._forward(rows, cache))
                running = [answer for answer in running if answer.sequence.finished is None]
                if len(running) < _RUNNING_SHARE * len(batch):
                    batch = running = self._batch(running, cache)
        return [answer.sequence for answer in answers]

    def _batch(self, answers: list[_Running], cache: SlotCache) -> list[_Running]:
        """Those that have not finished, which become the rows of the cache."""
        running = [answer for answer in answers if answer.sequence.finished is None]
        cache.select([answer.number for answer in running])
        for number, answer in enumerate(running):
            answer.number = number
        return running

    def _forward(self, rows: list[list[_TokenRow]], cache: SlotCache) -> Tensor:
        """Logits of the rows, which fill the next slots of the cache: [B, K, V]. Padding attends only to itself."""
        device, width = self.model.device, max(map(len, rows))
        cache.reserve(width, device)
        tokens, positions = torch.zeros(len(rows), width, dtype=torch.int64), torch.zeros(len(rows), width, dtype=torch.int64)
        mask = torch.zeros(len(rows), 1, width, cache.num_slots, dtype=torch.bool)
        for number, answer_rows in enumerate(rows):
            mask[number, 0, range(width), range(cache.used[number], cache.used[number] + width)] = True
            for place, row in enumerate(answer_rows):
                tokens[number, place], positions[number, place] = row.token, row.position
                mask[number, 0, place, row.sees] = True
        logits: Tensor = self.model(
            input_ids=tokens.to(device), position_ids=positions.to(device), attention_mask=mask.to(device),
            past_key_values=cache.layers, use_cache=True,
        ).logits  # fmt: skip
        cache.fill([len(answer_rows) for answer_rows in rows])
        return logits

    def _accept(self, answers: list[_Running], logits_BKV: Tensor) -> None:
        """Accept the next token of every running thread of the answers."""
        running = ((answer, thread) for answer in answers for thread in answer.sequence.threads)
        threads = [(answer, thread.number) for answer, thread in running if thread.state is State.RUNNING]
        places = [(answer.number, answer.last[thread]) for answer, thread in threads]
        logits_RV = logits_BKV[tuple(torch.tensor(places, device=logits_BKV.device).T)].float().cpu()
        for logits_V, (answer, thread) in zip(logits_RV, threads, strict=True):
            logits_V[list(answer.sequence.banned(thread))] = -torch.inf
        tokens = self._chosen(logits_RV, [answer.generator for answer, _ in threads])
        for token, (answer, thread) in zip(tokens, threads, strict=True):
            if answer.sequence.finished is None:
                answer.sequence.accept_token(thread, token)

    def _chosen(self, logits_RV: Tensor, generators: list[torch.Generator]) -> list[int]:
        """The likeliest token of each row, or one drawn by inverting the distribution function."""
        if self.temperature == 0:
            return logits_RV.argmax(-1).tolist()
        drawn = [torch.rand(1, generator=generator, dtype=torch.float64) for generator in generators]
        sums_RV = (logits_RV / self.temperature).softmax(-1).cumsum(-1, dtype=torch.float64)
        wanted_R1 = (1 - torch.stack(drawn)) * sums_RV[:, -1:]  # above 0, so that no banned token is drawn
        return torch.searchsorted(sums_RV, wanted_R1)[:, 0].tolist()


@dataclass(frozen=True)
class _TokenRow:
    """A token to compute, and the slots that it attends to besides its own."""

    token: int
    position: int
    sees: list[int]


@dataclass
class _Running:
    """One answer being decoded."""

    sequence: Sequence
    generator: torch.Generator
    number: int  # its place in the batch
    num_slots: int  # number of its slots in the cache; the prompt's are the first
    last: dict[int, int]  # for each thread, the row that predicts its next token
    slots: dict[int, list[int]] = field(default_factory=dict)  # cache slots of each thread's tokens

    @classmethod
    def start(cls, how: ModelAnswers, asked: SeededPrompt, number: int) -> _Running:
        length = len(asked.prompt_ids)
        sequence = ThreadedSequence(how.bound, length, how.end_token_ids, how.max_tokens)
        return cls(sequence, torch.Generator().manual_seed(asked.seed), number, length, {0: length - 1})

    def take_rows(self) -> Iterator[_TokenRow]:
        """The tokens that are not in the cache yet; they get the next slots."""
        new = [
            (thread.number, index)
            for thread in self.sequence.threads
            for index in range(len(self.slots.setdefault(thread.number, [])), thread.num_tokens)
        ]
        for place, (number, _) in enumerate(new):
            self.slots[number].append(self.num_slots + place)
            self.last[number] = place
        self.num_slots += len(new)
        prompt = range(self.sequence.prompt_length)
        for number, index in new:
            thread = self.sequence.threads[number]
            seen = [slot for other, count in self.sequence.sees(number, index) for slot in self.slots[other][:count]]
            yield _TokenRow(thread.token_ids[index], thread.positions[index], [*prompt, *seen])


class SlotCache:
    """Keys and values of a batch of answers."""

    def __init__(self, num_answers: int) -> None:
        self.used = [0] * num_answers  # slots that each answer has filled
        self.layers = Cache(layer_class_to_replicate=lambda: _Layer(self))  # ``past_key_values`` of a transformers model
        self._slots_BK = torch.zeros(num_answers, 0, dtype=torch.int64)

    @property
    def num_slots(self) -> int:
        """Slots that the new rows' keys are in, at most: S of the attention mask."""
        return max(self.used) + self._slots_BK.shape[1]

    def reserve(self, num_rows: int, device: torch.device) -> None:
        """Let the next forward pass write ``num_rows`` rows of every answer after its filled slots."""
        self._slots_BK = (torch.tensor(self.used)[:, None] + torch.arange(num_rows)).to(device)

    def fill(self, counts: list[int]) -> None:
        """Keep the first rows that were written of each answer; later ones, which are padding, are overwritten."""
        self.used = [used + count for used, count in zip(self.used, counts, strict=True)]

    def select(self, numbers: list[int]) -> None:
        """Make the answers with these numbers the batch; one that is named twice is copied."""
        self.used = [self.used[number] for number in numbers]
        self.layers.batch_select_indices(torch.tensor(numbers, dtype=torch.int64, device=self._slots_BK.device))

    def written(self, stored_BHSD: Tensor, new_BHKD: Tensor) -> Tensor:
        """``stored``, enlarged if necessary, with the new rows in their slots."""
        missing = self.num_slots - stored_BHSD.shape[2]
        if missing > 0:
            stored_BHSD = nn.functional.pad(stored_BHSD, (0, 0, 0, missing + _GROWTH))
        answers_B1 = torch.arange(len(self.used), device=new_BHKD.device)[:, None]
        stored_BHSD[answers_B1, :, self._slots_BK] = new_BHKD.transpose(1, 2)
        return stored_BHSD


class _Layer(DynamicLayer):
    """Keys and values of one layer: [B, H, S, D] each, with room for further slots."""

    def __init__(self, owner: SlotCache) -> None:
        super().__init__()
        self.owner = owner

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """The keys and values of all slots, after writing those of the new rows."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.keys, self.values = key_states[:, :, :0], value_states[:, :, :0]
        self.keys = self.owner.written(self.keys, key_states)
        self.values = self.owner.written(self.values, value_states)
        return self.keys[:, :, : self.owner.num_slots], self.values[:, :, : self.owner.num_slots]


@contextmanager
def grouped_attention(model: Any) -> Iterator[None]:
    """Let a transformers model on the CPU, if its attention is PyTorch's, share keys and values between query heads.

    transformers repeats them where there is a mask, so that no GPU falls back to a slow kernel. On a CPU the repeating takes
    longer than the attention.
    """
    if model.device.type != "cpu" or model.config._attn_implementation != "sdpa":
        yield
        return
    model.set_attn_implementation(_GROUPED)
    try:
        yield
    finally:
        model.set_attn_implementation("sdpa")


def _grouped(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, scaling: float | None = None, **others: Any
) -> tuple[Tensor, None]:
    """Attention as transformers calls it: queries [B, heads, K, D], keys and values [B, heads that share them, S, D]."""
    found = nn.functional.scaled_dot_product_attention(query, key, value, attention_mask, scale=scaling, enable_gqa=True)
    return found.transpose(1, 2).contiguous(), None


AttentionInterface.register(_GROUPED, _grouped)
