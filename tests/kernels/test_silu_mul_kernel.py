"""The kernel of an MLP's gate equals torch's operations."""

from __future__ import annotations

import pytest
import torch

kernels = pytest.importorskip("support.kernels")

from pipedec.model.kernels.silu_mul import reference, silu_mul  # noqa: E402

# Inner sizes, those of real models divided by 8: Llama 3.2 1B, Llama 3 8B, Qwen3 0.6B and 4B, Qwen2.5 0.5B; then uneven ones.
SIZES = (1024, 1792, 384, 1216, 608, 100, 1)
REAL_SIZES = (8192, 12288, 28672)
TOLERANCE = {torch.float64: 1e-14, torch.float32: 1e-6, torch.float16: 1e-3}  # a last bit


def launches(dtype: torch.dtype):
    """Launches at the shapes of Llama 3.2 1B, Qwen3 8B and Llama 3 70B."""
    with kernels.recorded() as found:
        for size in REAL_SIZES:
            silu_mul(torch.empty(8, 2 * size, dtype=dtype, device="meta"))
    return found


@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_gates_are_those_of_torch_and_a_row_alone_is_that_in_company(dtype):
    for size in SIZES:
        rows = 4 * torch.randn(3, 2 * size + 4, generator=torch.Generator().manual_seed(size), dtype=torch.float64).to(dtype)
        rows[0, 0], rows[1, 0] = -1e4, 1e4  # whose exponentials are not finite
        gate_up = rows[:, : 2 * size]
        with kernels.interpreted():
            found, alone = silu_mul(gate_up), silu_mul(gate_up[1:2])
        torch.testing.assert_close(found, reference(gate_up), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
        assert torch.equal(alone, found[1:2])
