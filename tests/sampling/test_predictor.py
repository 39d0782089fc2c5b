"""Predictions of the tokens that a request will choose: with the target's own logits, each of them comes first."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from support.examples import examples
from torch import Tensor

from pipedec.core.sampling import SamplingParams
from pipedec.sampling import Sampler, TokenPredictor, filtered

CPU = torch.device("cpu")
PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.05, 0.3, 1.0, 1.7]),
    top_k=st.sampled_from([0, 0, 1, 3, 10, 300]),
    top_p=st.sampled_from([1.0, 0.1, 0.5, 0.9]),
    min_p=st.sampled_from([0.0, 0.0, 0.01, 0.2, 1.0]),
    seed=st.integers(0, 2**64 - 1),
    logit_bias=st.sampled_from([None, {0: 2.0, 1: -100.0}]),
)


def logits_of(rows: int, vocab_size: int, seed: int, spread: float = 3) -> Tensor:
    return spread * torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed))


def sampled(logits: Tensor, positions: list[int], params: SamplingParams, stream: int) -> list[int]:
    """The tokens that the target draws."""
    path, token_ids = torch.zeros(len(logits), 1, dtype=torch.bool), torch.zeros(1, dtype=torch.int64)
    sampler = Sampler(structs.replace(params, logit_bias=None), logits.shape[-1], stream=stream)
    return sampler.choose(logits.double(), torch.tensor(positions), path, token_ids).tolist()


@examples(150)
@given(
    PARAMS,
    st.integers(2, 250),
    st.lists(st.tuples(st.lists(st.integers(0, 90), min_size=1, max_size=6), st.sampled_from([0, 1, 2**32 - 1])), min_size=1),
    st.integers(0, 1000),
)
def test_of_the_tokens_that_are_kept_the_sampled_one_is_the_best(
    params: SamplingParams, vocab_size: int, calls: list[tuple[list[int], int]], seed: int
) -> None:
    """At positions in any order, of several threads. Without filters it is the best of all."""
    predictor = TokenPredictor(params, vocab_size, CPU)
    for number, (positions, stream) in enumerate(calls):
        logits = logits_of(len(positions), vocab_size, seed + number)
        predicted = predictor.log_probs(logits.double().log_softmax(-1), positions, stream)
        torch.testing.assert_close(predicted.exp().sum(-1), torch.ones(len(positions), dtype=torch.float64))
        if params.logit_bias:
            logits[:, :2] += torch.tensor([2.0, -100.0])
        kept = filtered(logits.double(), params).isfinite() if params.is_stochastic else torch.ones_like(logits).bool()
        lead = (
            predicted.where(kept, -torch.inf).amax(-1) - predicted[range(len(logits)), sampled(logits, positions, params, stream)]
        )
        assert lead.max() < 1e-4, "what noise in float32 can decide"


def test_a_temperature_that_overflows_is_a_low_one() -> None:
    predicted = TokenPredictor(SamplingParams(1e-300, seed=1), 40, CPU).log_probs(logits := logits_of(3, 40, 1), [1, 2, 3], 0)
    assert predicted.argmax(-1).tolist() == logits.argmax(-1).tolist() and bool(predicted.exp().sum(-1).isfinite().all())


def test_tokens_that_the_filters_drop_are_less_probable_and_not_impossible() -> None:
    """Twice as far below the last that is kept."""
    probabilities = torch.tensor([[0.5, 0.3, 0.15, 0.05]])
    plain, half = (
        TokenPredictor(SamplingParams(0.5, seed=2, top_p=top_p), 4, CPU).log_probs(probabilities.log(), [7], 0)
        for top_p in (1, 0.8)
    )
    raised = probabilities.square().log()
    dropped = (raised[:, 1] - raised[:, 2:]).squeeze()
    torch.testing.assert_close((plain - half)[0, 2:] - (plain - half)[0, 1], dropped)
    torch.testing.assert_close((plain - half)[0, 0], (plain - half)[0, 1])


def test_a_draft_that_knows_few_tokens_has_their_noise() -> None:
    """Its first token, which stands for unknown ones, and tokens that are not allowed remain impossible, as does a whole row."""
    params = SamplingParams(0.8, seed=4)
    tokens = torch.randperm(3000, generator=torch.Generator().manual_seed(1))[:2000]
    of_draft, positions = logits_of(40, len(tokens), 2).log_softmax(-1), list(range(7, 47))
    of_draft[:, :30], of_draft[-1] = -torch.inf, -torch.inf
    predicted = TokenPredictor(params, 3000, CPU, tokens).log_probs(of_draft, positions, 9)
    of_target = torch.full((40, 3000), -torch.inf).index_copy(1, tokens, of_draft)
    assert tokens[predicted.argmax(-1)].tolist()[:-1] == sampled(of_target[:-1], positions[:-1], params, 9)
    assert bool(predicted[:, :30].isneginf().all()) and bool(predicted[-1].isneginf().all())
