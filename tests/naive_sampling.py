"""Sampling as its definitions read, one row and one token at a time, for comparison."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from pipedec.core import SamplingParams
from pipedec.sampling.noise import gumbel


def probabilities(logits: Sequence[float], params: SamplingParams) -> list[float]:
    """The distribution to draw from: temperature, min-p, top-k, top-p, in this order."""
    highest = max(logits)
    kept = [math.exp((logit - highest) / params.temperature) for logit in logits]
    kept = [weight if weight >= params.min_p * max(kept) else 0.0 for weight in kept]
    if params.top_k > 0:
        last = sorted(kept, reverse=True)[min(params.top_k, len(kept)) - 1]
        kept = [weight if weight >= last else 0.0 for weight in kept]
    total, mass = math.fsum(kept), 0.0
    for weight in sorted(kept, reverse=True):
        mass += weight / total
        if mass >= params.top_p or math.isclose(mass, params.top_p, rel_tol=1e-12):
            kept = [other if other >= weight else 0.0 for other in kept]
            break
    return [weight / math.fsum(kept) for weight in kept]


def changed(logits: Sequence[float], prompt: Sequence[int], said: Sequence[int], params: SamplingParams) -> list[float]:
    """Logits after bias and penalties."""
    result = []
    for token, logit in enumerate(logits):
        logit += (params.logit_bias or {}).get(token, 0.0)
        if token in prompt or token in said:
            logit = logit / params.repetition_penalty if logit > 0 else logit * params.repetition_penalty
        logit -= params.frequency_penalty * said.count(token)
        logit -= params.presence_penalty if token in said else 0.0
        result.append(logit)
    return result


def choose(logits: Sequence[float], prompt: Sequence[int], said: Sequence[int], params: SamplingParams) -> int:
    """The token that follows ``prompt`` and ``said``."""
    logits = changed(logits, prompt, said, params)
    if params.temperature == 0:
        return logits.index(max(logits))
    assert params.seed is not None
    noise = gumbel(params.seed, torch.tensor([len(prompt) + len(said)]), len(logits))[0].tolist()
    weights = probabilities(logits, params)
    scores = [math.log(weight) + luck if weight else -math.inf for weight, luck in zip(weights, noise, strict=True)]
    return scores.index(max(scores))
