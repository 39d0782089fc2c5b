"""Fine-tune a model for threads (APAR §3, PASTA-SFT): annotated files in, a checkpoint directory out.

Owns the inputs of a run and its report.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from pipedec.checkpoints import fingerprint
from pipedec.core import UserError
from pipedec.model import ModelConfig
from pipedec.threads import load_dialect
from pipedec.train.loop import TrainingLoop, muon_and_adamw
from recipes.thread_models.figures import AnsweredPrompt, HeldOutSamples, agreements, held_out_of
from recipes.thread_models.learning import ThreadLoss, ThreadRecipe, ThreadSteps, digest, plan
from recipes.thread_models.own_answers import Circles, OwnAnswers, answers_to_all, prompts_of_rounds
from recipes.thread_models.records import UNSTRUCTURED, Annotated, read_annotated
from recipes.thread_models.report import THREADS_CARD, ThreadsRun, thread_card
from recipes.thread_models.rows import RowWriter, WrittenSample
from recipes.thread_models.student import Student


def tune(
    target_path: Path,
    files: dict[str, tuple[Path, ...]],
    recipe: ThreadRecipe,
    run: ThreadsRun,
    teacher_path: Path | None = None,
    prompts: tuple[str, ...] = (),
) -> dict:
    """Train and write ``run.out``: the model in bfloat16 with its tokenizer, ``training.json`` and a model card.

    Args:
        files: annotated answers, by dialect.
        teacher_path: a tuned model with the same tokenizer. Its next-token distribution is learned instead of the written
            tokens, and the report says how well its answers are predicted.
        prompts: further prompts, without answers. Circle rounds ask these instead of the files'. A teacher answers
            each in one thread and in every dialect, and every second sample is one of its answers.

    Raises:
        UserError: models, files or ``run.work`` do not fit.
    """
    torch.set_num_threads(run.threads)
    student = Student.load(target_path, list(files), run.device, recipe.seed)
    _check(student.config, files, recipe)
    writer = RowWriter(student.tokenizer, files, int(student.tokenizer.eos_token_id))
    records = {name: [record for path in paths for record in read_annotated(path, name)] for name, paths in files.items()}
    written = _samples(writer, records, held_out=False)
    held_out = held_out_of(
        _samples(writer, records, held_out=True), run.held_out_prompts, recipe.max_length, run.work / "sequential"
    )
    teacher = None if teacher_path is None else _teacher(teacher_path, student, run.device)
    answered = []
    if teacher is not None:
        answered = answers_to_all(OwnAnswers(teacher, writer, recipe.max_length, run.work / "teacher"), prompts)
    steps = plan(written, writer, recipe, answered)
    names = {"target": student.name, "teacher": None if teacher_path is None else fingerprint(teacher_path)}
    identity = {**asdict(recipe), **names, "dtype": str(run.torch_dtype), "samples": digest([*written, *answered])}
    if prompts:
        identity["prompts"] = hashlib.sha256("\0".join(prompts).encode()).hexdigest()[:16]
    optimizers = muon_and_adamw(student.model, recipe.learning_rate, recipe.weight_decay)
    loop = TrainingLoop("threads", student.model, optimizers, run.work, identity)
    measured = _Measured(student, writer, held_out, None if teacher is None else held_out.answers(teacher, writer))
    before = measured.before()
    loss = ThreadLoss(student.model, writer.controls.to(run.device), run.torch_dtype, teacher)
    own = OwnAnswers(student.model, writer, recipe.max_length, run.work / "circles")
    asked = prompts_of_rounds(list(prompts) or [sample.record.question.prompt for sample in written], writer, recipe)
    circles = Circles(own, asked, recipe)
    loop.run(recipe.steps, recipe.rate, ThreadSteps(loss, writer, steps, recipe, circles.rows))
    student.save(run.out)
    report = {
        "recipe": asdict(recipe),
        **names,
        "parameters": student.model.num_parameters(),
        "samples": {dialect: _counts(found) for dialect, found in records.items()},
        "prompts": len(prompts),
        "seen_tokens": sum(sample.num_tokens for step in steps for sample in step),
        "before": before,
        **measured.after(),
    }
    run.write_report(report, thread_card(THREADS_CARD, report))
    return report


@dataclass(frozen=True)
class _Measured:
    """Measurements before and after training.

    Attributes:
        answered: the teacher's answers; None without a teacher.
    """

    student: Student
    writer: RowWriter
    held_out: HeldOutSamples
    answered: dict[str, dict[str, list[AnsweredPrompt]]] | None

    def before(self) -> dict[str, Any]:
        """Agreement with the teacher's answers; without a teacher, the loss of the written answers in one thread."""
        if self.answered is not None:
            return agreements(self.student.model, self.answered)
        return self.held_out.plain_loss(self._loss(), self.writer)

    def after(self) -> dict[str, Any]:
        """All losses of the model as it is stored, and its agreement with the teacher or the figures of its own answers."""
        model = self.student.model.float()
        losses = self.held_out.losses(self._loss(), self.writer)
        if self.answered is not None:
            return {"held_out_loss": losses, "agreement": agreements(model, self.answered)}
        answered = self.held_out.answers(model, self.writer)
        return {"held_out_loss": losses, "held_out": self.held_out.figures(model, self.writer, answered)}

    def _loss(self) -> ThreadLoss:
        model = self.student.model
        return ThreadLoss(model, self.writer.controls.to(model.device))


def _check(config: ModelConfig, files: dict[str, tuple[Path, ...]], recipe: ThreadRecipe) -> None:
    for name in files:
        if recipe.form == "unrolled" and load_dialect(name).join is not None:
            raise UserError(f"--form unrolled is for dialects without joins, which {name} has: use --form tree")
    windows = [window for window in config.sliding_windows if window is not None]
    if windows and min(windows) < recipe.max_length:
        raise UserError(
            f"the target's attention window has {min(windows)} tokens, but samples may have {recipe.max_length}: "
            "use a smaller --max-length"
        )


def _teacher(path: Path, student: Student, device: torch.device) -> Any:
    student.check_companion(path, knows_all=True)
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, local_files_only=True).to(device).eval()


def _samples(writer: RowWriter, records: dict[str, list[Annotated]], held_out: bool) -> list[WrittenSample]:
    return [
        writer.sample(record, dialect)
        for dialect, found in records.items()
        for record in found
        if record.question.held_out == held_out
    ]


def _counts(records: list[Annotated]) -> dict[str, int]:
    """Number of answers to learn from, and of those in several threads."""
    training = [record for record in records if not record.question.held_out]
    return {"answers": len(training), "structured": sum(record.rule != UNSTRUCTURED for record in training)}
