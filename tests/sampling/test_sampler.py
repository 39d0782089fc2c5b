"""Choosing tokens: the fixed rule for ties, exact draws, penalties, biases."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import asdict
from support import naive_sampling
from support.examples import examples
from torch import Tensor

from pipedec.core.sampling import SamplingParams
from pipedec.sampling import Sampler, greedy

FEW_VALUES = st.sampled_from([-2.0, 0.0, 0.5, 3.0])  # so that ties are common
NUM_DRAWS = 20_000
VOCABULARY = 24
LOGITS = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(1))
LEAST_P_VALUE = 1e-4

NOTHING = torch.zeros(0, dtype=torch.int64)


@given(
    st.lists(st.lists(FEW_VALUES, min_size=7, max_size=7), min_size=1, max_size=5),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_greedy_takes_the_lowest_of_the_likeliest(rows: list[list[float]], dtype: torch.dtype) -> None:
    assert greedy(torch.tensor(rows, dtype=dtype)).tolist() == [row.index(max(row)) for row in rows]


def test_ties_in_a_large_vocabulary() -> None:
    logits = torch.zeros(3, 128_256)
    logits[1, [70_000, 5, 128_000]] = 1.0
    assert greedy(logits).tolist() == [0, 5, 0]


def draws(params: SamplingParams, seeds: range = range(50)) -> Tensor:
    """How often each token is drawn, at positions from 7 on, in ``NUM_DRAWS`` draws."""
    per_seed = NUM_DRAWS // len(seeds)
    positions = torch.arange(7, 7 + per_seed)
    counts = torch.zeros(VOCABULARY, dtype=torch.float64)
    for seed in seeds:
        values = {**asdict(params), "seed": seed}
        sampler = Sampler(SamplingParams(**values), VOCABULARY)
        chosen = sampler.choose(LOGITS.expand(per_seed, -1), positions, torch.zeros(per_seed, 0, dtype=torch.bool), NOTHING)
        counts += torch.bincount(chosen, minlength=VOCABULARY)
    return counts


def p_value(counts: Tensor, probabilities: Tensor) -> float:
    """Pearson's chi-square test; tokens expected fewer than five times count as one."""
    expected = probabilities * counts.sum()
    is_rare = expected < 5
    observed = torch.cat([counts[~is_rare], counts[is_rare].sum()[None]])
    expected = torch.cat([expected[~is_rare], expected[is_rare].sum()[None]])
    observed, expected = observed[expected > 0], expected[expected > 0]
    statistic = ((observed - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(expected) - 1) / 2, dtype=torch.float64), statistic / 2))


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(1.0, seed=0),
        SamplingParams(0.6, top_k=8, top_p=0.9, seed=0),
        SamplingParams(0.9, top_k=12, top_p=0.95, min_p=0.02, seed=0),
    ],
    ids=lambda params: f"{params.temperature} {params.top_k} {params.top_p} {params.min_p}",
)
def test_draws_have_exactly_the_distribution_after_the_filters(params: SamplingParams) -> None:
    expected = torch.tensor(naive_sampling.probabilities(LOGITS.tolist(), params), dtype=torch.float64)
    counts = draws(params)
    assert not counts[expected == 0].any()
    assert p_value(counts, expected) > LEAST_P_VALUE


PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.7, 1.0]),
    top_k=st.sampled_from([0, 3]),
    top_p=st.sampled_from([1.0, 0.9]),
    seed=st.integers(0, 2**64 - 1),
    repetition_penalty=st.sampled_from([1.0, 0.5, 1.3]),
    presence_penalty=st.sampled_from([0.0, 2.0, -0.6]),
    frequency_penalty=st.sampled_from([0.0, -1.0, 0.9]),
    logit_bias=st.none() | st.dictionaries(st.integers(0, 8), st.sampled_from([-100.0, 3.5, -0.7]), max_size=3),
)


@examples(200)
@given(PARAMS, st.integers(0, 10_000))
def test_every_row_is_chosen_as_its_path_alone_would_be(params: SamplingParams, seed: int) -> None:
    """A prompt in chunks, accepted tokens, and a small tree with two branches of repeated tokens."""
    generator = torch.Generator().manual_seed(seed)
    prompt = torch.randint(9, (6,), generator=generator)
    accepted, tree = torch.randint(9, (4,), generator=generator), torch.randint(9, (5,), generator=generator)
    mask = torch.tensor([[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 1, 0, 1, 0], [1, 0, 1, 0, 1]], dtype=torch.bool)
    logits = torch.randn(5, 9, generator=generator) * 3
    positions = 10 + mask.sum(1)
    expected = []
    for row, path in zip(logits.tolist(), mask, strict=True):
        said = [*accepted.tolist(), *tree[path].tolist()]
        expected.append(naive_sampling.choose(row, prompt.tolist(), said, params))
    if params.is_plainly_greedy:
        assert greedy(logits).tolist() == expected
        return
    sampler = Sampler(params, 9)
    for chunk in (prompt[:4], prompt[4:]):
        sampler.add_prompt(chunk)
    for tokens in (accepted[:0], accepted[:3], accepted[3:]):
        sampler.add_accepted(tokens)
    assert sampler.choose(logits, positions, mask, tree).tolist() == expected
    few = torch.tensor([1, 4])  # in other company the rows get the same tokens
    assert sampler.choose(logits[few], positions[few], mask[few], tree).tolist() == [expected[1], expected[4]]


def test_a_seed_is_drawn_where_one_is_needed() -> None:
    drawn = {SamplingParams(0.5).seeded().seed for _ in range(20)}
    assert len(drawn) == 20 and all(seed is not None and 0 <= seed < 2**53 for seed in drawn)
    assert SamplingParams(0.5, seed=7).seeded().seed == 7 and SamplingParams().seeded().seed is None
    with pytest.raises(ValueError, match="needs a seed"):
        Sampler(SamplingParams(0.5), 9)


def test_a_stream_draws_with_noise_of_its_own() -> None:
    positions = torch.arange(7, 57)
    arguments = LOGITS.expand(50, -1), positions, torch.zeros(50, 0, dtype=torch.bool), NOTHING
    params = SamplingParams(1.0, seed=3)
    plain, *others = [Sampler(params, VOCABULARY, stream=stream).choose(*arguments).tolist() for stream in (0, 1, 2**32 - 1)]
    assert plain == Sampler(params, VOCABULARY).choose(*arguments).tolist()
    assert all(other != plain for other in others) and others[0] != others[1]
