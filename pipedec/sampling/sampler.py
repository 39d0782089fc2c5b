"""Choosing a token from the target's logits: greedily, or sampled with noise that depends only on seed, thread and position.

Penalties, temperature, and the filters min-p, top-k and top-p map logits to logits. Filters set excluded tokens to −inf. Equally
probable tokens are kept or excluded together, so no result depends on how a sort breaks ties. Parameters that exclude nothing
return the logits unchanged. ``History`` owns the token counts of the prompt and of the accepted output; the tokens on a row's
path in the tree are passed with the row. Knows no model.

Shapes: R rows, N tree slots, V vocabulary, P distinct positions, K sorted tokens, T tokens, some of them repeatedly.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pipedec.core.sampling import SamplingParams, check_token_ids
from pipedec.device import to_device, to_host
from pipedec.sampling.candidates import SMALL_VOCABULARY, TEMPERATURES, drawn
from pipedec.sampling.noise import gumbel

_USUALLY_ENOUGH = 1024  # tokens that are sorted; more only if they do not have the mass
_ROUNDING = 1e-10  # more than the error of a sum of probabilities


def tempered(logits_RV: Tensor, temperature: float) -> Tensor:
    """Logits divided by ``temperature``, which is above 0. Each row's maximum is first shifted to 0 to prevent overflow."""
    return (logits_RV - logits_RV.amax(-1, keepdim=True)) / temperature


def min_p(logits_RV: Tensor, ratio: float) -> Tensor:
    """Keep tokens whose probability is at least ``ratio`` times that of the most probable token."""
    if ratio <= 0:
        return logits_RV
    probabilities_RV = logits_RV.softmax(-1)
    return _without(logits_RV, probabilities_RV < ratio * probabilities_RV.amax(-1, keepdim=True))


def top_k(logits_RV: Tensor, count: int) -> Tensor:
    """Keep the ``count`` most probable tokens and those that tie with the last of them; 0 or −1 keeps all."""
    if not 0 < count < logits_RV.shape[-1]:
        return logits_RV
    return _without(logits_RV, logits_RV < logits_RV.topk(count).values[:, -1:])


def top_p(logits_RV: Tensor, mass: float, count: int = 0) -> Tensor:
    """Keep the smallest set of most probable tokens whose total probability is at least ``mass``, and ties with the last.

    ``count``: the ``top_k`` already applied to the logits, if any; then only that many tokens are sorted.
    """
    if mass >= 1:
        return logits_RV
    probabilities_RV = logits_RV.softmax(-1)
    vocab_size = logits_RV.shape[-1]
    count = min(count, vocab_size) if count > 0 else vocab_size
    sorted_RK = probabilities_RV.topk(min(count, _USUALLY_ENOUGH)).values
    if count > _USUALLY_ENOUGH and bool((sorted_RK.sum(-1) < mass + _ROUNDING).any()):
        sorted_RK = probabilities_RV.topk(count).values
    before_RK = sorted_RK.cumsum(-1) - sorted_RK
    last_R1 = (before_RK < mass).sum(-1, keepdim=True) - 1
    return _without(logits_RV, probabilities_RV < sorted_RK.gather(-1, last_R1.clamp(min=0)))


def _without(logits_RV: Tensor, dropped_RV: Tensor) -> Tensor:
    return logits_RV.masked_fill(dropped_RV, -torch.inf)


class History:
    """The tokens before the tree: which are in the prompt, and how often each one has been committed."""

    def __init__(self, vocab_size: int, device: torch.device | str) -> None:
        self._in_prompt_V = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        self._accepted_V = torch.zeros(vocab_size, dtype=torch.float64, device=device)
        self._seen_T = torch.zeros(0, dtype=torch.int64, device=device)  # tokens of both, in order of arrival

    def add_prompt(self, token_ids: Tensor) -> None:
        """Add a chunk of the prompt: int64 [any number]."""
        token_ids = to_device(token_ids, self._in_prompt_V.device)
        self._in_prompt_V[token_ids] = True
        self._seen_T = torch.cat((self._seen_T, token_ids))

    def add_accepted(self, token_ids: Tensor) -> None:
        """Add committed tokens: int64 [any number]; every repetition counts."""
        token_ids = to_device(token_ids, self._accepted_V.device)
        self._accepted_V.index_add_(0, token_ids, torch.ones_like(token_ids, dtype=self._accepted_V.dtype))
        self._seen_T = torch.cat((self._seen_T, token_ids))

    def penalised(self, logits_RV: Tensor, mask_RN: Tensor, token_ids_N: Tensor, params: SamplingParams) -> Tensor:
        """Logits after the repetition, frequency and presence penalties, float64.

        As in vLLM, the repetition penalty applies to tokens of prompt and output, the others to tokens of the output only.

        Args:
            mask_RN: bool, which tree slots are on a row's path, the row itself included.
            token_ids_N: int64, the tokens of the tree.
        """
        logits_RV, dtype = logits_RV.double(), self._accepted_V.dtype
        on_path_RN = mask_RN.to(dtype) @ (token_ids_N[:, None] == token_ids_N).to(dtype)  # how often on a row's path
        seen_RT = self._columns(logits_RV, self._seen_T, 0, params)
        of_tree_RN = self._columns(logits_RV, token_ids_N, on_path_RN, params)
        return logits_RV.index_copy(1, self._seen_T, seen_RT).index_copy_(1, token_ids_N, of_tree_RN)

    def _columns(self, logits_RV: Tensor, token_ids_T: Tensor, on_path: Tensor | int, params: SamplingParams) -> Tensor:
        """The logits of some tokens after the penalties, [R, T]."""
        counts = self._accepted_V[token_ids_T] + on_path
        in_output, repetition = counts > 0, params.repetition_penalty
        logits_RT = logits_RV.index_select(1, token_ids_T)
        repeated_RT = torch.where(logits_RT > 0, logits_RT / repetition, logits_RT * repetition)
        logits_RT = torch.where(in_output | self._in_prompt_V[token_ids_T], repeated_RT, logits_RT)
        return logits_RT - params.frequency_penalty * counts - params.presence_penalty * in_output


def greedy(logits_RV: Tensor) -> Tensor:
    """The most probable token of every row, int64 [R]; of tied tokens the lowest id, on every device."""
    return logits_RV.argmax(dim=-1)


class Sampler:
    """Chooses the tokens of one request. Order as in vLLM: bias, penalties, temperature, min-p, top-k, top-p, sampling.

    Sampling uses the Gumbel trick: the argmax of log-probability + Gumbel noise is an exact sample from the distribution. All
    rows of a decode thread at the same position share their noise.

    Args:
        stream: the noise stream of the decode thread (see ``gumbel``).

    Raises:
        UserError: ``logit_bias`` names a token that is not in the vocabulary.
        ValueError: the parameters are stochastic and have no seed.
    """

    def __init__(self, params: SamplingParams, vocab_size: int, device: torch.device | str = "cpu", stream: int = 0) -> None:
        if params.is_stochastic and params.seed is None:
            raise ValueError("stochastic sampling needs a seed: call SamplingParams.seeded() first")
        self._params = params
        self._stream = stream
        self._history = History(vocab_size, device) if params.has_penalties else None
        check_token_ids("logit_bias", params.logit_bias or (), vocab_size)
        self._bias_V = bias_of(params, vocab_size, device)

    def add_prompt(self, token_ids: Tensor) -> None:
        """Add a chunk of the prompt: int64 [any number]."""
        if self._history is not None:
            self._history.add_prompt(token_ids)

    def add_accepted(self, token_ids: Tensor) -> None:
        """Add committed tokens: int64 [any number]."""
        if self._history is not None:
            self._history.add_accepted(token_ids)

    def choose(self, logits_RV: Tensor, positions_R: Tensor, mask_RN: Tensor, token_ids_N: Tensor) -> Tensor:
        """The token that follows each row, int64 [R].

        Args:
            positions_R: int64, position ids of the tokens to be chosen, on the host.
            mask_RN: bool, which tree slots are on a row's path, the row itself included.
            token_ids_N: int64, the tokens of the tree.
        """
        if self._bias_V is not None:
            logits_RV = logits_RV + self._bias_V
        if self._history is not None:
            logits_RV = self._history.penalised(logits_RV, mask_RN, token_ids_N, self._params)
        coldest, hottest = TEMPERATURES
        is_drawn = self._params.is_stochastic and coldest <= self._params.temperature <= hottest
        if not is_drawn or logits_RV.shape[-1] <= SMALL_VOCABULARY:  # else it saves time to look at the likeliest tokens first
            return greedy(self._perturbed(logits_RV, positions_R))
        chosen_R, is_sure_R = drawn(logits_RV, positions_R, self._params, self._stream)
        unsure = (~is_sure_R).nonzero()[:, 0]
        if len(unsure):
            chosen_R[unsure] = greedy(self._perturbed(logits_RV[unsure], positions_R[to_host(unsure)]))
        return chosen_R

    def _perturbed(self, logits_RV: Tensor, positions_R: Tensor) -> Tensor:
        """[R, V], scores whose argmax is the token: filtered logits plus noise, or the logits alone if decoding is greedy."""
        params, logits_RV = self._params, logits_RV.double()
        if params.seed is None or not params.is_stochastic:
            return logits_RV
        distinct_P, which_R = (to_device(part, logits_RV.device) for part in positions_R.unique(return_inverse=True))
        noise_PV = gumbel(params.seed, distinct_P, logits_RV.shape[-1], self._stream)  # siblings share their noise
        return filtered(logits_RV, params) + noise_PV.index_select(0, which_R)


def bias_of(params: SamplingParams, vocab_size: int, device: torch.device | str) -> Tensor | None:
    """``logit_bias`` of every token, float64 [V]; None if there is none. Tokens outside the vocabulary are ignored."""
    if not params.logit_bias:
        return None
    bias_V = torch.zeros(vocab_size, dtype=torch.float64, device=device)
    for token, value in params.logit_bias.items():
        bias_V[token : token + 1] = value
    return bias_V


def filtered(logits_RV: Tensor, params: SamplingParams) -> Tensor:
    """The logits of the distribution that tokens are sampled from: temperature, min-p, top-k and top-p applied."""
    logits_RV = min_p(tempered(logits_RV, params.temperature), params.min_p)
    return top_p(top_k(logits_RV, params.top_k), params.top_p, params.top_k)
