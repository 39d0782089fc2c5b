"""Calls commands like a shell would, in this process; a shape that takes no time."""

from __future__ import annotations

import pytest
from support.programs import Calls, caller

from pipedec.cli import main
from pipedec.families import KNOWN_MODELS
from pipedec.families.llama import LlamaConfig


@pytest.fixture
def pipedec(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Calls:
    """Calls the program: ``pipedec("bench", "sweep", "--preset", "paper-14")``."""
    return caller(main, monkeypatch, capsys)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> LlamaConfig:
    """A shape that fits everywhere, under the name ``tiny``."""
    shape = LlamaConfig(
        model_type="llama", hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=100,
    )  # fmt: skip
    monkeypatch.setitem(KNOWN_MODELS, "tiny", shape)
    return shape
