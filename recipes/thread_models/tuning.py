"""Fine-tune a model for threads (APAR §3, PASTA-SFT): annotated files in, a checkpoint directory out.

Owns the state of model and tokenizer before the first step (a chat template with dialects, the control tokens that it lacks,
their embeddings), the inputs of a run and its report.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from pipedec.checkpoints import fingerprint
from pipedec.core.errors import UserError
from pipedec.families import ModelConfig, model_config
from pipedec.text.tokenizer import load_for_training
from pipedec.threads import Dialect, load_dialect
from pipedec.train.run import TrainingLoop, muon_and_adamw
from recipes.thread_models.figures import AnsweredPrompt, HeldOutSamples, agreements, held_out_of
from recipes.thread_models.learning import ThreadLoss, ThreadRecipe, ThreadSteps, digest, plan
from recipes.thread_models.own_answers import Circles, OwnAnswers, answers_to_all, prompts_of_rounds
from recipes.thread_models.records import UNSTRUCTURED, Annotated, read_annotated
from recipes.thread_models.report import THREADS_CARD, ThreadsRun, thread_card
from recipes.thread_models.rows import RowWriter, known_dialects, with_marker

_ALIKE = 0.99  # cosine above which two embeddings count as equal


@dataclass(frozen=True)
class Student:
    """A model to train, in float32 on its device, and its tokenizer, which has the marker and all control tokens."""

    model: Any
    tokenizer: Any
    config: ModelConfig
    name: str

    @classmethod
    def load(cls, path: Path, dialects: Iterable[str] | Mapping[str, Dialect], device: torch.device, seed: int = 0) -> Student:
        """Load a model; missing control tokens are added, and control tokens that it never learned get new embeddings.

        Raises UserError if there is no model, chat template or end token.
        """
        config = model_config(path)
        tokenizer = load_for_training(path)
        if tokenizer.chat_template is None:
            raise UserError(f"{path} has no chat template, which is needed to name the dialect in the prompt")
        if tokenizer.eos_token_id is None:
            raise UserError(f"the tokenizer in {path} has no end token")
        tokenizer.chat_template = with_marker(tokenizer.chat_template)
        tokenizer.model_max_length = config.max_position_embeddings
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, local_files_only=True)
        known = known_dialects(dialects)
        control = list(dict.fromkeys(text for one in known.values() for text in (*one.control_tokens, *one.opener_tokens)))
        added = [text for text in control if text not in tokenizer.get_vocab()]
        if added:
            tokenizer.add_special_tokens({"additional_special_tokens": added}, replace_extra_special_tokens=False)
            model.resize_token_embeddings(max(len(tokenizer), model.config.vocab_size), mean_resizing=False)
        renew_embeddings(model, tokenizer, control, added, seed)
        return cls(model.to(device).eval(), tokenizer, config, fingerprint(path))

    def companion(self, path: Path, knows_all: bool) -> Any:
        """Another model, in float32 on the same device.

        Raises UserError unless it has the same token ids and, with ``knows_all``, all control tokens.
        """
        own, other = self.tokenizer.get_vocab(), load_for_training(path).get_vocab()
        if not other.items() <= own.items() or (knows_all and len(other) < len(own)):
            raise UserError(
                f"{path} has a different tokenizer ({len(other)} tokens, not {len(own)}): use a model of the same family"
            )
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, local_files_only=True)
        return model.to(self.model.device).eval()

    def save(self, out: Path) -> None:
        """Write the model in bfloat16, with its tokenizer."""
        self.model.to(torch.bfloat16).save_pretrained(out)
        self.tokenizer.save_pretrained(out)


@torch.no_grad()
def renew_embeddings(model: Any, tokenizer: Any, control: list[str], added: list[str], seed: int) -> None:
    """Draw new embeddings, distributed like the others, for tokens that were never learned: those ``added``, and special tokens
    with nearly equal embeddings (pretraining pushes all tokens that never occur in the same direction).

    Only control tokens and the chat template's special tokens around the marker are considered.
    """
    special = {token for token, added_token in tokenizer.added_tokens_decoder.items() if added_token.special}
    turn = tokenizer.apply_chat_template([{"role": "user", "content": "?"}], threads="?", return_dict=False)
    wanted = torch.tensor(sorted({*tokenizer.convert_tokens_to_ids(control), *(token for token in turn if token in special)}))
    embeddings, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    directions = nn.functional.normalize(embeddings[wanted], dim=-1)
    alike = (directions @ directions.T - torch.eye(len(wanted))).amax(1) > _ALIKE
    renewed = wanted[alike | torch.isin(wanted, torch.tensor(tokenizer.convert_tokens_to_ids(added), dtype=torch.int64))]
    generator = torch.Generator().manual_seed(seed)
    for weights in (embeddings,) if head is embeddings else (embeddings, head):
        others = torch.ones(len(weights), dtype=torch.bool)
        others[renewed] = False
        noise = torch.randn(len(renewed), weights.shape[1], generator=generator)
        weights[renewed] = weights[others].mean(0) + noise * weights[others].std(0)


def tune(
    target_path: Path,
    files: dict[str, tuple[Path, ...]],
    recipe: ThreadRecipe,
    run: ThreadsRun,
    teacher_path: Path | None = None,
    prompts: tuple[str, ...] = (),
    other_dialects: Mapping[str, Dialect] | None = None,
) -> dict:
    """Train and write ``run.out``: the model in bfloat16 with its tokenizer, ``training.json`` and a model card.

    Args:
        files: annotated answers, by dialect.
        teacher_path: a tuned model with the same tokenizer. Its next-token distribution is learned instead of the written
            tokens, and the report says how well its answers are predicted.
        prompts: further prompts, without answers. Circle rounds ask these instead of the files'. A teacher answers
            each in one thread and in every dialect, and every second sample is one of its answers.
        other_dialects: dialects in place of the shipped ones of their names.

    Raises UserError if models, files or ``run.work`` do not fit.
    """
    torch.set_num_threads(run.threads)
    dialects = dict(known_dialects(files.keys())) | dict(other_dialects or {})
    student = Student.load(target_path, dialects, run.device, recipe.seed)
    _check(student.config, files, recipe)
    writer = RowWriter(student.tokenizer, dialects, int(student.tokenizer.eos_token_id), recipe.true_lengths)
    records = {name: [record for path in paths for record in read_annotated(path, name)] for name, paths in files.items()}
    written, tested = (
        [writer.sample(one, name) for name, found in records.items() for one in found if one.question.held_out == held_out]
        for held_out in (False, True)
    )
    held_out = held_out_of(tested, run.held_out_prompts, recipe.max_length, run.work / "sequential")
    teacher, answered = None, []
    if teacher_path is not None:
        teacher = student.companion(teacher_path, knows_all=True)
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
    """Measurements before and after training."""

    student: Student
    writer: RowWriter
    held_out: HeldOutSamples
    answered: dict[str, dict[str, list[AnsweredPrompt]]] | None  # the teacher's answers; None without a teacher

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
        return ThreadLoss(self.student.model, self.writer.controls.to(self.student.model.device))


def _check(config: ModelConfig, files: dict[str, tuple[Path, ...]], recipe: ThreadRecipe) -> None:
    for name in files:
        if recipe.form == "unrolled" and load_dialect(name).join is not None:
            raise UserError(f"--form unrolled is for dialects without joins, which {name} has: use --form tree")
    windows = [layer.reach.size for layer in config.attention_layers if layer.reach is not None]
    if windows and min(windows) < recipe.max_length:
        raise UserError(
            f"the target's attention window has {min(windows)} tokens, but samples may have {recipe.max_length}: "
            "use a smaller --max-length"
        )


def _counts(records: list[Annotated]) -> dict[str, int]:
    """Numbers of answers to learn from, and of those in several threads."""
    training = [record for record in records if not record.question.held_out]
    return {"answers": len(training), "structured": sum(record.rule != UNSTRUCTURED for record in training)}
