"""Choosing among a few candidates gives the tokens of the whole vocabulary, wherever it says that it is sure."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import naive_sampling
from support.counted_device import DEVICE, CountedDevice, Marked
from support.examples import examples
from torch import Tensor

from pipedec.core.sampling import SamplingParams
from pipedec.sampling import Sampler, filtered, greedy
from pipedec.sampling.candidates import SMALL_VOCABULARY, drawn
from pipedec.sampling.noise import gumbel
from pipedec.sampling.sampler import top_p

FEW = 16  # candidates
PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.05, 0.3, 0.7, 1.0, 5.0]),
    top_k=st.sampled_from([0, 0, 1, 3, 10, 16, 20, 300]),
    top_p=st.sampled_from([1.0, 0.1, 0.5, 0.9, 0.999]),
    min_p=st.sampled_from([0.0, 0.0, 0.01, 0.2, 1.0]),
    seed=st.integers(0, 2**64 - 1),
)


def logits_of(kind: str, vocab_size: int, seed: int) -> Tensor:
    """Float32 [6, V]."""
    noise = torch.randn(6, vocab_size, generator=torch.Generator().manual_seed(seed))
    return {
        "smooth": noise,
        "peaked": 6 * noise,
        "far apart": 60 * noise,
        "flat": torch.zeros_like(noise),
        "tied": (2 * noise).round() / 2,
        "few allowed": noise.masked_fill((noise < 1.5) & (noise < noise.amax(-1, keepdim=True)), -torch.inf),
    }[kind]


def by_definition(logits: Tensor, positions: Tensor, params: SamplingParams) -> Tensor:
    """From the filtered logits of the whole vocabulary, in float64."""
    assert params.seed is not None
    noise = torch.cat([gumbel(params.seed, position[None], logits.shape[-1]) for position in positions])
    return greedy(filtered(logits.double(), params) + noise)


@examples(400)
@given(
    PARAMS,
    st.sampled_from(["smooth", "peaked", "far apart", "flat", "tied", "few allowed"]),
    st.integers(0, 10_000),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_what_is_sure_is_what_the_whole_vocabulary_gives(
    params: SamplingParams, kind: str, seed: int, dtype: torch.dtype
) -> None:
    logits, positions = logits_of(kind, 40 + seed % 300, seed).to(dtype), torch.arange(6) // 2 + 3
    chosen, is_sure = drawn(logits, positions, params, count=FEW)
    assert torch.equal(chosen[is_sure], by_definition(logits, positions, params)[is_sure])


@pytest.mark.parametrize(
    ("params", "kind", "expected"),
    [
        (SamplingParams(1.0, seed=1), "smooth", True),  # without filters the noise decides, and it is never flat
        (SamplingParams(0.3, top_p=0.9, seed=1), "peaked", True),
        (SamplingParams(1.0, top_p=0.9, seed=1), "smooth", False),  # the candidates have too little of the mass
        (SamplingParams(1.0, min_p=0.001, seed=1), "smooth", False),  # others are probable enough, too
        (SamplingParams(1.0, top_k=5, seed=1), "smooth", True),
        (SamplingParams(1.0, top_k=5, seed=1), "flat", False),  # others tie with the last
        (SamplingParams(1.0, top_k=200, seed=1), "smooth", False),  # more than there are candidates
        (SamplingParams(1.0, top_k=200, top_p=0.01, seed=1), "smooth", False),  # of what others have is not known what is left
    ],
    ids=lambda value: str(value) if isinstance(value, str) else "",
)
def test_it_is_sure_where_it_can_be_and_only_there(params: SamplingParams, kind: str, expected: bool) -> None:
    _, is_sure = drawn(logits_of(kind, 4000, 5), torch.arange(6), params, count=FEW)
    assert is_sure.tolist() == 6 * [expected]


def test_a_mass_that_rounding_decides_is_not_sure() -> None:
    """Eight equal tokens: half of the mass are exactly four of them, and all are kept because they tie."""
    logits = torch.full((1, 2000), -200.0)
    logits[0, :8] = 0
    for mass, expected in ((0.5, False), (0.51, True)):
        _, is_sure = drawn(logits, torch.tensor([3]), SamplingParams(1.0, top_p=mass, seed=2), count=FEW)
        assert is_sure.tolist() == [expected]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(1.0, seed=3),
        SamplingParams(0.7, top_p=0.9, seed=3),
        SamplingParams(0.9, top_k=40, top_p=0.95, min_p=0.02, seed=3),
        SamplingParams(0.8, top_p=0.9, seed=3, repetition_penalty=1.3, frequency_penalty=0.5, logit_bias={5: 3.0, 9: -100.0}),
    ],
    ids=lambda params: f"{params.top_k} {params.top_p} {params.has_penalties}",
)
def test_in_a_large_vocabulary_rows_that_are_not_sure_are_chosen_from_all_of_it(params: SamplingParams) -> None:
    vocab_size, tree = SMALL_VOCABULARY + 77, torch.tensor([4, 700, 5, 5, 9, 2])
    logits = torch.cat([logits_of(kind, vocab_size, 1)[:2] for kind in ("peaked", "flat", "smooth")])
    mask, positions = torch.ones(6, 6, dtype=torch.bool).tril(), torch.arange(6) + 8
    prompt, accepted = list(range(50)), [5, 5, 60]
    sampler = Sampler(params, vocab_size)
    sampler.add_prompt(torch.tensor(prompt))
    sampler.add_accepted(torch.tensor(accepted))
    changed = [
        naive_sampling.changed(row, prompt, [*accepted, *tree[path].tolist()], params)
        for row, path in zip(logits.tolist(), mask, strict=True)
    ]
    expected = by_definition(torch.tensor(changed, dtype=torch.float64), positions, params)
    assert torch.equal(sampler.choose(logits, positions, mask, tree), expected)


def test_top_p_sorts_more_where_the_most_probable_lack_the_mass() -> None:
    logits = torch.cat([torch.zeros(1, 3000), torch.linspace(0, -300, 3000)[None]]).double()
    for mass in (0.3, 0.9):
        kept = (top_p(logits, mass) > -torch.inf).sum(-1)
        assert kept.tolist() == [3000, int((logits[1].softmax(-1).cumsum(-1) < mass).sum()) + 1]
    ramp = torch.linspace(0, -1, 3000)[None].double()
    assert int((top_p(ramp, 0.9) > -torch.inf).sum()) == int((ramp[0].softmax(-1).cumsum(-1) < 0.9).sum()) + 1 > 2000


class HostIndices(CountedDevice):
    """Also counts indices on the host into tensors of the device, whose copies it would wait for."""

    def __init__(self) -> None:
        super().__init__()
        self.host_indices = 0

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if getattr(func, "__name__", "") in ("__getitem__", "__setitem__") and isinstance(args[0], Marked):
            indices = args[1] if isinstance(args[1], tuple) else (args[1],)
            self.host_indices += any(isinstance(index, list | Tensor) and not isinstance(index, Marked) for index in indices)
        return super().__torch_function__(func, types, args, kwargs)


@pytest.mark.parametrize("vocab_size", [500, SMALL_VOCABULARY + 1])
@pytest.mark.parametrize(("top_p", "min_p"), [(1.0, 0.0), (0.8, 0.0), (1.0, 0.1)])
def test_the_host_waits_once_for_the_device_and_sends_it_no_indices_that_block(
    vocab_size: int, top_p: float, min_p: float
) -> None:
    params = SamplingParams(0.3, top_p=top_p, min_p=min_p, seed=3, presence_penalty=0.5)
    with HostIndices() as mode:
        logits, tree, mask = (
            part.to(DEVICE)
            for part in (logits_of("peaked", vocab_size, 1), torch.arange(6), torch.ones(6, 6, dtype=torch.bool).tril())
        )
        sampler = Sampler(params, vocab_size, DEVICE)
        sampler.add_prompt(torch.arange(9).to(DEVICE))
        assert isinstance(sampler.choose(logits, torch.arange(6) + 9, mask, tree), Marked)
        assert mode.reads.total() == (vocab_size > SMALL_VOCABULARY) and not mode.mixed and not mode.host_indices
