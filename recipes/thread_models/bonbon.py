"""PASTA's second stage: learn to prefer, among a model's own samples, answers that are both quick and good (BoNBoN, PASTA §4).

Owns the recipe, the loss and the report. ``ranking`` finds the best and the worst answers.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from functools import partial
from itertools import compress
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import torch
from msgspec import Meta
from rich.progress import track
from torch import Tensor

from pipedec.checkpoints import fingerprint
from pipedec.core.errors import UserError
from pipedec.core.values import check_fields
from pipedec.flags import Help
from pipedec.train.run import TrainingLoop, epoch_batch, linear_decay, muon_and_adamw, warm_up
from recipes.thread_models import ranking
from recipes.thread_models.answers import ModelAnswers, SeededPrompt
from recipes.thread_models.chat_endpoint import ChatEndpoint
from recipes.thread_models.figures import answer_all, greedy_answers, thread_figures
from recipes.thread_models.learning import PaddedRows, answer_log_probs, computing_in
from recipes.thread_models.ranking import Judge, RankingTask, Reader, ScoredSamples
from recipes.thread_models.records import Annotated as AnnotatedAnswer
from recipes.thread_models.records import kept_json, read_annotated
from recipes.thread_models.report import PREFERENCE_CARD, ThreadsRun, thread_card
from recipes.thread_models.rows import RowWriter, TrainingRow
from recipes.thread_models.tuning import Student

_DIALECT = "pasta"
_SCORES = ["ended", "speedup", "parallelism", "quality"]  # that are kept of every sample


@dataclass(frozen=True)
class BonbonRecipe:
    """Everything that decides the result; a step is ``batch`` pairs.

    The paper has 10 samples at temperature 1, λ of 1 to 8, α = 0.005 and a learning rate of 5e-7 for 7 billion parameters.

    Attributes:
        unfinished_worst: with quality 0; not in the paper.
        beta: 1 / β is the gap between the log ratios at which the IPO loss is 0; None = BoNBoN's, (n − 1) · Σ 1/k over k < n
            for n samples: the gap between the best and the worst of n.
        max_tokens: samples that do not end within it are left out.
    """

    samples: Annotated[int, Meta(ge=2), Help("Sampled answers per prompt: a best and a worst are needed.")] = 10
    temperature: Annotated[float, Meta(gt=0), Help("Sampling temperature.")] = 1.0
    quality_weight: float = 2.0  # λ of the score, efficiency + λ · quality; infinite for the quality alone
    efficiency: str = "speedup"  # one of EFFICIENCIES
    unfinished_worst: Annotated[
        bool,
        Help("Whether samples that do not end may be the worst of a pair.", flag="--unfinished-worst/--no-unfinished-worst"),
    ] = True
    alpha: Annotated[float, Meta(ge=0, le=1), Help("Weight of the SFT loss.")] = 0.005
    beta: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        Help("1/β is the wanted gap between best and worst (default: BoNBoN's, from --samples)."),
    ] = None
    steps: Annotated[Annotated[int, Meta(ge=1)] | None, Help("Training steps (default: one pass over all pairs).")] = None
    batch: Annotated[int, Meta(ge=1), Help("Pairs in a step.")] = 8
    learning_rate: Annotated[float, Meta(gt=0), Help("Peak learning rate (the paper's: 0.0000005).")] = 2e-4
    warmup_steps: int = 5
    weight_decay: float = 0.0
    max_tokens: Annotated[int, Meta(ge=1), Help("Maximum number of tokens of an answer.")] = 384
    max_prompts: Annotated[Annotated[int, Meta(ge=1)] | None, Help("Maximum number of prompts (default: all).")] = None
    seed: Annotated[int, Help("Seed of prompt choice, order and samples.")] = 0

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.quality_weight >= 0:
            raise UserError("--lambda must be at least 0, or inf")
        if self.efficiency not in ranking.EFFICIENCIES:
            raise UserError(f"--efficiency {self.efficiency}: choose one of {', '.join(ranking.EFFICIENCIES)}")

    def described(self) -> dict[str, Any]:
        """As JSON has it, in which no number is infinite."""
        return asdict(self) | ({"quality_weight": "inf"} if math.isinf(self.quality_weight) else {})

    @property
    def gap(self) -> float:
        """1 / β."""
        return 1 / self.beta if self.beta is not None else bonbon_gap(self.samples)

    def rate(self, step: int, steps: int) -> float:
        """The learning rate of a step of ``steps``: linear warm-up, then linear decay to a twentieth."""
        return self.learning_rate * warm_up(step, self.warmup_steps) * linear_decay(step, steps)


def bonbon_gap(samples: int) -> float:
    """(n − 1) · Σ 1/k over k < n (BoNBoN, Theorem 3): the gap between best and worst of n under the best-of-n distribution."""
    return (samples - 1) * sum(1 / k for k in range(1, samples))


def bonbon_loss(best: Tensor, worst: Tensor, start_best: Tensor, start_worst: Tensor, alpha: float, gap: float) -> Tensor:
    """PASTA §4: α · SFT on the best + (1 − α) · IPO between best and worst, per pair, from log probabilities of whole answers.

    Args:
        start_best, start_worst: log probabilities by the model before this stage.
    """
    ratio = (best - worst) - (start_best - start_worst)
    return -alpha * best + (1 - alpha) * (ratio - gap).square()


@dataclass(frozen=True)
class PairSteps:
    """The steps of a schedule: each adds the gradients of the mean loss of its pairs."""

    model: Any
    rows: list[tuple[TrainingRow, TrainingRow]]  # best and worst of each pair
    start: list[Tensor]  # their log probabilities before the first step
    recipe: BonbonRecipe
    computes: torch.dtype

    @classmethod
    @torch.no_grad()
    def before(
        cls, model: Any, rows: list[tuple[TrainingRow, TrainingRow]], recipe: BonbonRecipe, computes: torch.dtype
    ) -> PairSteps:
        """Record the log probabilities of a model before its first step."""
        start = [pair_log_probs(model, pair, computes) for pair in track(rows, "before")]
        return cls(model, rows, start, recipe, computes)

    def __call__(self, step: int) -> dict[str, float]:
        """Add the gradients of a step, one pair at a time; returns what is logged."""
        chosen = epoch_batch(step, len(self.rows), self.recipe.batch, self.recipe.seed)
        loss, gap = 0.0, 0.0
        for number in chosen:
            best, worst = pair_log_probs(self.model, self.rows[number], self.computes)
            start_best, start_worst = self.start[number].tolist()
            pair_loss = bonbon_loss(best, worst, start_best, start_worst, self.recipe.alpha, self.recipe.gap) / len(chosen)
            pair_loss.backward()
            loss += pair_loss.item()
            gap += (best - worst).item() - (start_best - start_worst)
        return {"loss": loss, "gap": gap / len(chosen)}


def pair_log_probs(model: Any, rows: tuple[TrainingRow, TrainingRow], computes: torch.dtype) -> Tensor:
    """Log probabilities of the best and the worst answer: [2]."""
    with computing_in(computes, model.device):
        return answer_log_probs(model, PaddedRows.of(list(rows), model.device))


@dataclass(frozen=True)
class Kept:
    """Directories of what several rounds may share."""

    samples: Path  # samples, scores, and figures of the model before: rounds that start from the same model
    baseline: Path  # the sequential model's answers: all rounds


def prefer(
    files: tuple[Path, ...],
    model_path: Path,
    baseline_path: Path,
    recipe: BonbonRecipe,
    run: ThreadsRun,
    endpoint: ChatEndpoint | None = None,
    kept: Kept | None = None,
) -> dict[str, Any]:
    """One round: sample, score, train, and write ``run.out``: the model in bfloat16, ``training.json`` and a model card.

    Args:
        files: annotated answers of dialect pasta, whose prompts are answered.
        model_path: a model tuned by ``pasta-sft``.
        baseline_path: a model with the same tokenizer that answers in one thread.
        endpoint: the judge; None = likelihood under the baseline.
        kept: where to keep what other rounds need, too; default: ``run.work``.

    Raises UserError if models, files or ``run.work`` do not fit.
    """
    kept = kept or Kept(run.work, run.work)
    torch.set_num_threads(run.threads)
    student = Student.load(model_path, [_DIALECT], run.device, recipe.seed)
    baseline = student.companion(baseline_path, knows_all=False)
    writer = RowWriter(student.tokenizer, [_DIALECT], int(student.tokenizer.eos_token_id))
    reader = Reader(writer, _DIALECT, recipe.max_tokens)
    judge: Judge = ranking.LikelihoodJudge(baseline, writer) if endpoint is None else ranking.EndpointJudge(endpoint)
    records = [record for path in files for record in read_annotated(path, _DIALECT)]
    names = {"model": student.name, "baseline": fingerprint(baseline_path)}
    ranking.claim(kept.baseline / "baseline.json", {"baseline": names["baseline"], "max_tokens": recipe.max_tokens})
    asked, held_out = (
        _tasks(_distinct(records, held_out, recipe.seed)[:most], baseline, writer, recipe, kept.baseline / f"baseline-{name}")
        for name, held_out, most in (("asked", False, recipe.max_prompts), ("held-out", True, run.held_out_prompts))
    )
    identity = names | {"tasks": ranking.digest(asked), "samples": recipe.samples, "temperature": recipe.temperature}
    identity |= {"judge": judge.name, "scores": _SCORES}
    ranking.claim(kept.samples / "samples.json", identity)
    bound, end = writer.bound[_DIALECT], (writer.end_token_id,)
    answers = ModelAnswers(student.model, bound, end, recipe.max_tokens, recipe.temperature)
    samples = ranking.sample_answers(answers, asked, recipe.samples, recipe.seed, kept.samples / "samples.jsonl")
    scored = ranking.score(asked, samples, reader, judge, kept.samples / "scores.jsonl")
    found = [one.pair(recipe.quality_weight, recipe.efficiency, recipe.unfinished_worst) for one in scored]
    chosen = [pair for pair in found if pair is not None]
    if not chosen:
        raise UserError("nothing to prefer: no prompt has a finished sample and another with a lower score")
    path = kept.samples / f"before-{ranking.digest(held_out)}.json"
    before = kept_json(path, lambda: _figures(student.model, held_out, reader, judge))
    num_steps = recipe.steps or math.ceil(len(chosen) / recipe.batch)
    optimizers = muon_and_adamw(student.model, recipe.learning_rate, recipe.weight_decay)
    loop = TrainingLoop("bonbon", student.model, optimizers, run.work, identity | recipe.described() | {"dtype": run.dtype})
    rows = [(reader.row(pair.prompt_ids, pair.best), reader.row(pair.prompt_ids, pair.worst)) for pair in chosen]
    steps = PairSteps.before(student.model, rows, recipe, run.torch_dtype)
    loop.run(num_steps, partial(recipe.rate, steps=num_steps), steps)
    student.save(run.out)
    report = {
        "recipe": recipe.described() | {"steps": num_steps, "beta": 1 / recipe.gap},
        **names,
        "judge": judge.name,
        "prompts": len(asked),
        "samples": _sampled(scored, recipe),
        "pairs": len(chosen),
        "pairs_worst_unfinished": sum(not pair.worst_ended for pair in chosen),
        "before": before,
        "held_out": _figures(student.model.float(), held_out, reader, judge),
    }
    run.write_report(report, thread_card(PREFERENCE_CARD, report))
    return report


def _distinct(records: list[AnnotatedAnswer], held_out: bool, seed: int) -> list[AnnotatedAnswer]:
    """Records of different prompts, in an order drawn by ``seed``."""
    distinct = list({record.question.prompt: record for record in records if record.question.held_out == held_out}.values())
    order = torch.randperm(len(distinct), generator=torch.Generator().manual_seed(seed)).tolist()
    return [distinct[number] for number in order]


def _tasks(
    records: list[AnnotatedAnswer], baseline: Any, writer: RowWriter, recipe: BonbonRecipe, store: Path
) -> list[RankingTask]:
    prompts = [writer.prompt(record.question.prompt, None) for record in records]
    answers = greedy_answers(baseline, prompts, recipe.max_tokens, store)
    tasks = []
    for record, ids in zip(records, prompts, strict=True):
        question = record.question
        tasks.append(RankingTask(question.prompt, writer.prompt(question.prompt, _DIALECT), question.answer, answers[ids]))
    return tasks


def _figures(model: Any, tasks: list[RankingTask], reader: Reader, judge: Judge) -> dict[str, Any]:
    """Figures of greedy answers to the tasks; their mean quality and their win rate by the judge."""
    if not tasks:
        return {}
    writer = reader.writer
    answers = ModelAnswers(model, writer.bound[_DIALECT], (writer.end_token_id,), reader.max_tokens)
    answered = [sequence for _, sequence in answer_all(answers, [SeededPrompt(task.prompt_ids) for task in tasks], "held out")]
    rated = [judge.rate(reader.comparison(task), reader.text(sequence)) for task, sequence in zip(tasks, answered, strict=True)]
    figures = thread_figures(answered, [len(task.baseline_ids) for task in tasks])
    quality, win_rate = (round(fmean(part), 4) for part in zip(*rated, strict=True))
    return figures | {"quality": quality, "win_rate": win_rate}


def _sampled(scored: list[ScoredSamples], recipe: BonbonRecipe) -> dict[str, float | int]:
    """Number of samples and of those that ended, and the mean speed-up and quality of the latter."""
    speedups, qualities = (
        [value for one in scored for value in compress(getattr(one, name), one.ended)] for name in ("speedups", "qualities")
    )
    return {
        "answers": len(scored) * recipe.samples,
        "ended": len(speedups),
        "speedup": round(sum(speedups) / max(len(speedups), 1), 4),
        "quality": round(sum(qualities) / max(len(qualities), 1), 4),
    }
