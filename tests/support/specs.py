"""Specifications of pipelines whose models have no tokenizers, which ``resolve`` would refuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipedec.config import Settings
from pipedec.messages.run import BitaDescription
from pipedec.model import BitaConfig
from pipedec.plan.placement import even_layers
from pipedec.plan.spec import PipelineSpec


def bare_spec(
    target: Path, num_layers: int, shape: tuple[int, int], draft: Path | None = None, bita: Path | None = None, **settings: Any
) -> PipelineSpec:
    """A pipeline on the processor, in float32 unless ``settings`` say otherwise.

    Args:
        shape: stages and groups.
    """
    stages, groups = shape
    given = {"dtype": "float32", "device": "cpu", "priors": False, **settings}
    made = Settings.of(target=target, draft=draft or "none", bita=bita or "none", stages=stages, groups=groups, **given)
    layers = tuple((part.start, part.stop) for part in even_layers(num_layers, stages))
    config = BitaConfig.from_directory(bita) if bita else None
    trained = None if config is None else BitaDescription(config.num_masks, config.num_prompt_tokens, config.prompting)
    return PipelineSpec(made, layers, trained_bita=trained)
