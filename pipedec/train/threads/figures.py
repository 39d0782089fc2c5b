"""Figures of answers in threads: how often they fork, how parallel they are, and the speed-up over one thread.

Means of ratios are geometric, as in PASTA §5.1. Knows neither files nor training.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from rich.progress import track
from torch import Tensor

from pipedec.threads import Sequence, measure
from pipedec.train.threads.answers import Answers, Asked
from pipedec.train.threads.learning import Batch, batches, learned_logits
from pipedec.train.threads.repetition import in_circles
from pipedec.train.threads.rows import tree_row

ANSWERS_AT_ONCE = 32

AnsweredPrompt = tuple[tuple[int, ...], Sequence]  # a prompt and its answer


def answer_all(answers: Answers, asked: list[Asked], title: str) -> list[AnsweredPrompt]:
    """Answers to all prompts, decoded in batches."""
    answered: list[AnsweredPrompt] = []
    for start in track(range(0, len(asked), ANSWERS_AT_ONCE), title):
        part = asked[start : start + ANSWERS_AT_ONCE]
        answered += zip((one.prompt_ids for one in part), answers.answer(part), strict=True)
    return answered


def thread_figures(sequences: list[Sequence], baseline_tokens: list[int]) -> dict[str, Any]:
    """Figures of answers; ``baseline_tokens`` are the lengths of the answers to the same prompts in one thread.

    ``forked`` is the share of answers with two threads or more; ``threads``, ``tokens`` and ``longest_chain`` are means,
    ``parallelism`` and ``speedup`` (theoretical) geometric means; ``finished`` is the share of answers that ended by themselves,
    ``circles`` the share of those that ran in circles to the token limit.
    """
    measured = [measure(sequence) for sequence in sequences]
    speedups = [metrics.theoretical_speedup(tokens) for metrics, tokens in zip(measured, baseline_tokens, strict=True)]
    anomalies: Counter[str] = Counter()
    for sequence in sequences:
        anomalies.update(sequence.anomalies)
    return {
        "answers": len(sequences),
        "forked": _mean(metrics.threads >= 2 for metrics in measured),
        "threads": _mean(metrics.threads for metrics in measured),
        "tokens": _mean(metrics.tokens for metrics in measured),
        "longest_chain": _mean(metrics.longest_chain for metrics in measured),
        "parallelism": geometric_mean(metrics.parallelism for metrics in measured),
        "speedup": geometric_mean(speedups),
        "finished": _mean(sequence.finished == "stop" for sequence in sequences),
        "circles": _mean(in_circles(sequence) for sequence in sequences),
        "anomalies": dict(anomalies),
    }


def geometric_mean(values: Iterable[float]) -> float:
    """Geometric mean of the values that are not 0; 0 if there are none."""
    logs = [math.log(value) for value in values if value > 0]
    return round(math.exp(sum(logs) / len(logs)), 4) if logs else 0.0


def text_of(sequence: Sequence, decode: Callable[[list[int]], str]) -> str:
    """The answer as readers see it."""
    text, tokens = "", list[int]()
    for token in sequence.document():
        if not token.is_control:
            tokens.append(token.token_id)
        elif token.tail:
            text, tokens = text + decode(tokens) + token.tail, []
    return text + decode(tokens)


@torch.no_grad()
def agreement(model: Any, answered: list[AnsweredPrompt]) -> dict[str, Any]:
    """How often the model's top k holds the next token of the thread, control tokens included."""
    rows = [tree_row(sequence, prompt) for prompt, sequence in answered]
    found = [_ranks(model, batch) for batch in batches(rows, model.device)]
    ranks = torch.cat(found)
    shares = {f"top{k}": round(float((ranks < k).float().mean()), 4) for k in (1, 4, 16)}
    return {**shares, "tokens": len(ranks)}


def _ranks(model: Any, batch: Batch) -> Tensor:
    """Number of tokens that the model ranks above the next one: int64 [L]."""
    logits = learned_logits(model, batch)
    return (logits > logits.gather(1, batch.learned[:, None])).sum(1).cpu()


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return round(sum(found) / len(found), 4) if found else 0.0
