"""Choosing among a few candidates per row: the tokens that float32 ranks highest, so that only they need float64 and a sort.

The result is that of ``filtered`` logits plus noise over the whole vocabulary, or it is reported as unsure: where a token outside
might be kept or win, and where two numbers that are compared are so close that rounding would decide.

Shapes: R rows, V vocabulary, K candidates of each row, most probable first.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pipedec.core.sampling import SamplingParams
from pipedec.device import to_device
from pipedec.sampling.noise import gumbel, gumbel_of

FILTERED, UNFILTERED = 1024, 8  # candidates of a row: by probability, and by probability with noise
TIES = 64  # candidates beyond the ``top_k`` most probable
SMALL_VOCABULARY = 16 * FILTERED  # up to this size the whole of it takes no longer
TEMPERATURES = (1e-3, 1e3)  # within these float32 neither overflows nor divides by 0
_WEIGHT_ERROR = 5e-5  # relative, of float32 sums of exp(x), for x from -90 to 0, whose own error dominates
_SCORE_ERROR = 1e-4  # absolute, of a float32 logit plus noise that may be a row's highest: such a logit is above -30
_ROUNDING = 1e-10  # more than the errors of float64: relative of weights and their sums, absolute of logits and noise


class TopCandidates(NamedTuple):
    """The candidates of each row, and bounds on all other tokens. Logits are those after the temperature, at most 0."""

    token_ids: Tensor  # int64 [R, K]
    logits: Tensor  # float64 [R, K], descending
    most: Tensor  # float64 [R, 1]: no other token has a higher logit
    weight: Tensor  # float64 [R, 1], the sum of exp(logit) of all other tokens, up to ``_WEIGHT_ERROR``


def drawn(
    logits_RV: Tensor, positions_R: Tensor, params: SamplingParams, stream: int = 0, count: int = FILTERED
) -> tuple[Tensor, Tensor]:
    """The sampled token of each row, int64 [R], and whether it is sure to be the right one, bool [R].

    Args:
        logits_RV: float32 or float64, before the temperature, which lies within ``TEMPERATURES``.
        positions_R: int64, as of ``Sampler.choose``, on the host.
        count: most candidates of a row, at most V.
    """
    assert params.seed is not None
    top_k = params.top_k if 0 < params.top_k < logits_RV.shape[-1] else 0
    if params.min_p <= 0 and params.top_p >= 1 and not top_k:
        return _drawn_unfiltered(logits_RV, positions_R, params.temperature, params.seed, stream)
    candidates = _most_probable(logits_RV, params.temperature, min(count, top_k + TIES) if top_k else count)
    kept_RK, is_sure_R = _kept(candidates, params.min_p, top_k, params.top_p)
    positions_R1 = to_device(positions_R, logits_RV.device)[:, None]
    scores_RK = candidates.logits + gumbel_of(params.seed, positions_R1, candidates.token_ids, stream)
    chosen_R, lead_R = _best(scores_RK.masked_fill(~kept_RK, -torch.inf), candidates.token_ids)
    return chosen_R, is_sure_R & (lead_R > _ROUNDING)


def least_kept(logits_RV: Tensor, params: SamplingParams, count: int) -> Tensor | None:
    """The lowest logit that the filters keep, after the temperature and less the row's highest: [R, 1]; None without filters.

    As of ``sampler.filtered``, except for rounding and for temperatures outside ``TEMPERATURES``. At most ``count`` tokens are
    kept.
    """
    top_k = params.top_k if 0 < params.top_k < logits_RV.shape[-1] else 0
    if params.min_p <= 0 and params.top_p >= 1 and not top_k:
        return None
    candidates = _most_probable(logits_RV, clamped_temperature(params.temperature), min(count, logits_RV.shape[-1]))
    kept_RK, _ = _kept(candidates, params.min_p, top_k, params.top_p)
    return candidates.logits.masked_fill(~kept_RK, 0).amin(-1, keepdim=True)


def clamped_temperature(temperature: float) -> float:
    """The nearest of ``TEMPERATURES``."""
    coldest, hottest = TEMPERATURES
    return min(max(temperature, coldest), hottest)


def _drawn_unfiltered(
    logits_RV: Tensor, positions_R: Tensor, temperature: float, seed: int, stream: int
) -> tuple[Tensor, Tensor]:
    """As ``drawn``, where every token may be drawn: the candidates are those that float32 ranks highest with their noise."""
    highest_R1, shifted_RV = _shifted(logits_RV)
    distinct_P, which_R = (to_device(part, logits_RV.device) for part in positions_R.unique(return_inverse=True))
    noise_PV = gumbel(seed, distinct_P, logits_RV.shape[-1], stream)
    ranked = shifted_RV.div_(temperature).add_(noise_PV.float().index_select(0, which_R)).topk(UNFILTERED)
    exact_RK = _tempered(logits_RV.gather(1, ranked.indices), highest_R1, temperature)
    chosen_R, lead_R = _best(exact_RK + noise_PV[which_R[:, None], ranked.indices], ranked.indices)
    is_ahead_R = ranked.values[:, 0] > ranked.values[:, -1] + 3 * _SCORE_ERROR
    return chosen_R, is_ahead_R & (lead_R > _ROUNDING)


def _most_probable(logits_RV: Tensor, temperature: float, count: int) -> TopCandidates:
    highest_R1, shifted_RV = _shifted(logits_RV)
    ranked = shifted_RV.topk(count)
    logits_RK, order_RK = _tempered(logits_RV.gather(1, ranked.indices), highest_R1, temperature).sort(descending=True)
    most_R1 = ranked.values[:, -1:].double() * (1 - torch.finfo(torch.float32).eps) / temperature
    weights_RV = shifted_RV.div_(temperature).exp_().scatter_(1, ranked.indices, 0)
    weight_R1 = weights_RV.sum(-1, keepdim=True).double()
    return TopCandidates(ranked.indices.gather(1, order_RK), logits_RK, most_R1, weight_R1)


def _shifted(logits_RV: Tensor) -> tuple[Tensor, Tensor]:
    """Each row's maximum, float64 [R, 1], and the logits less it, rounded to float32 [R, V]."""
    highest_R1 = logits_RV.amax(-1, keepdim=True)
    return highest_R1.double(), (logits_RV - highest_R1).float()


def _tempered(logits_RK: Tensor, highest_R1: Tensor, temperature: float) -> Tensor:
    """As ``sampler.tempered`` has them, float64."""
    return (logits_RK.double() - highest_R1) / temperature


def _kept(candidates: TopCandidates, min_p: float, top_k: int, top_p: float) -> tuple[Tensor, Tensor]:
    """Which candidates the filters keep, bool [R, K], and in which rows this is sure and no other token is kept, bool [R]."""
    logits_RK, most_R1 = candidates.logits, candidates.most
    kept_RK, unsure_RK = torch.ones_like(logits_RK, dtype=torch.bool), torch.zeros_like(logits_RK, dtype=torch.bool)
    is_closed_R1 = torch.isneginf(most_R1)  # whether no other token is left
    if min_p > 0:
        ratio_RK = logits_RK.exp() / min_p
        kept_RK = (ratio_RK >= 1) | (logits_RK == 0)
        unsure_RK = ((ratio_RK - 1).abs() < _ROUNDING) & (logits_RK < 0)
        is_closed_R1 = is_closed_R1 | (most_R1.exp() < min_p * (1 - _ROUNDING))
    if top_k:
        last_R1 = logits_RK[:, top_k - 1 : top_k] if top_k <= logits_RK.shape[1] else most_R1
        kept_RK = kept_RK & (logits_RK >= last_R1)
        is_closed_R1 = is_closed_R1 | (most_R1 < last_R1)
    if top_p < 1:
        if min_p > 0 or top_k:  # what is left of the others is not known
            unsure_RK = unsure_RK | ~is_closed_R1
        last_R1, is_sure_R1 = _last_of_mass(candidates, kept_RK, is_closed_R1, top_p)
        unsure_RK = unsure_RK | ~is_sure_R1 | ((logits_RK < last_R1) & (logits_RK > last_R1 - _ROUNDING))
        kept_RK = kept_RK & (logits_RK >= last_R1)
        is_closed_R1 = is_closed_R1 | (most_R1 < last_R1 - _ROUNDING)
    return kept_RK, is_closed_R1[:, 0] & ~unsure_RK.any(-1)


def _last_of_mass(candidates: TopCandidates, kept_RK: Tensor, is_closed_R1: Tensor, mass: float) -> tuple[Tensor, Tensor]:
    """The lowest logit in the smallest set of tokens whose probability is at least ``mass``, [R, 1], and whether it is sure."""
    weights_RK = candidates.logits.exp() * kept_RK
    sums_RK, others_R1 = weights_RK.cumsum(-1), candidates.weight * ~is_closed_R1
    inside_R1 = sums_RK[:, -1:]
    least_R1 = mass * (inside_R1 + others_R1 * (1 - _WEIGHT_ERROR)) * (1 - _ROUNDING)
    greatest_R1 = mass * (inside_R1 + others_R1 * (1 + _WEIGHT_ERROR)) * (1 + _ROUNDING)
    fewest_R1, most_R1 = (
        (kept_RK & (sums_RK - weights_RK < bound_R1)).sum(-1, keepdim=True) for bound_R1 in (least_R1, greatest_R1)
    )
    is_sure_R1 = (fewest_R1 == most_R1) & (is_closed_R1 | (inside_R1 > greatest_R1))
    return candidates.logits.gather(1, fewest_R1 - 1), is_sure_R1


def _best(scores_RK: Tensor, token_ids_RK: Tensor) -> tuple[Tensor, Tensor]:
    """The token with the highest score of each row, int64 [R], and by how much it leads the next, [R]."""
    best = scores_RK.topk(2)
    return token_ids_RK.gather(1, best.indices[:, :1])[:, 0], best.values[:, 0] - best.values[:, 1]
