"""Tiny targets cut into stages, and arguments of scripts, for tests of many lanes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from lane_scripts import LIKELY, MASKS, OPENERS, sequences
from support.bita_files import save_random_bita
from support.checkpoints import save_tiny
from support.toy_dialects import TEXTS

from pipedec.core.sampling import SamplingParams
from pipedec.core.stage_message import NewRequest
from pipedec.families import model_config
from pipedec.model import BitaWeights, StageModel
from pipedec.stage import FinalStageWorker, StageWorker
from pipedec.threads import NewSequence

CUT = [range(0, 1), range(1, 2), range(2, 3)]
SLOTS = 4096
NewSequences = Callable[[NewRequest], NewSequence]
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "window": ("mistral", {"sliding_window": 5}),
    "dynamic": ("llama", {"rope_parameters": {"rope_theta": 1000.0, "rope_type": "dynamic", "factor": 3.0},
                          "max_position_embeddings": 12}),
}  # fmt: skip


@dataclass(frozen=True)
class Target:
    path: Path
    bita: BitaWeights = field(repr=False)

    def workers(
        self, block: int, cut: Iterable[range] = CUT, slots: int = SLOTS, new_sequence: NewSequences = sequences
    ) -> list[StageWorker]:
        """In float64."""
        config, workers = model_config(self.path), list[StageWorker]()
        for layers in cut:
            model = StageModel.load(self.path, layers, torch.float64, "cpu", config)
            model.attach(BitaWeights(self.bita.prompt[layers.start : layers.stop].double(), self.bita.masks.double()))
            workers.append((FinalStageWorker if model.is_last else StageWorker)(model, new_sequence, slots=slots, block=block))
        return workers


def save_target(name: str, path: Path) -> Target:
    """Save a target of ``MODELS`` with a BiTA."""
    family, changes = MODELS[name]
    save_tiny(family, path, layers=3, vocab=len(TEXTS), **changes)
    return Target(path, save_random_bita(path / "bita", path, MASKS))


def scripts() -> st.SearchStrategy[dict[str, Any]]:
    """Arguments of a script."""
    samplings = st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.0, 0.8]),
        seed=st.integers(0, 99),
        max_tokens=st.integers(1, 14),
        frequency_penalty=st.sampled_from([0.0, 0.5]),
        repetition_penalty=st.sampled_from([1.0, 1.01]),
        logprobs=st.sampled_from([None, 2]),
        logit_bias=st.sampled_from([LIKELY, LIKELY | OPENERS]),
    )
    return st.fixed_dictionaries(
        {
            "seed": st.integers(0, 10_000),
            "arrival": st.integers(0, 8),
            "chunks": st.lists(st.integers(1, 5), min_size=1, max_size=4),
            "sampling": samplings,
            "has_masks": st.booleans(),
            "has_threads": st.booleans(),
            "delay": st.integers(0, 2),
            "patience": st.sampled_from([0, 1, 3, 9, 20]),
        }
    )
