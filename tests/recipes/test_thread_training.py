"""Training for threads at toy size: rows are what decoding will see, forms agree, runs resume exactly, mistakes are one line."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from support.annotated_answers import APAR, record, records, write_records
from support.checkpoints import save_tiny
from support.refusals import refusal
from support.tiny_pair import Pair
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipedec.core.errors import UserError
from pipedec.text.prompt import Prompter
from pipedec.threads import load_dialect
from pipedec.train.run import TrainingLoop
from recipes.thread_models.__main__ import thread_models as command
from recipes.thread_models.learning import (
    PaddedRows,
    ThreadLoss,
    ThreadRecipe,
    ThreadSteps,
    held_out_loss,
    learned_logits,
    plan,
)
from recipes.thread_models.report import THREADS_CARD, ThreadsRun, thread_card
from recipes.thread_models.rows import RowWriter, WrittenSample, with_marker
from recipes.thread_models.tuning import Student, tune

CPU = torch.device("cpu")
RECIPE = ThreadRecipe(steps=6, batch_tokens=300, warmup_steps=2, learning_rate=1e-3, max_length=130)


def loss_of(student: Student, writer: RowWriter) -> ThreadLoss:
    return ThreadLoss(student.model, writer.controls)


def run_in(folder: Path) -> ThreadsRun:
    return ThreadsRun(folder / "out", folder / "work", "float32", 1, CPU, held_out_prompts=2)


def files_in(folder: Path) -> dict[str, tuple[Path, ...]]:
    folder.mkdir(parents=True, exist_ok=True)
    return {dialect: (write_records(folder / f"{dialect}.jsonl", dialect),) for dialect in ("apar", "pasta")}


def test_a_prompt_is_the_engines_and_the_marker_comes_before_it(student: Student, writer: RowWriter, pair: Pair) -> None:
    prompter = Prompter(pair.draft, 2048)
    assert writer.prompt("List both.", None) == prompter.token_ids("List both.", raw=False, max_tokens=1)
    marked = student.tokenizer.decode(writer.prompt("List both.", "apar"))
    assert marked == "<|system|>threads: apar<|user|>List both.<|assistant|>"
    template = student.tokenizer.chat_template
    assert with_marker(template) == template
    told = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    text = student.tokenizer.apply_chat_template(told, threads="pasta", tokenize=False)
    assert text == "<|system|>threads: pasta\nBe brief.<|user|>Hi"
    assert student.tokenizer.apply_chat_template(told, tokenize=False) == "<|system|>Be brief.<|user|>Hi"
    sample = writer.sample(record(("Say [Fork] or </s>.",), rule="none"), "apar")
    assert writer.bound["apar"].opener not in sample.answer, "text is never read as control"
    assert sample.answer.count(writer.end_token_id) == 1 and writer.decode(list(sample.answer)) == "Say [Fork] or </s>."


def test_both_forms_give_the_same_loss_and_gradients(student: Student, writer: RowWriter) -> None:
    samples = [writer.sample(found, "apar") for found in records("apar", 8)]
    found = {}
    for form in ("tree", "unrolled"):
        recipe = replace(RECIPE, form=form, plain_share=0.0)
        student.model.zero_grad()
        figures = ThreadSteps(loss_of(student, writer), writer, plan(samples, writer, recipe), recipe)(0)
        found[form] = figures, [parameter.grad.clone() for parameter in student.model.parameters()]
    for name in ("loss", "control_loss"):
        assert found["tree"][0][name] == pytest.approx(found["unrolled"][0][name], rel=1e-5)
    assert found["tree"][0]["tokens"] < found["unrolled"][0]["tokens"]
    for tree, unrolled in zip(found["tree"][1], found["unrolled"][1], strict=True):
        torch.testing.assert_close(tree, unrolled, atol=1e-5, rtol=1e-4)


def test_true_lengths_take_the_place_of_stated_ones(student: Student) -> None:
    """PASTA §6.2: positions of the main thread go on where the child ends, or at the next multiple of ten after it."""
    end, found = student.tokenizer.eos_token_id, {}
    for unit in (None, 10):
        dialects = {"pasta": replace(load_dialect("pasta"), length_unit=unit, default_length=500, length_pattern=None)}
        for true_lengths in (False, True):
            writer = RowWriter(student.tokenizer, dialects, end, true_lengths)
            sample = writer.sample(next(one for one in records("pasta") if one.forks), "pasta")
            sequence = writer.sequence(sample)
            child = sequence.threads[1]
            after = sequence.main.positions[child.opened_at]
            found[unit, true_lengths] = after - child.positions[0], child.num_tokens
            assert [token.token_id for token in sequence.document()] == list(sample.answer), "the tokens stay the same"
    gap, length = found[None, True]
    assert gap == length and found[10, True] == (-(-length // 10) * 10, length)
    assert found[None, False][0] == found[10, False][0] == 500


def test_the_papers_recipe_gives_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[ThreadRecipe] = []
    monkeypatch.setattr("recipes.thread_models.__main__._tune", lambda _dialect, recipe, **_others: found.append(recipe))
    flags = ["--in", "x", "--out", str(tmp_path / "out"), "--work", str(tmp_path / "work"), "--recipe", "paper"]
    for words in (["apar", *flags], ["pasta-sft", *flags, "--steps", "8"], ["apar", *flags[:-2]]):
        assert CliRunner().invoke(command, words, catch_exceptions=False).exit_code == 0
    apar, pasta, ours = found
    assert (apar.steps, apar.batch, apar.learning_rate, apar.rate(apar.steps)) == (2000, 128, 2e-5, 0.0)
    assert (pasta.steps, pasta.batch, pasta.rate(0)) == (8, 8, 1e-5)
    assert ours == ThreadRecipe()


def test_every_sample_comes_once_before_any_comes_again(writer: RowWriter) -> None:
    samples = [writer.sample(found, "apar") for found in records("apar", 12)]
    planned = plan(samples, writer, replace(RECIPE, steps=9))
    drawn = [sample.record.question.prompt for step in planned for sample in step if isinstance(sample, WrittenSample)]
    assert len(drawn) >= 24 and sorted(drawn[:12]) == sorted(drawn[12:24]) and drawn[:12] != drawn[12:24]
    for share in (0.0, 1.0):
        steps = plan(samples, writer, replace(RECIPE, plain_share=share))
        assert {sample.dialect for step in steps for sample in step} == {None if share else "apar"}
        assert all(sum(sample.num_tokens for sample in step) >= RECIPE.batch_tokens for step in steps)
    assert [len(step) for step in plan(samples, writer, replace(RECIPE, batch=5))] == [5] * RECIPE.steps
    longest = max(sample.num_tokens for sample in samples)
    short = plan(samples, writer, replace(RECIPE, plain_share=0.0, max_length=longest - 1))
    assert max(sample.num_tokens for step in short for sample in step) < longest
    with pytest.raises(UserError, match="at most 3 tokens"):
        plan(samples, writer, replace(RECIPE, max_length=3))


def test_control_tokens_count_more(student: Student, writer: RowWriter) -> None:
    sample = writer.sample(record(APAR), "apar")
    loss = loss_of(student, writer)
    with torch.no_grad():
        losses = loss.of(PaddedRows.of(writer.rows(sample, "tree"), CPU))
    assert int(losses.is_control.sum()) == 2
    for weight in (1.0, 5.0):
        weights = 1 + (weight - 1) * losses.is_control
        figures = ThreadSteps(loss, writer, [[sample]], replace(RECIPE, control_weight=weight))(0)
        assert figures["loss"] == pytest.approx(float((losses.values * weights).sum() / weights.sum()), rel=1e-5)
        assert figures["control_loss"] == pytest.approx(float(losses.values[losses.is_control].mean()), rel=1e-5)
    report = held_out_loss(loss, writer, [sample])
    assert report["control_tokens"] == 2 and report["loss"] == pytest.approx(
        float(losses.values[~losses.is_control].mean()), abs=1e-3
    )


def test_a_teachers_distribution_is_learned(student: Student, writer: RowWriter, pair: Pair) -> None:
    batch = PaddedRows.of(writer.rows(writer.sample(record(APAR), "apar"), "tree"), CPU)
    own = learned_logits(student.model, batch).log_softmax(-1)
    taught = replace(loss_of(student, writer), teacher=student.model).of(batch)
    torch.testing.assert_close(taught.values, -(own.exp() * own).sum(-1), atol=1e-4, rtol=1e-4)


def test_missing_control_tokens_are_added(pair: Pair, student: Student) -> None:
    before = AutoTokenizer.from_pretrained(pair.draft)
    assert len(student.tokenizer) == len(before) + 6 + len(load_dialect("pasta").opener_tokens)
    model = AutoModelForCausalLM.from_pretrained(pair.draft)
    embeddings = student.model.get_input_embeddings().weight
    assert torch.equal(embeddings[: len(before)], model.get_input_embeddings().weight)
    assert len(embeddings) == len(student.model.get_output_embeddings().weight) == len(student.tokenizer)
    assert embeddings[len(before) :].norm(dim=1).min() > 0.3 * embeddings.norm(dim=1).median()


def test_tokens_that_were_never_learned_get_embeddings_of_their_own(student: Student, tmp_path: Path) -> None:
    fork, child, promise = student.tokenizer.convert_tokens_to_ids(["[Fork]", "[Child]", "<promise"])
    weights = student.model.get_input_embeddings().weight
    with torch.no_grad():
        weights[child] = 1.01 * weights[fork]
    student.model.save_pretrained(tmp_path)
    student.tokenizer.save_pretrained(tmp_path)
    again = Student.load(tmp_path, ["apar", "pasta"], CPU, seed=3)
    renewed = again.model.get_input_embeddings().weight
    changed = (renewed != weights).any(1).nonzero()[:, 0].tolist()
    assert changed == [fork, child] and torch.equal(renewed[promise], weights[promise])
    assert torch.cosine_similarity(renewed[fork], renewed[child], dim=0) < 0.9
    assert torch.equal(renewed, Student.load(tmp_path, ["apar", "pasta"], CPU, seed=3).model.get_input_embeddings().weight)


@pytest.mark.slow
def test_a_killed_run_continues_to_the_same_weights(pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TrainingLoop, "SAVE_EVERY", 2)
    files = {"apar": files_in(tmp_path)["apar"]}
    recipe = replace(RECIPE, max_length=90, circle_rounds=2, circle_prompts=3, circle_answers=2)
    whole = tune(pair.draft, files, recipe, run_in(tmp_path / "whole"))
    step = ThreadSteps.__call__

    def dies(steps: ThreadSteps, number: int) -> dict[str, float]:
        if number == 3:
            raise KeyboardInterrupt
        return step(steps, number)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(ThreadSteps, "__call__", dies)
        tune(pair.draft, files, recipe, run_in(tmp_path / "killed"))
    log = tmp_path / "killed" / "work" / "threads.jsonl"
    assert len(log.read_text().splitlines()) == 3
    assert tune(pair.draft, files, recipe, run_in(tmp_path / "killed")) == whole
    assert log.read_text() == (tmp_path / "whole" / "work" / "threads.jsonl").read_text()
    weights = [load_file(tmp_path / name / "out" / "model.safetensors") for name in ("whole", "killed")]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    with pytest.raises(UserError, match=r"belongs to another run \(seed 0\): give another --work"):
        tune(pair.draft, files, replace(recipe, seed=1), run_in(tmp_path / "killed"))


@pytest.mark.slow
def test_a_draft_learns_from_its_tuned_target(pair: Pair, tmp_path: Path) -> None:
    files = files_in(tmp_path)
    tune(pair.target, files, replace(RECIPE, steps=1), run_in(tmp_path / "target"))
    with pytest.raises(UserError, match="different tokenizer"):
        tune(pair.draft, files, RECIPE, run_in(tmp_path / "draft"), pair.foreign_draft)
    with pytest.raises(UserError, match="different tokenizer"):
        tune(pair.draft, files, RECIPE, run_in(tmp_path / "draft"), pair.target)
    recipe = replace(RECIPE, steps=15, learning_rate=3e-3)
    prompts = tuple(f"Say {number} words, please." for number in range(3))
    report = tune(pair.draft, files, recipe, run_in(tmp_path / "draft"), tmp_path / "target" / "out", prompts)
    for dialect, by_rule in report["agreement"].items():
        for rule, row in by_rule.items():
            assert row["tokens"] > 0 and row["top16"] >= report["before"][dialect][rule]["top16"]
    described = (tmp_path / "draft" / "out" / "README.md").read_text()
    assert "distribution of a teacher" in described and "own greedy ones to 3 further prompts" in described
    assert report["prompts"] == 3 and (tmp_path / "draft" / "work" / "teacher" / "0000.json").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "cannot read absent.jsonl"),
        (["--also", "pasta"], "--also pasta: give DIALECT=FILE"),
        (["--max-length", "0"], "'--max-length': must be an integer (at least "),
        (["--form", "unrolled", "--also", "pasta=x"], "which pasta has"),
        (["--target", "nowhere"], "nowhere is not a directory"),
    ],
)
def test_mistakes_are_told(flags: list[str], message: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(
        command, ["apar", "--in", "absent.jsonl", "--out", str(tmp_path / "out"), "--work", str(tmp_path / "work"), *flags]
    )
    assert message in refusal(result)
    assert "\n" not in str(result.exception) and not (tmp_path / "out").exists()


def test_unfit_models_are_told(pair: Pair, tokenizer: Any, tmp_path: Path) -> None:
    files, bare = files_in(tmp_path), Path(shutil.copytree(pair.draft, tmp_path / "bare"))
    plain = AutoTokenizer.from_pretrained(pair.draft)
    plain.chat_template = None
    (bare / "chat_template.jinja").unlink(missing_ok=True)
    plain.save_pretrained(bare)
    with pytest.raises(UserError, match="has no chat template"):
        tune(bare, files, RECIPE, run_in(tmp_path))
    save_tiny("mistral", tmp_path / "windowed", vocab=300, sliding_window=8)
    tokenizer.save_pretrained(tmp_path / "windowed")
    with pytest.raises(UserError, match="window has 8 tokens"):
        tune(tmp_path / "windowed", files, RECIPE, run_in(tmp_path))


def test_the_command_prints_what_it_measured(pair: Pair, tmp_path: Path) -> None:
    files, out = files_in(tmp_path), tmp_path / "out"
    flags = ["--threads", "1", "--steps", "1", "--batch-tokens", "50", "--max-length", "130", "--held-out-prompts", "1"]
    flags += ["--in", str(files["pasta"][0]), "--target", str(pair.draft), "--out", str(out), "--work", str(tmp_path / "work")]
    result = CliRunner().invoke(command, ["pasta-sft", *flags], env={"COLUMNS": "160"}, catch_exceptions=False)
    report = json.loads((out / "training.json").read_text())
    assert set(report["held_out_loss"]) == {"pasta", "plain"}
    assert f"{report['held_out_loss']['plain']['loss']:.3f}" in result.output and "pasta list" in result.output
    assert (out / "README.md").read_text() == thread_card(THREADS_CARD, report)
    assert all(tensor.dtype == torch.bfloat16 for tensor in load_file(out / "model.safetensors").values())
    tokenizer = AutoTokenizer.from_pretrained(out)
    asked = tokenizer.apply_chat_template([{"role": "user", "content": "x"}], threads="pasta", tokenize=False)
    assert "threads: pasta" in asked and tokenizer.model_max_length == 2048
    assert len(tokenizer) == AutoModelForCausalLM.from_pretrained(out).config.vocab_size
    held_out = [found for found in records("pasta") if found.question.held_out]
    assert report["samples"]["pasta"]["answers"] == 60 - len(held_out) and len(held_out) == 2
