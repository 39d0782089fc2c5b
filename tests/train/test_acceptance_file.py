"""``acceptance.json``: measured on training prompts alone, the same each time; a new process begins with it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from support.refusals import refusal
from support.tiny_pair import Pair

from pipedec.cli.main import train as command
from pipedec.decoding.learned import GREEDY, LearnedAcceptance, LearnedRates
from pipedec.engine.experience_files import SHIPPED_FILE, initial_experience, shipped_acceptance
from pipedec.engine.local import LocalPipeline
from pipedec.train.acceptance import measure_acceptance, shrunk, some_answers
from pipedec.train.continuations import SplitPrompts
from pipedec.train.run import Run
from pipedec.train.targets import LoadedTarget

UNUSABLE = [[10**6]]  # no token of the target
PROMPTS = {
    "one": SplitPrompts([[1, 5 + number, 9, 30] for number in range(5)], UNUSABLE),
    "two": SplitPrompts([[1, 60, 9, 9]], UNUSABLE),
}


def test_it_is_measured_on_training_prompts_of_every_set_in_turn(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded, run = [], LocalPipeline.run
    monkeypatch.setattr(
        LocalPipeline, "run", lambda self, request: decoded.append(request.prompt_token_ids) or run(self, request)
    )
    for name, count in (("first", 3), ("again", 3), ("more", 9)):
        run_in = Run(tmp_path, tmp_path / f"{name}-work", threads=1)
        answered = some_answers(LoadedTarget.of(pair.target, run_in), PROMPTS, 12, run_in, count)
        measure_acceptance(pair.target, pair.draft, answered, tmp_path / name)
    assert decoded[:3] == decoded[3:6] == [(1, 5, 9, 30), (1, 60, 9, 9), (1, 6, 9, 30)] and len(decoded) == 12
    first, again, more = ((tmp_path / name / SHIPPED_FILE).read_bytes() for name in ("first", "again", "more"))
    assert first == again != more
    weights = shipped_acceptance(tmp_path / "more").kinds[GREEDY].acceptance
    assert weights.keys() == {"draft", "ngrams", "seen", "others"} and weights["others"]["none of the choices"] != 0


def test_measured_weights_count_a_quarter() -> None:
    weights = {"draft": {"log probability": 3.0}, "others": {"none of the choices": -2.0}}
    matches = {"ngrams": {"4": 0.9}}
    learned = LearnedAcceptance(kinds={GREEDY: LearnedRates(acceptance=weights, matches=matches)}, unproposed_share=0.1)
    expected = {"draft": {"log probability": 1.5}, "others": {"none of the choices": -0.5}}
    assert shrunk(learned) == LearnedAcceptance(
        kinds={GREEDY: LearnedRates(acceptance=expected, matches=matches)}, unproposed_share=0.1
    )


def test_the_command_measures_a_draft_without_training_it(pair: Pair, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"How many clips are {number} clips?"}) + "\n" for number in range(4)))
    arguments = [
        "draft", "--target", str(pair.target), "--prompts", f"clips={prompts}", "--new-tokens", "8", "--only-acceptance",
        "--out", str(tmp_path / "out"), "--work", str(tmp_path / "work"), "--device", "cpu",
    ]  # fmt: skip
    done = CliRunner().invoke(command, [*arguments, "--draft", str(pair.draft)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert [path.name for path in (tmp_path / "out").rglob("*")] == ["draft", SHIPPED_FILE]
    assert shipped_acceptance(tmp_path / "out" / "draft").kinds.keys() == {GREEDY}
    assert refusal(CliRunner().invoke(command, arguments)) == "--only-acceptance measures a draft: give --draft DIR"


@pytest.mark.parametrize("model", ["reference_pair", "reference_smollm2", "reference_threads"])
def test_every_shipped_draft_has_one(model: str) -> None:
    import pipedec_models

    draft = Path(pipedec_models.__path__[0]) / model / "draft"
    acceptance = shipped_acceptance(draft)
    assert acceptance.kinds[GREEDY].acceptance["draft"]["log probability"] > 0.3
    assert 0 < acceptance.unproposed_share < 0.5


def test_a_pipeline_with_the_shipped_pair_begins_with_it(own_cache: Path) -> None:
    from pipedec.config import Settings
    from pipedec.engine.build import resolve

    spec = resolve(Settings.of(stages=2, device="cpu"))
    expected = shipped_acceptance(spec.draft)
    assert initial_experience(spec, torch.device("cpu")).acceptance.kinds == expected.kinds != {}
    assert initial_experience(spec.replaced(priors=False), torch.device("cpu")).acceptance.kinds == {}
