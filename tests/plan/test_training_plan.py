"""The plan of a training over stages: what autograd keeps is counted, and every rank of a partition is shown."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from support.checkpoints import save_tiny
from torch import Tensor

from pipedec.cli.launch import plan as command
from pipedec.families import model_by_name, model_config
from pipedec.plan.training import kept_bytes, training_cut
from pipedec.train.continuations import Continuation
from pipedec.train.mask_rows import Learned, TargetLayers, mask_rows

TOKENS, ROWS, PROMPT_TOKENS, MASKS = 40, 12, 5, 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_layer_keeps_for_backward_is_counted(dtype: torch.dtype, tmp_path: Path) -> None:
    found = []
    for layers in (1, 3):
        model = save_tiny("llama", tmp_path / str(layers), layers=layers, hidden=256, heads=8).to(dtype).requires_grad_(False)
        target = TargetLayers(model)
        learned = Learned(target, MASKS, PROMPT_TOKENS, "deep", 0.5, seed=0)
        rows = mask_rows([Continuation([*range(1, 41)], 20)], [torch.arange(20, 24)], MASKS, PROMPT_TOKENS)
        _, past = target.token_pass(target.embedded(rows.tokens))
        weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        kept: dict[int, Tensor] = {}

        def keep(tensor: Tensor, weights: set[int] = weights, kept: dict[int, Tensor] = kept) -> Tensor:
            if (place := tensor.untyped_storage().data_ptr()) not in weights:
                kept[place] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            target.mask_pass(learned.masks.to(dtype)[rows.masks], learned.prompt, rows, past)
        found.append(sum(tensor.untyped_storage().nbytes() for tensor in kept.values()))
    expected = kept_bytes(model_config(tmp_path / "3"), range(2), dtype.itemsize, TOKENS, ROWS, PROMPT_TOKENS)
    assert found[1] - found[0] == pytest.approx(expected, rel=0.02)


def test_a_70b_is_cut_by_size_and_fits_fourteen_cards() -> None:
    model = model_by_name("llama-3.1-70b")
    spans = training_cut(model, 14)
    assert [len(span.layers) for span in spans] == [4, *[6] * 12, 4]  # the ends have the embeddings
    flags = ["cluster.yaml", "--partition", "7x2-3090", "--train", "bita"]
    result = CliRunner().invoke(command, flags, env={"COLUMNS": "120"}, catch_exceptions=False)
    assert "Training BiTA: llama-3.1-70b in bfloat16, GB and ms of 14 ranks" in result.output
    lines = [line.split() for line in result.output.splitlines()]
    ranks = [line for line in lines if len(line) > 2 and line[2] == "rtx3090"]
    assert [int(line[0]) for line in ranks] == list(range(14)) and ranks[13][4] == "76-79"
    assert all(float(line[-3]) < float(line[-2]) for line in ranks)
    assert result.exit_code == 0 and "128: " in result.output


def test_a_training_that_does_not_fit_is_refused() -> None:
    result = CliRunner().invoke(command, ["llama-3.1-70b", "--gpus", "4x3090", "--dtype", "bfloat16", "--train", "bita"])
    assert result.exit_code == 1 and "ranks 0, 1, 2, 3 lack memory for training" in str(result.exception)
