"""Answers that run in circles: what counts as one, the rows made of it, and that training unlearns it and resumes exactly."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from support.annotated_answers import write_records
from support.tiny_pair import Pair

from pipedec.core import UserError
from pipedec.threads import Sequence, ThreadedSequence, replay
from pipedec.train.run import TrainingLoop
from recipes.thread_models.figures import in_circles, repeats
from recipes.thread_models.learning import PaddedRows, ThreadLoss, ThreadRecipe, ThreadSteps, learned_logits
from recipes.thread_models.own_answers import Circles, avoiding_row, prompts_of_rounds
from recipes.thread_models.records import read_annotated
from recipes.thread_models.report import ThreadsRun
from recipes.thread_models.rows import IGNORED, RowWriter
from recipes.thread_models.tuning import Student, tune

CPU = torch.device("cpu")
CIRCLE = [*range(100, 120), *[20, 21, 22, 23, 24] * 60]
RECIPE = ThreadRecipe(
    steps=4, batch_tokens=300, warmup_steps=1, learning_rate=1e-3, max_length=130,
    circle_rounds=2, circle_prompts=6, circle_answers=2,
)  # fmt: skip


def stutters(model: Path, path: Path) -> None:
    """Save a model that repeats the last token again and again."""
    shutil.copytree(model, path)
    weights = load_file(path / "model.safetensors")
    for name, tensor in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, path / "model.safetensors", {"format": "pt"})


def said(tokens: list[int], max_tokens: int, end: int = 1) -> Sequence:
    sequence = Sequence(3, [end], max_tokens)
    replay(sequence, tokens)
    return sequence


@given(st.lists(st.integers(0, 2), max_size=60))
def test_a_token_repeats_if_its_eight_tokens_occurred_before(tokens: list[int]) -> None:
    for end, found in enumerate(repeats(tokens), start=1):
        eight = tokens[end - 8 : end] if end >= 8 else []
        assert found == any(eight and tokens[start : start + 8] == eight for start in range(end - 8))


def test_circles_are_answers_that_are_cut_while_they_repeat_themselves() -> None:
    assert in_circles(said(CIRCLE[:200], 200))
    assert not in_circles(said([*CIRCLE[:200], 1], 300)), "it ended by itself"
    assert not in_circles(said(list(range(100, 300)), 200)), "it is merely long"
    assert not in_circles(said([*range(100, 200), *range(100, 140)], 140)), "a part of its end is repeated"


def test_one_of_several_threads_may_run_in_circles(writer: RowWriter) -> None:
    bound = writer.bound["apar"]
    sequence = ThreadedSequence(bound, 3, [writer.end_token_id], 260)
    replay(sequence, [50, bound.opener, bound.child_start, *CIRCLE[:257]])
    assert sequence.finished == "length" and in_circles(sequence)


def test_only_repeated_tokens_are_targets_and_the_rest_is_cut(student: Student) -> None:
    row = avoiding_row(said(CIRCLE[:200], 200), (5, 6, 7))
    places = (row.targets != IGNORED).nonzero().flatten().tolist()
    first = 3 + 20 + 5 + 8 - 1  # of the second time that eight tokens come
    assert row.is_avoided and places == list(range(first - 1, first - 1 + 64)) and len(row.token_ids) == first + 63
    assert row.targets[places].tolist() == CIRCLE[first - 3 : first - 3 + 64]


def test_unlikelihood_is_of_avoided_targets_alone(student: Student, writer: RowWriter) -> None:
    row = avoiding_row(said(CIRCLE[:60], 60), (5, 6, 7))
    likely = replace(row, is_avoided=False)
    batch = PaddedRows.of([row, likely], CPU)
    losses = ThreadLoss(student.model, writer.controls).of(batch)
    chances = learned_logits(student.model, batch).softmax(-1).gather(1, batch.learned[:, None])[:, 0]
    half = len(chances) // 2
    assert losses.is_avoided.tolist() == [True] * half + [False] * half
    assert torch.allclose(losses.values[:half], -torch.log1p(-chances[:half]), atol=1e-5)
    assert torch.allclose(losses.values[half:], -chances[half:].log(), atol=1e-4)


def test_a_step_learns_its_samples_and_avoids_circles(student: Student, writer: RowWriter, tmp_path: Path) -> None:
    record_file = write_records(tmp_path / "apar.jsonl", "apar")
    samples = [writer.sample(record, "apar") for record in read_annotated(record_file, "apar")][:3]
    row = avoiding_row(said(CIRCLE[:100], 100), (5, 6, 7))
    loss = ThreadLoss(student.model, writer.controls)
    alone = ThreadSteps(loss, writer, [samples], RECIPE)(0)
    student.model.zero_grad()
    with_circles = ThreadSteps(loss, writer, [samples], RECIPE, lambda step: [row, row])(0)
    assert with_circles["circles"] == 2 and with_circles["circle_loss"] > 0 and "circles" not in alone
    assert with_circles["loss"] == pytest.approx(alone["loss"]), "of the samples, as before"
    assert with_circles["control_loss"] == pytest.approx(alone["control_loss"])


def test_rounds_ask_in_one_thread_and_in_every_dialect_by_turns(writer: RowWriter) -> None:
    prompts = [f"How long is {number}?" for number in range(12)]
    rounds = prompts_of_rounds(prompts, writer, RECIPE)
    asked = [one for part in rounds for one in part]
    assert [one.dialect for one in asked] == [None, "apar", "pasta"] * 4 and len(rounds) == 2
    of_each = [[writer.prompt(prompt, one.dialect) for prompt in prompts] for one in asked]
    places = [known.index(one.prompt) for known, one in zip(of_each, asked, strict=True)]
    assert sorted(places) == list(range(12)) != places, "each once, in a random order"


@pytest.mark.slow
def test_a_killed_run_continues_with_the_same_circles(pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TrainingLoop, "SAVE_EVERY", 1)
    stutters(pair.draft, tmp_path / "stutters")
    files = {"apar": (write_records(tmp_path / "apar.jsonl", "apar"),)}

    def train(name: str) -> dict[str, object]:
        run = ThreadsRun(tmp_path / name / "out", tmp_path / name / "work", threads=1, held_out_prompts=1)
        return tune(tmp_path / "stutters", files, RECIPE, run, prompts=("What?", "Why?"))

    def circles(name: str) -> dict[str, int]:
        return {path.name: path.stat().st_mtime_ns for path in (tmp_path / name / "work" / "circles").iterdir()}

    whole, rows = train("whole"), Circles.rows

    def dies(circles: Circles, step: int) -> object:
        if step == 3:
            raise KeyboardInterrupt
        return rows(circles, step)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Circles, "rows", dies)
        train("killed")
    kept = circles("killed")
    assert sorted(kept) == ["0000.json", "0001.json"]
    assert train("killed") == whole and circles("killed") == kept
    first, second = (load_file(tmp_path / name / "out" / "model.safetensors") for name in ("whole", "killed"))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert (tmp_path / "whole" / "work" / "threads.jsonl").read_text().count('"circle_loss"') == 4


@pytest.mark.parametrize(
    ("changes", "message"), [({"circle_rounds": 5}, "--circle-rounds"), ({"circle_prompts": 0}, "--circle-prompts")]
)
def test_mistakes_are_told(changes: dict[str, int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        replace(RECIPE, **changes)
