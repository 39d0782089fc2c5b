"""The files of a BiTA: saving and loading, and a one-line error for every file that does not fit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from architectures.zoo import save_model
from safetensors.torch import load_file, save_file
from support.bita_files import save_random_bita
from support.checkpoints import save_tiny_llama
from torch import Tensor

from pipedec.checkpoints import fingerprint
from pipedec.core.errors import UserError
from pipedec.families import model_config
from pipedec.model import BitaConfig, BitaWeights, checked_bita, load_markov
from pipedec.model.bita import MAX_MASKS
from pipedec.model.markov import NAMES

LAYERS, MASKS, PROMPT_TOKENS, RANK = 4, 3, 5, 6
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "target"
    save_tiny_llama(path, layers=LAYERS)
    return path


@pytest.fixture
def bita(target: Path, tmp_path: Path) -> Path:
    save_random_bita(tmp_path / "bita", target, MASKS, PROMPT_TOKENS, markov_rank=RANK)
    return tmp_path / "bita"


def refused(directory: Path, target: Path) -> str:
    """The one-line error of ``checked_bita``."""
    with pytest.raises(UserError) as caught:
        checked_bita(directory, target)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500
    return str(caught.value)


@pytest.mark.parametrize(("num_masks", "num_prompt_tokens"), [(1, 0), (3, 5), (MAX_MASKS, 1)])
def test_what_was_saved_is_loaded(target: Path, tmp_path: Path, num_masks: int, num_prompt_tokens: int) -> None:
    """All layers or those of one stage, in the stage's dtype."""
    saved = save_random_bita(tmp_path / "a" / "b", target, num_masks, num_prompt_tokens, markov_rank=RANK)
    described = checked_bita(tmp_path / "a" / "b", target)
    assert described == BitaConfig.from_directory(tmp_path / "a" / "b")
    prompting = "deep" if num_prompt_tokens else "none"
    assert described == BitaConfig(fingerprint(target), num_masks, num_prompt_tokens, prompting, RANK)
    config = model_config(target)
    for layers in (range(LAYERS), range(1), range(1, 3), range(3, 4)):
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            loaded = BitaWeights.load(tmp_path / "a" / "b", config, layers, dtype, CPU)
            assert loaded.num_masks == num_masks
            assert torch.equal(loaded.prompt, saved.prompt[layers.start : layers.stop].to(dtype))
            assert torch.equal(loaded.masks, saved.masks.to(dtype))


def test_the_markov_table_is_loaded_where_there_is_one(target: Path, bita: Path) -> None:
    config = model_config(target)
    stored, table = load_file(bita / "model.safetensors"), load_markov(bita, config)
    assert table is not None
    previous, following, gates = (stored[name].numpy() for name in NAMES)
    assert table.previous.shape == table.following.shape == (config.vocab_size, RANK) and table.gates.shape == (MASKS, RANK)
    expected = following[[4, 9, 4]] @ (gates[2] * previous[7])
    np.testing.assert_allclose(table.bias(2, 7, (4, 9, 4)), expected, rtol=1e-5)


def test_a_bita_of_before_there_were_tables_is_loaded(target: Path, bita: Path) -> None:
    change_tensors(bita, lambda all_: [all_.pop(name) for name in NAMES])
    document = json.loads((bita / "config.json").read_text())
    del document["markov_rank"]
    (bita / "config.json").write_text(json.dumps(document))
    assert checked_bita(bita, target).markov_rank == 0
    assert load_markov(bita, model_config(target)) is None


def test_another_target_is_refused(target: Path, bita: Path, tmp_path: Path) -> None:
    save_tiny_llama(tmp_path / "other", layers=LAYERS, seed=1)
    assert refused(bita, tmp_path / "other").startswith(f"{bita} was trained for another target than {tmp_path / 'other'}: train")
    save_tiny_llama(tmp_path / "small", layers=LAYERS - 1)
    assert f"tensor prompt has shape [4, 2, 2, 5, 8], but config.json and the target ask for [{LAYERS - 1}, 2" in refused(
        bita, tmp_path / "small"
    )


def change_config(directory: Path, **change: object) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "pipedec-bita-9"}, "is not of format pipedec-bita-1: give"),
        ({"colour": "red"}, "config.json is damaged: train again, or copy it again"),
        ({"num_masks": "3"}, "config.json is damaged"),
        ({"num_masks": 0}, "config.json is damaged"),
        ({"num_masks": MAX_MASKS + 1}, "config.json is damaged"),
        ({"num_prompt_tokens": -1}, "config.json is damaged"),
        ({"prompting": "wide"}, "config.json is damaged"),
        ({"target": "0" * 16}, "was trained for another target than"),
        ({"num_masks": 2}, "tensor masks has shape [3, 32], but config.json and the target ask for [2"),
        ({"num_prompt_tokens": 6}, "tensor prompt has shape [4, 2, 2, 5, 8], but config.json and"),
        ({"markov_rank": 7}, f"tensor {NAMES[0]} has shape [64, 6], but config"),
        ({"markov_rank": -1}, "config.json is damaged"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(change: dict[str, Any], message: str, target: Path, bita: Path) -> None:
    change_config(bita, **change)
    assert message in refused(bita, target)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (shutil.rmtree, "config.json cannot be read: give a directory that pipedec train bita wrote"),
        (lambda path: (path / "config.json").write_text("{"), "config.json cannot be read: give a directory"),
        (lambda path: (path / "config.json").write_text("[]"), "config.json is not of format pipedec-bita-1: give"),
        (lambda path: (path / "model.safetensors").unlink(), "model.safetensors is not a whole safetensors file"),
        (lambda path: truncate(path / "model.safetensors", -1), "model.safetensors is not a whole safetensors file"),
        (lambda path: change_tensors(path, lambda all_: all_.pop("masks")), "tensor masks is missing, but config.json and"),
        (lambda path: change_tensors(path, lambda all_: all_.pop(NAMES[1])), f"{NAMES[1]} is missing, but config.json and"),
        (
            lambda path: change_tensors(path, lambda all_: all_.update(masks=all_["masks"][:, :5].contiguous())),
            "tensor masks has shape [3, 5], but config.json and the target ask for [3, 32]",
        ),
    ],
)
def test_damaged_files_are_refused(damage: Callable[[Path], Any], message: str, target: Path, bita: Path) -> None:
    damage(bita)
    assert message in refused(bita, target)


def truncate(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


def change_tensors(directory: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


def test_a_target_with_recurrent_layers_is_refused(tmp_path: Path) -> None:
    save_model("qwen3_5_text", tmp_path / "target")
    save_random_bita(tmp_path / "bita", tmp_path / "target")
    assert refused(tmp_path / "bita", tmp_path / "target") == (
        "a BiTA needs attention in all layers: some of qwen3_5_text keep a recurrent state: use --bita none"
    )
