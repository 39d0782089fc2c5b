"""Answers of a pipeline whose forwards are captured, draft included: the tokens of transformers, by every method."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.captures import Repeated
from support.specs import bare_spec
from test_local_pipeline import LAYERS, NUM_TOKENS, OPTIONS, PROMPT, answer, expected, models, request

from pipedec.decoding import Experience, Resources, Scheduler
from pipedec.engine.build import load_drafter, load_stage
from pipedec.engine.local import LocalPipeline
from pipedec.methods import METHODS, BestFirstOptions
from pipedec.model import Usual
from pipedec.model.warm_up import usual_rows

__all__ = ["models"]  # a fixture


@pytest.mark.fast_cases("pipedec-bestfirst")
@pytest.mark.parametrize("method", METHODS)
def test_warmed_up_stages_capture_nothing_while_they_answer(models: Path, method: str) -> None:
    """One request after another, by each method: its buckets have been captured before, and nothing of that was counted."""
    captures = list[Repeated]()

    def capture(device: object) -> Repeated:
        captures.append(Repeated())
        return captures[-1]

    spec = replace(
        bare_spec(models / "target", LAYERS, (4, 4), models / "near", models / "bita", draft_dtype="float32"), agreed_slots=1024
    )
    cpu = torch.device("cpu")
    stages = [load_stage(spec, rank, cpu, capture=capture) for rank in range(1, 5)]
    drafter = load_drafter(spec, cpu, capture=capture)
    assert drafter is not None
    for model in (drafter, *stages):
        model.warm_up(Usual(spec.knee, 512), lambda done, total: None)
    assert all(stage.rows == stage.pruned_rows == stage.num_lanes == 0 for stage in stages)
    assert drafter.num_lanes == drafter.used_slots == 0
    before = [one.captures for one in captures]
    assert before == [len(usual_rows(spec.knee))] * 5
    replays = [one.replays for one in captures]
    resources = Resources(Experience(4), drafter, trained_masks=spec.trained_masks)
    pipeline = LocalPipeline(spec, stages, Scheduler(resources, knee=spec.knee))
    for prompt in (PROMPT, PROMPT * 8):
        # With limits of its own best-first injection drafts as much on a busy machine.
        options = BestFirstOptions(width=4, children=2, forwards=2) if method == "pipedec-bestfirst" else OPTIONS[method][0]
        tokens, _ = answer(pipeline, request(prompt, method=method, options=options, ignore_eos=True))
        assert tokens == expected(models / "target", prompt, NUM_TOKENS)
    assert [one.captures for one in captures] == before
    used = [one.replays > count for one, count in zip(captures, replays, strict=True)]
    assert sum(used) == (4 if method in ("pp", "bita") else 5), "every stage, and the draft if the method needs one"
