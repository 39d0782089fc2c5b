"""Sampling as its definitions read, one row and one token at a time, for comparison."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence

import torch

from pipedec.core.sampling import SamplingParams
from pipedec.sampling.noise import gumbel


def probabilities(logits: Sequence[float], params: SamplingParams) -> list[float]:
    """The distribution to draw from: temperature, min-p, top-k, top-p, in this order."""
    highest = max(logits)
    kept = [math.exp((logit - highest) / params.temperature) for logit in logits]
    least = params.min_p * max(kept)
    kept = [weight if weight >= least else 0.0 for weight in kept]
    if params.top_k > 0:
        last = sorted(kept, reverse=True)[min(params.top_k, len(kept)) - 1]
        kept = [weight if weight >= last else 0.0 for weight in kept]
    total, mass = math.fsum(kept), 0.0
    for weight in sorted(kept, reverse=True):
        mass += weight / total
        if mass >= params.top_p or math.isclose(mass, params.top_p, rel_tol=1e-12):
            kept = [other if other >= weight else 0.0 for other in kept]
            break
    total = math.fsum(kept)
    return [weight / total for weight in kept]


def changed(logits: Sequence[float], prompt: Sequence[int], said: Sequence[int], params: SamplingParams) -> list[float]:
    """Logits after bias and penalties."""
    result = []
    in_prompt, counts = set(prompt), Counter(said)
    for token, logit in enumerate(logits):
        logit += (params.logit_bias or {}).get(token, 0.0)
        if token in in_prompt or token in counts:
            logit = logit / params.repetition_penalty if logit > 0 else logit * params.repetition_penalty
        logit -= params.frequency_penalty * counts[token]
        logit -= params.presence_penalty if token in counts else 0.0
        result.append(logit)
    return result


def choose(
    logits: Sequence[float],
    prompt: Sequence[int],
    said: Sequence[int],
    params: SamplingParams,
    position: int | None = None,
    stream: int = 0,
    banned: Collection[int] = (),
) -> int:
    """The token that follows ``prompt`` and ``said``, right behind them unless ``position`` says where."""
    logits = changed([-math.inf if token in banned else logit for token, logit in enumerate(logits)], prompt, said, params)
    if params.temperature == 0:
        return logits.index(max(logits))
    assert params.seed is not None
    place = len(prompt) + len(said) if position is None else position
    noise = gumbel(params.seed, torch.tensor([place]), len(logits), stream)[0].tolist()
    weights = probabilities(logits, params)
    scores = [math.log(weight) + luck if weight else -math.inf for weight, luck in zip(weights, noise, strict=True)]
    return scores.index(max(scores))
