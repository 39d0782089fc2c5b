"""Fine-tune a model for threads (APAR §3, PASTA-SFT): annotated files in, a checkpoint directory out.

Owns what goes into a run and what comes out of it: model and tokenizer, held-out samples, the report.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from pipedec.core import UserError
from pipedec.engine.prompt import Prompter, same_tokenizer
from pipedec.engine.spec import DTYPES
from pipedec.model import ModelConfig
from pipedec.model.bita import fingerprint
from pipedec.threads import load_dialect
from pipedec.train.annotated import UNSTRUCTURED, Annotated, read_annotated
from pipedec.train.continuations import continue_greedily
from pipedec.train.thread_answers import Asked, ModelAnswers
from pipedec.train.thread_card import thread_card
from pipedec.train.thread_figures import Spoken, agreement, speak, thread_figures
from pipedec.train.thread_samples import Sample, Writer, with_marker
from pipedec.train.thread_trainer import ThreadLoss, ThreadRecipe, ThreadSteps, digest, held_out_loss, plan
from pipedec.train.tuner import Tuner

PLAIN = "plain"
_ALIKE = 0.99  # cosine


@dataclass(frozen=True)
class Student:
    """A model that learns, in float32 on its device, and its tokenizer, which knows the marker and all control tokens."""

    model: Any
    tokenizer: Any
    config: ModelConfig
    name: str

    @classmethod
    def load(cls, path: Path, dialects: list[str], device: torch.device, seed: int = 0) -> Student:
        """The model; its tokenizer gets the control tokens that it lacks, and those that it never learned get new embeddings.

        Raises:
            UserError: it is not fit for it.
        """
        config = ModelConfig.from_directory(path)
        tokenizer = Prompter(path, config.max_positions).tokenizer
        if tokenizer.chat_template is None:
            raise UserError(f"{path} has no chat template, through which a model is told in what dialect to answer")
        if tokenizer.eos_token_id is None:
            raise UserError(f"the tokenizer in {path} names no end token")
        tokenizer.chat_template = with_marker(tokenizer.chat_template)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, local_files_only=True)
        control = list(dict.fromkeys(text for name in dialects for text in load_dialect(name).control_tokens))
        added = [text for text in control if text not in tokenizer.get_vocab()]
        if added:
            tokenizer.add_special_tokens({"additional_special_tokens": added}, replace_extra_special_tokens=False)
            model.resize_token_embeddings(max(len(tokenizer), model.config.vocab_size), mean_resizing=False)
        renew_embeddings(model, tokenizer, control, added, seed)
        return cls(model.to(device).eval(), tokenizer, config, fingerprint(path))

    def save(self, out: Path) -> None:
        """In bfloat16, with the tokenizer."""
        self.model.to(torch.bfloat16).save_pretrained(out)
        self.tokenizer.save_pretrained(out)


@torch.no_grad()
def renew_embeddings(model: Any, tokenizer: Any, control: list[str], added: list[str], seed: int) -> None:
    """Draw new embeddings, like those of other tokens, for tokens of which none was learned: those ``added``, and special ones
    that training has pushed to one and the same place because they never came.

    Only control tokens and what the chat template puts around the marker are looked at.
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


@dataclass(frozen=True)
class HeldOut:
    """What is measured on: all samples of each dialect, and prompts of each kind, by rule.

    Attributes:
        prompts: of each dialect and rule; an answer has at most ``max_tokens`` tokens.
        store: keeps answers in one thread.
    """

    samples: dict[str, list[Sample]]
    prompts: dict[str, dict[str, list[Sample]]]
    max_tokens: int
    store: Path

    def losses(self, loss: ThreadLoss, writer: Writer) -> dict[str, dict[str, Any]]:
        """Of each dialect, and of the same answers in one thread."""
        report = {dialect: held_out_loss(loss, writer, samples) for dialect, samples in self.samples.items()}
        return report | self.plain_loss(loss, writer)

    def plain_loss(self, loss: ThreadLoss, writer: Writer) -> dict[str, dict[str, Any]]:
        distinct = {(sample.record.question.prompt, sample.record.question.answer): sample.record for sample in self._all()}
        return {PLAIN: held_out_loss(loss, writer, [writer.sample(record, None) for record in distinct.values()])}

    def _all(self) -> list[Sample]:
        return [sample for samples in self.samples.values() for sample in samples]

    def speak(self, model: Any, writer: Writer) -> dict[str, dict[str, list[Spoken]]]:
        """Greedy answers to the prompts of each dialect and rule."""
        return {
            dialect: {
                rule: speak(
                    ModelAnswers(model, writer.bound[dialect], (writer.end_token_id,), self.max_tokens),
                    [Asked(sample.prompt) for sample in samples],
                    f"held out: {dialect} {rule}",
                )
                for rule, samples in by_rule.items()
            }
            for dialect, by_rule in self.prompts.items()
        }

    def figures(self, model: Any, writer: Writer, spoken: dict[str, dict[str, list[Spoken]]]) -> dict[str, dict[str, Any]]:
        """What these answers are like beside the model's answers in one thread, of each dialect and rule."""
        return {
            dialect: {
                rule: thread_figures(
                    [sequence for _, sequence in answers],
                    self._baseline(model, writer, self.prompts[dialect][rule], f"{dialect}-{rule}"),
                )
                for rule, answers in by_rule.items()
            }
            for dialect, by_rule in spoken.items()
        }

    def _baseline(self, model: Any, writer: Writer, samples: list[Sample], name: str) -> list[int]:
        """Tokens of the answers in one thread."""
        prompts = [list(writer.prompt(sample.record.question.prompt, None)) for sample in samples]
        said = {
            tuple(found.ids[: found.prompt_length]): found
            for found in continue_greedily(model, prompts, self.max_tokens, self.store / name)
        }
        return [len(said[tuple(prompt)].ids) - len(prompt) for prompt in prompts]


@dataclass(frozen=True)
class Run:
    """Where a fine-tuning computes, what it leaves behind, and what it is measured on.

    Attributes:
        work: where log and checkpoint live; a second run goes on from them.
        dtype: what forwards compute in; the weights that are trained are float32.
        held_out_prompts: answered of each dialect and rule, at most.
    """

    out: Path
    work: Path
    dtype: str = "float32"
    threads: int = 2
    device: torch.device = torch.device("cpu")
    held_out_prompts: int = 48


def tune(
    target_path: Path, files: dict[str, tuple[Path, ...]], recipe: ThreadRecipe, run: Run, teacher_path: Path | None = None
) -> dict:
    """Train and write ``run.out``: the model in bfloat16 with its tokenizer, ``training.json`` and a model card.

    Args:
        files: annotated answers, by dialect.
        teacher_path: a model with the same tokenizer, tuned already: the distribution of its next token is learned instead of
            the written one, and what is measured is how well its answers are foreseen.

    Raises:
        UserError: models, files or ``run.work`` are not fit for it.
    """
    torch.set_num_threads(run.threads)
    student = Student.load(target_path, list(files), run.device, recipe.seed)
    _check(student.config, files, recipe)
    writer = Writer(student.tokenizer, files, int(student.tokenizer.eos_token_id))
    records = {
        dialect: [record for path in paths for record in read_annotated(path, dialect)] for dialect, paths in files.items()
    }
    training = [sample for found in _samples(writer, records, held_out=False).values() for sample in found]
    held_out = _held_out(_samples(writer, records, held_out=True), recipe, run)
    teacher = _teacher(teacher_path, target_path, run.device)
    controls = torch.tensor(sorted({token for bound in writer.bound.values() for token in bound.control}), device=run.device)
    loss = ThreadLoss(student.model, controls, DTYPES[run.dtype], teacher)
    written = ThreadLoss(student.model, controls)
    steps = plan(training, writer, recipe)
    identity = {**asdict(recipe), "target": student.name, "dtype": str(loss.computes), "samples": digest(training)}
    identity["teacher"] = None if teacher_path is None else fingerprint(teacher_path)
    tuner = Tuner("threads", student.model, recipe, run.work, identity)
    spoken = None if teacher is None else held_out.speak(teacher, writer)
    before = held_out.plain_loss(written, writer) if spoken is None else _agreement(student.model, spoken)
    tuner.run(ThreadSteps(loss, writer, steps, recipe))
    student.save(run.out)
    student.model.float()  # measured as stored
    report = {
        "recipe": asdict(recipe),
        "target": student.name,
        "teacher": identity["teacher"],
        "parameters": student.model.num_parameters(),
        "samples": {dialect: _counts(found) for dialect, found in records.items()},
        "seen_tokens": sum(sample.num_tokens for step in steps for sample in step),
        "before": before,
        "held_out_loss": held_out.losses(written, writer),
    }
    if spoken is None:
        report["held_out"] = held_out.figures(student.model, writer, held_out.speak(student.model, writer))
    else:
        report["agreement"] = _agreement(student.model, spoken)
    (run.out / "training.json").write_text(json.dumps(report, indent=2) + "\n")
    (run.out / "README.md").write_text(thread_card(report))
    return report


def _check(config: ModelConfig, files: dict[str, tuple[Path, ...]], recipe: ThreadRecipe) -> None:
    for name in files:
        if recipe.form == "unrolled" and load_dialect(name).join is not None:
            raise UserError(f"--form unrolled is for dialects without joins, which {name} has: use --form tree")
    windows = [window for window in config.sliding_windows if window is not None]
    if windows and min(windows) < recipe.max_length:
        raise UserError(
            f"the target's attention window has {min(windows)} tokens, but samples {recipe.max_length}: "
            "use a smaller --max-length"
        )


def _teacher(path: Path | None, student: Path, device: torch.device) -> Any:
    if path is None:
        return None
    same_tokenizer(path, student)
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, local_files_only=True).to(device).eval()


def _samples(writer: Writer, records: dict[str, list[Annotated]], held_out: bool) -> dict[str, list[Sample]]:
    return {
        dialect: [writer.sample(record, dialect) for record in found if record.question.held_out == held_out]
        for dialect, found in records.items()
    }


def _held_out(samples: dict[str, list[Sample]], recipe: ThreadRecipe, run: Run) -> HeldOut:
    fitting = {dialect: [one for one in found if one.num_tokens <= recipe.max_length] for dialect, found in samples.items()}
    prompts: dict[str, dict[str, list[Sample]]] = {}
    for dialect, found in fitting.items():
        by_rule: dict[str, dict[tuple[int, ...], Sample]] = {}
        for sample in found:
            asked = by_rule.setdefault(sample.record.rule, {})
            if len(asked) < run.held_out_prompts:
                asked.setdefault(sample.prompt, sample)
        prompts[dialect] = {rule: list(asked.values()) for rule, asked in sorted(by_rule.items())}
    return HeldOut(fitting, prompts, recipe.max_length, run.work / "sequential")


def _agreement(model: Any, spoken: dict[str, dict[str, list[Spoken]]]) -> dict[str, dict[str, Any]]:
    """How well the model foresees these answers, of each dialect and rule."""
    return {
        dialect: {rule: agreement(model, answers) for rule, answers in by_rule.items()} for dialect, by_rule in spoken.items()
    }


def _counts(records: list[Annotated]) -> dict[str, int]:
    """Answers to learn from, and how many of them are in several threads."""
    training = [record for record in records if not record.question.held_out]
    return {"answers": len(training), "structured": sum(record.rule != UNSTRUCTURED for record in training)}
