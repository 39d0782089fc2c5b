"""Experts of a layer: the same numbers as transformers' own function, and a row's result in any company."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from architectures.zoo import tiny_config
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from transformers import AutoModelForCausalLM

from pipedec.families.skeleton import has_experts
from pipedec.model.experts import ExpertMatrices, Experts, tiles_of
from pipedec.model.matrices import DenseMatrix, Products

pytestmark = pytest.mark.numbers
EXPERTS, TOP_K, ROWS, SIZE = 8, 2, 5, 64


def module_of(model_type: str) -> Any:
    """The first module of experts of a tiny model, whose own function adds experts in ascending order."""
    model = AutoModelForCausalLM.from_config(tiny_config(model_type), experts_implementation="eager")
    module = next(filter(has_experts, model.modules()))
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return module.requires_grad_(False)


def experts_of(module: Any, products: Products) -> Experts:
    stacks = {name: stack.mT if module.is_transposed else stack for name, stack in module.named_parameters() if stack.dim() == 3}
    return Experts(products, {name: ExpertMatrices(list(map(DenseMatrix, stack))) for name, stack in stacks.items()})


@pytest.fixture
def routed() -> tuple[Tensor, Tensor, Tensor]:
    """Rows, the experts of each, and their weights."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.stack([torch.randperm(EXPERTS, generator=generator)[:TOP_K] for _ in range(ROWS)])
    return torch.randn(ROWS, SIZE, generator=generator), ids, torch.rand(ROWS, TOP_K, generator=generator)


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss", "aria_text"])
def test_experts_give_what_the_modules_own_function_gives(model_type: str, routed: tuple[Tensor, Tensor, Tensor]) -> None:
    """With biases and with matrices that are transposed, too."""
    module = module_of(model_type)
    found, expected = experts_of(module, Products())(module, *routed), module(*routed)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert float(expected.abs().max()) > 0.01


def test_a_row_has_the_same_result_in_any_company(routed: tuple[Tensor, Tensor, Tensor]) -> None:
    module, products = module_of("qwen3_moe"), Products()
    products.pad_rows = True
    experts = experts_of(module, products)
    together = experts(module, *routed)
    assert experts.num_read == len(routed[1].unique()) > TOP_K
    for row in range(ROWS):
        alone = experts(module, *(one[row : row + 1] for one in routed))
        assert torch.equal(alone[0], together[row]) and experts.num_read == TOP_K


def test_the_order_of_a_rows_experts_does_not_matter(routed: tuple[Tensor, Tensor, Tensor]) -> None:
    """They are added in ascending order, as transformers adds them one expert after the other."""
    module = module_of("gpt_oss")
    experts, (rows, ids, weights) = experts_of(module, Products()), routed
    assert torch.equal(experts(module, rows, ids.flip(1), weights.flip(1)), experts(module, rows, ids, weights))


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss", "aria_text"])
def test_captured_experts_leave_padding_out(model_type: str, routed: tuple[Tensor, Tensor, Tensor]) -> None:
    """Rows before padding, by operations whose number depends on shapes alone."""
    module, (rows, ids, weights) = module_of(model_type), routed
    experts, num_rows = experts_of(module, Products()), torch.tensor([ROWS - 2], dtype=torch.int32)
    expected = experts(module, *(one[: ROWS - 2] for one in routed))
    num_read = experts.num_read
    found = make_fx(lambda *inputs: experts(module, *inputs))(rows, ids, weights, num_rows)(rows, ids, weights, num_rows)
    torch.testing.assert_close(found[: ROWS - 2], expected, rtol=1e-5, atol=1e-5)
    experts(module, *routed, num_rows)
    assert int(experts.num_read) == num_read


@pytest.mark.parametrize("counts", [[0, 3, 0, 17, 16, 1], [0, 0, 0, 0, 0, 0], [64, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1]])
def test_tiles_hold_all_pairs_of_one_expert(counts: list[int]) -> None:
    """And there are enough, whatever experts the pairs have."""
    tiles = tiles_of(torch.tensor(counts), 64, 16).tolist()
    found = [(expert, row + place) for expert, row, count in tiles if expert >= 0 for place in range(count)]
    firsts = [sum(counts[:expert]) for expert in range(len(counts))]
    assert found == [(expert, firsts[expert] + place) for expert, count in enumerate(counts) for place in range(count)]
    assert len(tiles) == 64 // 16 + len(counts) and all(count <= 16 for _, _, count in tiles)
