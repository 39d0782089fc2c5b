"""Preference training at toy size: scores and pairs, the loss, runs that resume exactly, judges, mistakes."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from support.annotated_answers import PASTA, record, write_records
from support.refusals import refusal
from support.tiny_pair import Pair

from pipedec.core.errors import UserError
from pipedec.threads import measure
from pipedec.train.run import TrainingLoop, linear_decay, muon_and_adamw
from recipes.thread_models.__main__ import thread_models as command
from recipes.thread_models.bonbon import BonbonRecipe, Kept, PairSteps, bonbon_gap, bonbon_loss, prefer
from recipes.thread_models.chat_endpoint import ChatEndpoint
from recipes.thread_models.learning import PaddedRows, ThreadRecipe, learned_logits
from recipes.thread_models.ranking import (
    Comparison,
    EndpointJudge,
    LikelihoodJudge,
    RankingTask,
    Reader,
    ScoredSamples,
    score,
)
from recipes.thread_models.ranking import PreferencePair as Preference
from recipes.thread_models.report import PREFERENCE_CARD, ThreadsRun, thread_card
from recipes.thread_models.rounds import Rounds, scores_of
from recipes.thread_models.rows import RowWriter, tree_row
from recipes.thread_models.tuning import Student, tune

CPU = torch.device("cpu")
# The number of steps is given: it would follow from that of the pairs, which depends on what the model samples.
RECIPE = BonbonRecipe(samples=4, batch=2, steps=2, max_tokens=120, max_prompts=6, learning_rate=1e-3, warmup_steps=1)


@dataclass(frozen=True)
class Tuned:
    """A model that has learned some PASTA, and the file it learned from."""

    model: Path
    data: Path


@pytest.fixture(scope="module")
def tuned(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Tuned:
    folder = tmp_path_factory.mktemp("tuned")
    data = write_records(folder / "pasta.jsonl", "pasta")
    recipe = ThreadRecipe(steps=40, batch_tokens=300, learning_rate=5e-3, warmup_steps=5, max_length=130)
    tune(pair.draft, {"pasta": (data,)}, recipe, ThreadsRun(folder / "out", folder / "work", threads=1, held_out_prompts=1))
    return Tuned(folder / "out", data)


def run_in(folder: Path) -> ThreadsRun:
    return ThreadsRun(folder / "out", folder / "work", "float32", 1, CPU, held_out_prompts=2)


class LongerIsBetter:
    name = "longer"

    def quality(self, comparison: Comparison, answers: list[str]) -> list[float]:
        return [float(len(answer)) for answer in answers]


def test_the_loss_is_the_papers() -> None:
    best, worst = torch.tensor(-4.0, requires_grad=True), torch.tensor(-6.0, requires_grad=True)
    start = torch.tensor([-5.0, -5.5])
    loss = bonbon_loss(best, worst, start[0], start[1], alpha=0.005, gap=3.0)
    assert loss.item() == pytest.approx(0.005 * 4 + 0.995 * ((2 - 0.5) - 3.0) ** 2)
    loss.backward()
    assert best.grad is not None and best.grad < 0 < worst.grad
    assert bonbon_gap(2) == 1 and bonbon_gap(4) == pytest.approx(3 * (1 + 1 / 2 + 1 / 3))
    assert BonbonRecipe(samples=4).gap == bonbon_gap(4) and BonbonRecipe(beta=0.1).gap == pytest.approx(10)


def scored(count: int, ended: list[bool], speedups: list[float], qualities: list[float]) -> ScoredSamples:
    answers = [(number,) for number in range(1, count + 1)]
    return ScoredSamples(RankingTask("q", (1,), "", (2,)), answers, ended, speedups, [1.0] * count, qualities)


def test_best_and_worst_are_by_score() -> None:
    one = scored(3, [True] * 3, [3.0, 1.0, 2.0], [0.1, 0.5, 0.9])
    assert one.pair(0.0, "speedup", True) == Preference((1,), (1,), (2,))
    assert one.pair(10.0, "speedup", True) == Preference((1,), (3,), (1,))
    assert one.pair(math.inf, "speedup", True) == Preference((1,), (3,), (1,)), "the quality alone"
    assert one.pair(0.0, "parallelism", True) is None, "all are equally parallel"
    assert scored(0, [], [], []).pair(1.0, "speedup", True) is None
    of_papers = {"speedup": 4.0, "parallelism": 1.0, "harmonic": 1.6, "arithmetic": 2.5}
    for efficiency, first in of_papers.items():
        found = scored(1, [True], [4.0], [0.5])
        assert found.totals(2.0, efficiency) == [pytest.approx(first + 1.0)] and found.totals(math.inf, efficiency) == [0.5]


def test_an_answer_that_did_not_end_may_be_the_worst_but_not_the_best() -> None:
    one = scored(3, [True, True, False], [3.0, 2.0, 4.0], [0.2, 0.8, 0.0])
    assert one.pair(4.0, "speedup", True) == Preference((1,), (2,), (1,)), "it is quicker than the worst is good"
    assert one.pair(8.0, "speedup", True) == Preference((1,), (2,), (3,), worst_ended=False)
    assert one.pair(8.0, "speedup", False) == Preference((1,), (2,), (1,))
    only = replace(one, ended=[False, True, False], qualities=[0.0, 0.8, 0.0])
    assert only.pair(8.0, "speedup", True) == Preference((1,), (2,), (1,), worst_ended=False)
    assert only.pair(8.0, "speedup", False) is None, "one that ended has none to be better than"
    assert replace(one, ended=[False] * 3).pair(8.0, "speedup", True) is None


def test_samples_are_scored_by_quality_and_speed(writer: RowWriter, tmp_path: Path) -> None:
    reader, prompt = Reader(writer, "pasta", 200), writer.prompt("Say 4 words.", "pasta")
    forked, plain = (writer.sample(record(PASTA), dialect).answer for dialect in ("pasta", None))
    samples = [forked, plain, (plain[:-1] * 21)[:200]]
    task = RankingTask("Say 4 words.", prompt, "The reference.", (40,) * 30)
    (scored,) = score([task], [samples], reader, LongerIsBetter(), tmp_path / "scores.jsonl")
    measured = [measure(reader.sequence(prompt, answer)) for answer in samples]
    assert scored.answers == samples and scored.ended == [True, True, False]
    assert scored.speedups == [pytest.approx(30 / one.longest_chain, abs=1e-4) for one in measured]
    assert scored.parallelisms == [pytest.approx(one.parallelism, abs=1e-4) for one in measured]
    assert scored.qualities == [len(record(PASTA).question.answer)] * 2 + [0.0], "the judge sees no endless answer"


def test_likelihood_is_beside_the_baselines_answer(student: Student, writer: RowWriter) -> None:
    judge = LikelihoodJudge(student.model, writer)
    answers = ["It is 4.", "clips clips clips"]
    same, other = judge.quality(Comparison("Say 4 words.", "It is 4.", ""), answers)
    means = []
    for text in answers:
        prompt, ids = writer.prompt("Say 4 words.", None), [*writer.text(text), writer.end_token_id]
        logits = student.model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        means.append(logits.gather(1, torch.tensor(ids)[:, None]).mean().item())
    assert same == pytest.approx(1.0) and other == pytest.approx(math.exp(means[1] - means[0]), rel=1e-3)
    better, worse = sorted(answers, key=lambda text: means[answers.index(text)], reverse=True)
    assert judge.rate(Comparison("Say 4 words.", better, ""), better) == (1.0, 0.5)
    assert judge.rate(Comparison("Say 4 words.", better, ""), worse)[1] == 0.0


@dataclass(frozen=True)
class Opinion(ChatEndpoint):
    """A server with fixed replies."""

    replies: tuple[str | None, ...] = ()
    asked: list[str] = field(default_factory=list)

    def complete(self, prompt: str) -> str | None:
        self.asked.append(prompt)
        return self.replies[(len(self.asked) - 1) % len(self.replies)]


def opinions(*replies: str | None) -> EndpointJudge:
    return EndpointJudge(Opinion("http://a/v1", "m", replies=replies))


def test_a_judge_is_asked_in_both_orders() -> None:
    comparison = Comparison("Why?", "BASE", "REFERENCE")
    first, second = (json.dumps({"preference": number, "confidence": 0.8}) for number in (1, 2))
    judge = opinions(first, second)
    assert judge.quality(comparison, ["MINE"]) == [pytest.approx((0.5 + 4 * 0.8) / 0.5)]
    asked = judge.endpoint.asked
    assert len(asked) == 4 and all('"instruction": "Why?"' in text and "MINE" in text for text in asked)
    orders = [text.index("MINE") < text.index("BASE" if "BASE" in text else "REFER") for text in asked]
    assert orders == [True, False, True, False] and ["BASE" in text for text in asked] == [True, True, False, False]
    assert opinions(first).quality(comparison, ["MINE"]) == [pytest.approx(1.0)], "the first is always better"
    for replies, wins in (((first, second), 1.0), ((second, first), 0.0), ((first,), 0.5)):
        assert opinions(*replies).rate(comparison, "MINE")[1] == wins, "over the baseline alone"
    assert opinions("Sure: " + second, first).quality(comparison, ["MINE"]) == [pytest.approx(0.5 / (0.5 + 4 * 0.8))]
    for useless in (None, "both", '{"preference": 3, "confidence": 1}', '{"preference": 1, "confidence": NaN}'):
        assert opinions(useless).rate(comparison, "MINE") == (1.0, 0.5)


def test_pairs_are_learned(student: Student, writer: RowWriter, tmp_path: Path) -> None:
    reader, prompt = Reader(writer, "pasta", 200), writer.prompt("Say 4 words.", "pasta")
    answers = [writer.sample(record(PASTA), dialect).answer for dialect in ("pasta", None)]
    best, worst = (tree_row(reader.sequence(prompt, answer), prompt) for answer in answers)
    logits = learned_logits(student.model, PaddedRows.of([best], CPU)).log_softmax(-1)
    targets = best.targets[best.targets >= 0]
    recipe = replace(RECIPE, beta=0.2, batch=1)
    steps = PairSteps.before(student.model, [(best, worst)], recipe, torch.float32)
    assert float(steps.start[0][0].detach()) == pytest.approx(float(logits.gather(1, targets[:, None]).sum().detach()), rel=1e-4)
    loop = TrainingLoop("bonbon", student.model, muon_and_adamw(student.model, 1e-3, 0.01), tmp_path, {})
    loop.run(30, lambda step: 1e-3 * linear_decay(step, 30), steps)
    log = [json.loads(line) for line in (tmp_path / "bonbon.jsonl").read_text().splitlines()]
    assert log[0]["gap"] == pytest.approx(0, abs=1e-3) and log[-1]["gap"] == pytest.approx(5, abs=1)
    assert log[-1]["loss"] < 0.2 * log[0]["loss"]


@pytest.mark.slow
def test_the_next_run_takes_what_the_last_one_left_and_refuses_what_is_not_its_own(
    tuned: Tuned, pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(recipe: BonbonRecipe, baseline: Path = tuned.model, data: Path = tuned.data) -> dict[str, Any]:
        return prefer((data,), tuned.model, baseline, recipe, run_in(tmp_path))

    step = PairSteps.__call__

    def stops(steps: PairSteps, number: int) -> dict[str, float]:
        if number == 1:
            raise KeyboardInterrupt
        return step(steps, number)

    monkeypatch.setattr(TrainingLoop, "SAVE_EVERY", 1)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(PairSteps, "__call__", stops)
        train(RECIPE)
    first = train(RECIPE)
    whole = prefer((tuned.data,), tuned.model, tuned.model, RECIPE, run_in(tmp_path / "whole"))
    assert first == whole, "also of a killed run"
    assert first == json.loads((tmp_path / "out" / "training.json").read_text())
    assert first["prompts"] == 6 and 0 < first["pairs"] <= 6 and first["samples"]["answers"] == 24
    assert first["held_out"]["answers"] == 2
    assert (tmp_path / "out" / "README.md").read_text() == thread_card(PREFERENCE_CARD, first)
    (tmp_path / "work" / "bonbon.safetensors").unlink()
    with monkeypatch.context() as patch:
        patch.setattr(LikelihoodJudge, "rate", lambda judge, comparison, answer: (1.0, 0.5))  # of the held-out answers
        patch.setattr(LikelihoodJudge, "quality", None)
        assert train(replace(RECIPE, quality_weight=50.0))["samples"] == first["samples"], "no sample is judged again"
    with pytest.raises(UserError, match=r"belongs to another run \(samples 4\)"):
        train(replace(RECIPE, samples=5))
    with pytest.raises(UserError, match=r"belongs to another run \(quality_weight 50.0, learning_rate 0.001\)"):
        train(replace(RECIPE, learning_rate=2e-3))
    shutil.rmtree(tmp_path / "work")
    with pytest.raises(UserError, match="different tokenizer"):
        train(RECIPE, pair.foreign_draft)
    with pytest.raises(UserError, match="nothing to prefer"):
        train(replace(RECIPE, max_tokens=1), data=write_records(tmp_path / "one.jsonl", "pasta", 1))


def test_a_round_begins_with_the_model_of_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PASTA §6.1. The first rounds of all scores share their samples, as they begin with the same model."""
    begun = []

    def one_round(
        files: object, model: Path, baseline: object, recipe: BonbonRecipe, run: ThreadsRun, endpoint: object, kept: Kept
    ) -> dict[str, Any]:
        begun.append((model, run.out, kept.samples))
        return {"recipe": recipe.described(), "before": {}, "held_out": {}}

    monkeypatch.setattr("recipes.thread_models.rounds.prefer", one_round)
    run, sft = run_in(tmp_path), tmp_path / "sft"
    run.out.mkdir()
    Rounds((), sft, sft, scores_of(RECIPE, (1.0, math.inf), ("speedup",)), rounds=2).run(run)
    assert begun == [
        row
        for score in ("lambda-1", "lambda-inf")
        for row in (
            (sft, run.out / score / "round-1", run.work / "round-1"),
            (run.out / score / "round-1", run.out / score / "round-2", run.work / score / "round-2"),
        )
    ]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "nowhere is not a directory"),
        (["--lambda", "1,1"], "names a score twice"),
        (["--efficiency", "luck"], "--efficiency luck: choose one of speedup, harmonic, arithmetic, parallelism"),
        (["--judge", "http://a/v1"], "--judge URL goes with --judge-model NAME"),
    ],
)
def test_mistakes_are_told(flags: list[str], message: str, tmp_path: Path) -> None:
    usual = ["pasta-bonbon", "--in", "absent.jsonl", "--model", "nowhere", "--baseline", "nowhere"]
    result = CliRunner().invoke(command, [*usual, "--out", str(tmp_path / "out"), "--work", str(tmp_path / "work"), *flags])
    assert message in refusal(result)
    assert "\n" not in str(result.exception) and not (tmp_path / "out").exists()


@pytest.mark.fast_cases("4")
@pytest.mark.parametrize("weights", ["4", "4,inf"])
def test_the_command_prints_what_it_measured(tuned: Tuned, tmp_path: Path, weights: str) -> None:
    out, model = tmp_path / "out", str(tuned.model)
    flags = f"--samples 3 --max-prompts 3 --threads 1 --lambda {weights} --max-tokens 120 --held-out-prompts 1".split()
    flags += ["--in", str(tuned.data), "--model", model, "--baseline", model, "--out", str(out), "--work", str(tmp_path / "work")]
    result = CliRunner().invoke(command, ["pasta-bonbon", *flags], env={"COLUMNS": "160"}, catch_exceptions=False)
    if weights == "4":
        report = json.loads((out / "training.json").read_text())
        assert report["recipe"]["quality_weight"] == 4 and report["judge"] == "likelihood"
        assert "before" in result.output and f"{report['held_out']['quality']:.2f}" in result.output
    else:
        assert "speedup, λ = inf, round 1" in result.output
        assert {path.name for path in out.iterdir()} >= {"summary.json", "summary.md", "trade-off.png"}
