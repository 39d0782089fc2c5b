"""How close an answer comes to being a different one: the smallest change of logits by which some token would not be chosen.

Prompts of the record are chosen so that no processor's rounding changes an answer. The logits are computed by transformers in
float64, so this also checks that the answer is the target's. Shapes: V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from golden.questions import Question
from pipedec.core.sampling import SamplingParams
from pipedec.sampling.noise import gumbel
from pipedec.sampling.sampler import History, tempered
from pipedec.threads import DecodeThread, Sequence
from pipedec.threads.sequences import Sequences
from pipedec.verify.reference import Choose, load_transformers, naive_threads, with_fewest_tokens

LEAST = 1e-3
transformers_logging.disable_progress_bar()


@dataclass(frozen=True)
class Close:
    """A token that another processor might choose otherwise.

    Attributes:
        place: path of its thread, and its index there.
        lead: see ``lead``.
    """

    place: tuple[tuple[int, ...], int]
    lead: float

    def __str__(self) -> str:
        path, index = self.place
        return f"token {index}{f' of thread {path}' if path else ''} leads by {self.lead:.2g}"


@torch.inference_mode()
def close_calls(question: Question, token_ids: list[int]) -> list[Close]:
    """The tokens of an answer that lead by less than LEAST; by less than 0 where the target says something else.

    Raises:
        ValueError: the target says something else in threads.
    """
    watcher = _Watcher(_target(question.target), question)
    sequence = Sequences(question.target).maker(len(question.token_ids), question.sampling, question.threads)()
    if sequence.can_fork:
        naive_threads(watcher, sequence, question.token_ids, question.sampling, watcher.choose(sequence))
        watcher.look_back()
        if (said := [token.token_id for token in sequence.document()]) != token_ids:
            raise ValueError(f"the target says {said}, not {token_ids}")
    else:
        watcher.follow(sequence, token_ids)
    return [Close(place, least) for place, least in watcher.leads.items() if least < LEAST]


def lead(scores_V: Tensor, token: int, sampling: SamplingParams, noise_V: Tensor | None = None) -> float:
    """By how much a token leads the best of the others that are kept by cut-offs, or nearly kept; 0 if it is hardly kept itself.

    Args:
        scores_V: logits with bias and penalties, −inf for what is not possible.
        noise_V: None for a greedy choice.
    """
    scores_V = scores_V.double()
    if noise_V is None:
        return _lead(scores_V, token)
    scores_V = tempered(scores_V[None], sampling.temperature)[0]
    surely_V, maybe_V = kept(scores_V, sampling)
    if not surely_V[token]:
        return 0.0
    return _lead(torch.where(maybe_V, scores_V + noise_V, -torch.inf), token)


def kept(scores_V: Tensor, sampling: SamplingParams) -> tuple[Tensor, Tensor]:
    """Which tokens the cut-offs keep even if all numbers change by LEAST, and which only if they do, as two masks [V]."""
    surely_V = maybe_V = scores_V > -torch.inf
    if sampling.min_p > 0:
        floor = scores_V.max() + math.log(sampling.min_p)
        surely_V, maybe_V = surely_V & (scores_V > floor + LEAST), maybe_V & (scores_V > floor - LEAST)
    if 0 < sampling.top_k < int(maybe_V.sum()):
        ranked = scores_V.sort(descending=True).values
        surely_V = surely_V & (scores_V > ranked[sampling.top_k] + LEAST)
        maybe_V = maybe_V & (scores_V > ranked[sampling.top_k - 1] - LEAST)
    if sampling.top_p < 1:
        before = [_mass_before(scores_V, mask_V) for mask_V in (surely_V, maybe_V)]
        surely_V = surely_V & (torch.maximum(*before) < sampling.top_p - LEAST)
        maybe_V = maybe_V & (torch.minimum(*before) < sampling.top_p + LEAST)
    return surely_V, maybe_V


def _mass_before(scores_V: Tensor, kept_V: Tensor) -> Tensor:
    """For each token the probability of all likelier ones, if these are kept."""
    probabilities_V = torch.where(kept_V, scores_V, -torch.inf).softmax(-1)
    order = scores_V.argsort(descending=True)
    sorted_V = probabilities_V[order]
    return torch.empty_like(sorted_V).scatter_(0, order, sorted_V.cumsum(-1) - sorted_V)


def _lead(scores_V: Tensor, token: int) -> float:
    others_V = scores_V.clone()
    others_V[token] = -torch.inf
    return float(scores_V[token] - others_V.max())


@cache
def _target(directory: Path) -> PreTrainedModel:
    return load_transformers(directory, torch.float64, torch.device("cpu"), attn_implementation="sdpa")


class _Watcher:
    """The target as ``naive_threads`` takes it: it keeps what it has said, and of each choice what it depends on.

    Attributes:
        leads: by place.
    """

    device = torch.device("cpu")
    dtype = torch.float64

    def __init__(self, model: PreTrainedModel, question: Question) -> None:
        self._model = model
        self._prompt = list(question.token_ids)
        self._sampling = question.sampling
        self._logits: list[Tensor] = []
        self._seen: list[Tensor] = []  # tokens of the answer
        self._choices: list[tuple[DecodeThread, int, int, frozenset[int]]] = []  # thread, index, position, what is banned
        self.leads: dict[tuple[tuple[int, ...], int], float] = {}
        self.modules = model.modules

    def __call__(self, input_ids: Tensor, **inputs: Any) -> SimpleNamespace:
        logits_1TV = self._model(input_ids=input_ids, **inputs).logits
        self._logits.append(logits_1TV[0, -1].clone())
        self._seen.append(input_ids[0, len(self._prompt) :])
        return SimpleNamespace(logits=logits_1TV)

    def choose(self, sequence: Sequence) -> Choose:
        """Which thread goes on, and a note of that."""

        def noting(running: list[DecodeThread]) -> DecodeThread:
            thread = with_fewest_tokens(running)
            self._choices.append((thread, thread.num_tokens, thread.next_position, sequence.banned(thread.number)))
            return thread

        return noting

    def look_back(self) -> None:
        """The answer is complete: how clear each choice was."""
        for (thread, index, position, banned), logits_V, seen in zip(self._choices, self._logits, self._seen, strict=True):
            logits_V[list(banned)] = -torch.inf
            self._judge(thread, index, position, logits_V, seen)

    def follow(self, sequence: Sequence, token_ids: list[int]) -> None:
        """An answer in one thread: the target sees all of it at once."""
        context = torch.tensor([[*self._prompt, *token_ids]])
        logits_TV = self._model(context).logits[0, len(self._prompt) - 1 :]
        for index, token in enumerate(token_ids):
            logits_V = logits_TV[index].clone()
            if sequence.grammar is not None:
                allowed = sequence.grammar.allowed()
                logits_V[[one for one in range(len(logits_V)) if one not in allowed]] = -torch.inf
            position = sequence.threads[0].next_position
            sequence.accept_token(0, token)
            self._judge(sequence.main, index, position, logits_V, torch.tensor(token_ids[:index], dtype=torch.int64))

    def _judge(self, thread: DecodeThread, index: int, position: int, logits_V: Tensor, seen: Tensor) -> None:
        sampling = self._sampling
        for token, value in (sampling.logit_bias or {}).items():
            logits_V[token] += value
        if sampling.has_penalties:
            history = History(len(logits_V), self.device)
            history.add_prompt(torch.tensor(self._prompt))
            history.add_accepted(seen)
            nothing = torch.zeros(1, 0, dtype=torch.bool), torch.zeros(0, dtype=torch.int64)
            logits_V = history.penalised(logits_V.double()[None], *nothing, sampling)[0]
        noise_V = None
        if sampling.is_stochastic:
            assert sampling.seed is not None
            noise_V = gumbel(sampling.seed, torch.tensor([position]), len(logits_V), thread.noise_stream)[0]
        self.leads[thread.path, index] = lead(logits_V, thread.token_ids[index], sampling, noise_V)
