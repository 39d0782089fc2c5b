"""The kernel of norms and additions equals torch's operations, in every place in which a layer uses it."""

from __future__ import annotations

import pytest
import torch

kernels = pytest.importorskip("support.kernels")

from pipedec.model.kernels.add_rms_norm import add_rms_norm, reference  # noqa: E402

# Hidden sizes, those of real models divided by 32 or 64: Llama 3.2 1B, Llama 3 8B, Qwen3 0.6B and 14B, Phi 3 mini and medium.
SIZES = (64, 128, 32, 160, 96, 80)
REAL_SIZES = (2048, 4096, 8192)
PLACES = ("alone", "before", "after", "in place")
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-6, torch.float16: 2e-3}  # norms are in float32; a last bit of float16


def launches(dtype: torch.dtype):
    """Launches at the shapes of Llama 3.2 1B, Qwen3 8B and Llama 3 70B."""
    with kernels.recorded() as found:
        for size in REAL_SIZES:
            rows, weight = (torch.empty(shape, dtype=dtype, device="meta") for shape in ((8, size), (size,)))
            for place in PLACES:
                computed(add_rms_norm, rows, rows, weight, place)
    return found


def computed(norm, rows, other, weight, place):
    """The result, and the rows afterwards."""
    rows = rows.clone()
    if place == "in place":
        return norm(rows, weight, 1e-5, out_RX=rows), rows
    return norm(rows, weight, 1e-5, **({} if place == "alone" else {f"{place}_RX": other})), rows


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("place", PLACES)
def test_norms_are_those_of_torch_and_a_row_alone_is_that_in_company(place, dtype):
    generator = torch.Generator().manual_seed(3)
    for size in SIZES:
        rows, other = torch.randn(2, 5, size + 8, generator=generator).to(dtype)[:, :, 4:-4]  # rows of a wider tensor
        weight = torch.randn(size, generator=generator).to(dtype)
        with kernels.interpreted():
            found = computed(add_rms_norm, rows, other, weight, place)
            alone = computed(add_rms_norm, rows[3:4], other[3:4], weight, place)
        tolerance = TOLERANCE[dtype]
        torch.testing.assert_close(found, computed(reference, rows, other, weight, place), atol=tolerance, rtol=tolerance)
        assert all(torch.equal(part, whole[3:4]) for part, whole in zip(alone, found, strict=True))
