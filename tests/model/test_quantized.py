"""Matrices in 8 and 4 bits: near the weights they stand for, independent of how they are filled and of a row's company, small."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.checkpoints import save_tiny, stage_parameters
from support.examples import examples
from support.stage_chain import lone_cache
from torch.utils._python_dispatch import TorchDispatchMode

from pipedec.core.errors import UserError
from pipedec.families import ModelImpl, model_by_name, model_config
from pipedec.formats import ROUNDED, WeightFormat
from pipedec.model import LaneRows, StageModel
from pipedec.model.formats import base, empty_matrix, rounded
from pipedec.model.formats.rounded import Int4Matrix, RoundedMatrix
from pipedec.plan.costs import ModelCosts

KINDS = ["int8", "int4"]
DTYPES = [torch.float32, torch.bfloat16, torch.float64]


def random_weight(outputs: int, inputs: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(seed)) * 0.1 + 0.02


def filled(kind: str, weight: torch.Tensor, dtype: torch.dtype = torch.float32) -> RoundedMatrix:
    matrix = empty(kind, weight, dtype)
    matrix.fill({"weight": weight})
    return matrix


def empty(kind: str, weight: torch.Tensor, dtype: torch.dtype = torch.float32) -> RoundedMatrix:
    matrix = empty_matrix(ROUNDED[kind], *weight.shape, dtype, weight.device)
    assert isinstance(matrix, RoundedMatrix)
    return matrix


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("kind", "levels"), [("int8", 127), ("int4", 7.5)])
def test_weights_are_rounded_by_half_a_level_at_most(kind: str, levels: float, dtype: torch.dtype) -> None:
    weight = random_weight(48, 128).to(dtype)
    found = rounded(weight, kind)
    groups = 128 if kind == "int8" else 32
    spread = weight.unflatten(1, (-1, groups)).double()
    half_level = (spread.abs().amax(2) if kind == "int8" else (spread.amax(2) - spread.amin(2)) / 2) / levels / 2
    slack = 1 + 200 * torch.finfo(dtype).eps  # the scales and the weights of 0 are rounded, too
    assert found.dtype == dtype
    assert (
        (found - weight).double().abs().unflatten(1, (-1, groups)).amax(2) <= half_level * slack + torch.finfo(dtype).eps
    ).all()


@pytest.mark.parametrize("kind", KINDS)
def test_weights_on_the_grid_are_kept_and_equal_weights_too(kind: str) -> None:
    weight = torch.randint(-8, 8, (16, 64), generator=torch.Generator().manual_seed(1)).float()
    weight[:, ::32], weight[:, 1::32] = -8, 7
    torch.testing.assert_close(rounded(weight, "int4"), weight, atol=2e-6, rtol=0)
    for constant in (0.0, 0.25, -3.0):
        torch.testing.assert_close(rounded(torch.full((16, 64), constant), kind), torch.full((16, 64), constant))


@pytest.mark.parametrize("is_prepared", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_product_is_that_with_the_rounded_weights(kind: str, dtype: torch.dtype, is_prepared: bool) -> None:
    weight = random_weight(4112, 192)  # more than one slice, and blocks that the packing does not fill
    matrix = filled(kind, weight, dtype)
    exact = type(matrix)(matrix.format, (4112, 192), torch.float64, {**matrix.held, "scales": matrix.scales.double()})
    dense = exact.linear(torch.eye(192, dtype=torch.float64)).T.clone()
    if is_prepared:
        matrix.prepared()
    rows = random_weight(5, 192, 1).to(dtype)
    expected = rows.double() @ dense.T
    tolerance = {torch.float32: 1e-5, torch.float64: 1e-6, torch.bfloat16: 0.02}[dtype] * float(expected.abs().max())
    torch.testing.assert_close(matrix.linear(rows).double(), expected, atol=tolerance, rtol=0)


@examples(20)
@given(kind=st.sampled_from(KINDS), cuts=st.lists(st.integers(1, 20), min_size=2, max_size=4), inputs=st.sampled_from([64, 192]))
def test_parts_fill_a_matrix_like_the_whole(kind: str, cuts: list[int], inputs: int) -> None:
    weight = random_weight(sum(cuts), inputs)
    matrix = empty(kind, weight)
    for part, rows in zip(matrix.split(cuts), weight.split(cuts), strict=True):
        assert part.shape == rows.shape
        part.fill({"weight": rows})
    whole = filled(kind, weight)
    for found, expected in zip(matrix.tensors(), whole.tensors(), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_in_bfloat16_the_bits_of_a_row_do_not_depend_on_other_rows(kind: str) -> None:
    matrix = filled(kind, random_weight(208, 192), torch.bfloat16)
    matrix.prepared()
    rows = random_weight(100, 192, 1).bfloat16()
    together = matrix.linear(rows)
    for count in (1, 2, 3, 8, 17, 64, 99):
        assert torch.equal(matrix.linear(rows[:count]), together[:count])


class Allocations(TorchDispatchMode):
    """Counts the bytes of new tensors since ``restart``, whether or not they are freed again, and the most of any stretch."""

    def __init__(self) -> None:
        super().__init__()
        self._present = self.most = 0

    def restart(self) -> None:
        self._present = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not func.is_view and all(result is not one for one in args):
            self._present += result.nbytes
            self.most = max(self.most, self._present)
        return result


def between_calls(function: Callable[..., Any], allocations: Allocations) -> Callable[..., Any]:
    def called(*args: Any) -> Any:
        result = function(*args)
        allocations.restart()
        return result

    return called


def test_temporaries_of_a_large_matrix_stay_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gate and up projections of Llama 3.1 70B, which take 235 MB in 4 bits, on a device that computes nothing."""
    allocations, meta = Allocations(), torch.device("meta")
    monkeypatch.setitem(base.LOADED_VALUES, "meta", base.LOADED_VALUES["cuda"])
    monkeypatch.setattr(Int4Matrix, "rounded", between_calls(Int4Matrix.rounded, allocations))
    weight = torch.empty(57344, 8192, dtype=torch.bfloat16, device=meta)
    matrix = empty("int4", weight, torch.bfloat16)
    with allocations:
        matrix.fill({"weight": weight})
        matrix.prepared()
    assert 1_000_000 < allocations.most < 200_000_000


def test_int4_refuses_sizes_that_it_cannot_halve_into_groups(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    with pytest.raises(UserError, match=r"^int4 takes matrices whose inputs are a multiple of 64, not 32: use int8$"):
        StageModel.load(tmp_path, range(4), torch.float32, "cpu", quantize="int4")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_stages_take_the_bytes_that_a_plan_counts(tmp_path: Path, kind: str, dtype: str) -> None:
    save_tiny("llama", tmp_path, hidden=256, vocab=512, layers=2)
    shape, weights = model_by_name(str(tmp_path)), WeightFormat(dtype, kind)
    stage = StageModel.load(tmp_path, range(2), getattr(torch, dtype), "cpu", quantize=kind)
    planned = ModelCosts(shape, weights, rows=0, max_model_len=0, passage=1).weight_bytes(range(2), True, True)
    assert stage.stack.num_bytes == planned
    assert stage.stack.num_bytes < {"int8": 0.35, "int4": 0.27}[kind] * 4 * stage_parameters(tmp_path, range(2))


@pytest.mark.parametrize(
    ("kind", "family", "is_tied", "impl"),
    [
        ("int8", "llama", False, "pipedec"), ("int4", "qwen2", True, "pipedec"),
        ("int8", "qwen3", True, "transformers"), ("int4", "qwen3", False, "transformers"),
    ],
)  # fmt: skip
def test_stages_compute_with_the_rounded_weights_of_the_checkpoint(
    tmp_path: Path, kind: str, family: str, is_tied: bool, impl: ModelImpl
) -> None:
    model = save_tiny(family, tmp_path / "exact", hidden=64, head_dim=16, tie_word_embeddings=is_tied)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2:
                weight.copy_(rounded(weight, kind if ".layers." in name else "int8"))
    model.save_pretrained(tmp_path / "rounded")
    dense = StageModel.load(tmp_path / "rounded", range(4), torch.float32, "cpu")
    config = model_config(tmp_path / "exact", impl)
    quantized = StageModel.load(tmp_path / "exact", range(4), torch.float32, "cpu", config, quantize=kind)
    ids = torch.randint(0, 64, (20,), generator=torch.Generator().manual_seed(2))
    found, expected = (
        stage.logits(stage.forward(ids, [LaneRows(torch.arange(20), lone_cache(stage), None, 20)]))
        for stage in (quantized, dense)
    )
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=0)
