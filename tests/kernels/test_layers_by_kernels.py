"""Layers that compute by kernels, step by step of many requests, are those that compute by torch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.captures import Repeated
from support.checkpoints import save_tiny
from support.random_requests import Requests

kernels = pytest.importorskip("support.kernels")

from pipedec.families import model_config  # noqa: E402
from pipedec.model import StageModel  # noqa: E402

MODELS = {
    "llama": ("llama", {}),
    "another-activation": ("llama", {"head_dim": 16, "kv_heads": 1, "hidden_act": "gelu", "attention_bias": True}),
    "window": ("mistral", {"sliding_window": 5}),
    "qk-norm": ("qwen3", {"head_dim": 12}),
    "norms-after": ("olmo2", {"kv_heads": 4}),
    "norms-after-of-groups": ("olmo2", {"attention_bias": True}),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_last_layers_by_kernels_are_those_by_torch(tmp_path, name):
    """Three requests whose slots are scattered, and which attend one by one."""
    family, changes = MODELS[name]
    save_tiny(family, tmp_path, **changes)
    compare(*both(tmp_path, range(2, 4)), 6)


def test_a_captured_layer_by_kernels_is_that_by_torch(tmp_path):
    """With the kernel of attention, which the interpreter takes seconds for."""
    save_tiny("qwen3", tmp_path, head_dim=12)
    plain, fused = both(tmp_path, range(3, 4))
    fused.capture = Repeated()
    compare(plain, fused, 2)


def both(directory: Path, layers: range) -> tuple[StageModel, StageModel]:
    """Stages that compute with torch, and with kernels, which layers choose when they are made."""
    plain = StageModel.load(directory, layers, torch.float32, "cpu", model_config(directory))
    with kernels.interpreted():
        fused = StageModel.load(directory, layers, torch.float32, "cpu", model_config(directory))
    fused.uses_tables = False
    return plain, fused


def compare(plain: StageModel, fused: StageModel, num_steps: int) -> None:
    expected, found = (Requests(stage, 7, 3, 16, True) for stage in (plain, fused))
    for _ in range(num_steps):
        hidden = expected.forward()
        with kernels.interpreted():
            by_kernels = found.forward()
            logits = fused.logits(by_kernels)
        torch.testing.assert_close(by_kernels, hidden, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(logits, plain.logits(hidden), atol=1e-5, rtol=1e-5)
        expected.advance()
        found.advance()
