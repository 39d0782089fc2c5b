"""The counter-based generator: the published answers, and nothing but seed, position and token matters."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipedec.sampling.noise import gumbel, gumbel_of, philox

ALL_ONES = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [  # kat_vectors of Random123
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ALL_ONES,) * 4, (ALL_ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_words(
    counter: tuple[int, int, int, int], key: tuple[int, int], words: tuple[int, ...]
) -> None:
    first, second, third, fourth = (torch.tensor([word]) for word in counter)
    assert tuple(int(word) for word in philox((first, second, third, fourth), key)) == words


@given(
    st.integers(0, 2**64 - 1),
    st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=40),
    st.integers(1, 70),
)
def test_every_row_has_the_noise_it_has_alone(seed: int, positions: list[int], vocab_size: int) -> None:
    together = gumbel(seed, torch.tensor(positions), vocab_size)
    assert together.shape == (len(positions), vocab_size) and bool(together.isfinite().all())
    for row, position in zip(together, positions, strict=True):
        torch.testing.assert_close(
            row, gumbel(seed, torch.tensor([position]), vocab_size + 5)[0, :vocab_size], rtol=0, atol=1e-12
        )


def test_a_token_has_the_noise_that_it_has_among_all() -> None:
    positions, token_ids = torch.tensor([3, 70, 3]), torch.tensor([[0, 5, 22], [21, 6, 6], [7, 1, 2]])
    for seed, stream in ((5, 0), (2**63 + 1, ALL_ONES)):
        among_all = gumbel(seed, positions, 23, stream).gather(1, token_ids)
        torch.testing.assert_close(gumbel_of(seed, positions[:, None], token_ids, stream), among_all, rtol=0, atol=1e-12)


def test_seed_position_and_stream_all_count() -> None:
    keys = [(seed, 0) for seed in (0, 1, 2**32, 2**63)] + [(4, stream) for stream in (0, 1, 2, ALL_ONES)]
    noise = torch.cat([gumbel(seed, torch.arange(3), 8, stream) for seed, stream in keys])
    assert len(noise.flatten().unique()) == noise.numel()
    assert torch.equal(gumbel(4, torch.arange(3), 8, 0), gumbel(4, torch.arange(3), 8))


def test_the_noise_has_the_moments_of_a_gumbel_distribution() -> None:
    noise = gumbel(5, torch.arange(1000), 1000)
    assert noise.mean().item() == pytest.approx(0.5772157, abs=0.005)  # Euler's constant; standard error 0.0013
    assert noise.var().item() == pytest.approx(torch.pi**2 / 6, abs=0.02)
