"""Products with packed matrices: the values, whatever the number and the strides of the rows, and which matrices are packed."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from support.checkpoints import stage_parameters
from torch import Tensor
from torch.nn import functional

from pipedec.core.limits import KNEE_ROWS
from pipedec.directories import reference_pair
from pipedec.families import model_config
from pipedec.model import KVCache, LaneRows, StageModel
from pipedec.model.matrices import PADDED_ROWS, SMALLEST_PACKED, DenseMatrix

TARGET = reference_pair() / "target"
ONEDNN = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch was built without oneDNN")


def a_matrix(outputs: int, inputs: int, seed: int = 0) -> Tensor:
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(seed))


@ONEDNN
@pytest.mark.parametrize(("outputs", "inputs"), [(193, 577), (1024, 512)])
@pytest.mark.parametrize("rows", [1, 2, 17, KNEE_ROWS, 300])
def test_values_are_those_of_plain_products(outputs: int, inputs: int, rows: int) -> None:
    weight, bias, values = a_matrix(outputs, inputs), a_matrix(1, outputs)[0], a_matrix(rows, inputs, seed=1)
    packed = DenseMatrix(weight).prepared()
    assert packed.weight_NK.is_mkldnn
    for given in (None, bias):
        exact = functional.linear(values.double(), weight.double(), None if given is None else given.double())
        torch.testing.assert_close(packed.linear(values, given).double(), exact, rtol=1e-5, atol=1e-4)
    strided = torch.cat((values, values), dim=1)[:, :inputs]
    assert torch.equal(packed.linear(strided), packed.linear(values))


@ONEDNN
def test_a_row_of_many_does_not_depend_on_their_number() -> None:
    """What ``pad_rows`` needs, on the CPUs that were measured."""
    values, packed = a_matrix(64, 512, seed=1), DenseMatrix(a_matrix(1024, 512)).prepared()
    whole = packed.linear(values)
    assert all(torch.equal(packed.linear(values[:rows]), whole[:rows]) for rows in range(PADDED_ROWS, 64))


def test_small_matrices_and_other_types_stay_as_they_are() -> None:
    small = DenseMatrix(a_matrix(SMALLEST_PACKED // 64 - 1, 64))
    assert small.prepared() is small
    for dtype in (torch.float64, torch.bfloat16):
        other = DenseMatrix(a_matrix(512, 512).to(dtype))
        assert other.prepared() is other


@ONEDNN
def test_a_stage_keeps_no_plain_copy_beside_what_it_packed() -> None:
    config = model_config(TARGET)
    stage = StageModel.load(TARGET, range(4, 6), torch.float32, "cpu", config)
    assert stage.stack.num_bytes == 4 * stage_parameters(TARGET, range(4, 6))
    cache = KVCache(stage.make_pool(16), ((0, 16),))
    with torch.profiler.profile() as profiled:
        stage.forward(torch.zeros(1, config.hidden_size), [LaneRows(torch.zeros(1).long(), cache, None, 1)])
    operations = Counter(event.name for event in profiled.events())
    assert operations["mkldnn::_linear_pointwise"] == 8 and not operations["aten::linear"]
