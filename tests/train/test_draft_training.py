"""Continuing a draft at toy size: it learns its target's answers, runs resume exactly, rows and loss, mistakes are one line."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from support.refusals import refusal
from support.tiny_pair import Pair
from transformers import AutoModelForCausalLM

from pipedec.cli.main import train as command
from pipedec.core.errors import UserError
from pipedec.decoding.learned import NOTHING_LEARNED
from pipedec.engine.experience_files import shipped_acceptance
from pipedec.model import DraftVocabulary
from pipedec.train.continuations import Continuation, SplitPrompts, continued
from pipedec.train.distillation import DistillationRows, TargetMemory, mean_loss
from pipedec.train.draft import DraftRecipe, pack_whole, train_draft
from pipedec.train.run import Run
from pipedec.train.targets import LoadedTarget

RECIPE = DraftRecipe(steps=12, batch=4, length=32, long_batch=1, long_length=96, warmup_steps=2, new_tokens=12)
SHORT = SplitPrompts([[1, 5 + number, 9, 30] for number in range(24)], [[1, 5 + number, 9, 30] for number in range(24, 28)])
LONG = SplitPrompts([[1, 5 + number, 9] * 14 for number in range(12)], [[1, 60, 9] * 14])


def proceed(pair: Pair, folder: Path, prompts: dict[str, SplitPrompts], recipe: DraftRecipe = RECIPE) -> dict:
    run = Run(folder / "out", folder / "work", threads=1)
    return train_draft(pair.target, pair.draft, prompts, recipe.with_long_sets(prompts), run, compiled=False)


@pytest.mark.slow
def test_a_draft_learns_its_targets_answers(pair: Pair, tmp_path: Path) -> None:
    report = proceed(pair, tmp_path, {"short": SHORT, "long": LONG}, replace(RECIPE, steps=40))
    (continuation,) = report["continuations"]
    assert continuation["recipe"]["long_sets"] == ("long",) and continuation["seen_tokens"] == 40 * (3 * 32 + 96)
    assert report["on_policy"].keys() == {"short", "long"} and report["held_out"] == {}
    before = continuation["before"]["on_policy"]["short"]
    assert report["on_policy"]["short"]["top16"] > before["top16"] and report["on_policy"]["short"]["tokens"] == before["tokens"]
    old, new = (load_file(path / "model.safetensors") for path in (pair.draft, tmp_path / "out" / "draft"))
    assert new.keys() <= old.keys() and all(tensor.dtype == torch.bfloat16 for tensor in new.values())
    AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "draft")
    log = [json.loads(line)["loss"] for line in (tmp_path / "work" / "draft.jsonl").read_text().splitlines()]
    assert sum(log[-5:]) < sum(log[:5])


@pytest.mark.fast_cases
@pytest.mark.parametrize(("prompts", "tokens"), [({"short": SHORT}, 4 * 32), ({"long": LONG}, 4 * 96)])
def test_rows_may_all_be_of_one_length(pair: Pair, tmp_path: Path, prompts: dict[str, SplitPrompts], tokens: int) -> None:
    report = proceed(pair, tmp_path, prompts, replace(RECIPE, steps=1))
    assert report["continuations"][0]["seen_tokens"] == tokens
    assert shipped_acceptance(tmp_path / "out" / "draft") != NOTHING_LEARNED


def test_a_draft_of_another_target_brings_only_its_continuations(pair: Pair, tmp_path: Path) -> None:
    draft = shutil.copytree(pair.draft, tmp_path / "other" / "draft")
    other = {"target_fingerprint": "other", "recipe": {}, "held_out": {"text": {}}, "continuations": [{"seen_tokens": 7}]}
    (draft.parent / "training.json").write_text(json.dumps(other))
    report = proceed(replace(pair, draft=draft), tmp_path, {"short": SHORT}, replace(RECIPE, steps=1))
    assert [one["seen_tokens"] for one in report["continuations"]] == [7, 4 * 32]
    assert "recipe" not in report and report["target"] == pair.target.name and report["held_out"] == {}


def test_too_few_prompts_are_told(pair: Pair, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the answers fill no row"):
        proceed(pair, tmp_path, {"few": SplitPrompts([[1, 5]], [])})


def test_rows_begin_with_a_prompt() -> None:
    answered = [Continuation([number] * length, 1) for number, length in enumerate((3, 4, 5, 2, 4, 4), start=1)]
    rows = pack_whole(answered, length=6, seed=0).ids.tolist()
    assert len(rows) == 4 and all(len(row) == 6 for row in rows)
    whole = {row[0]: row.count(row[0]) for row in rows}
    assert all(len(answered[number - 1].ids) == length for number, length in whole.items())
    cut = [row.count(row[-1]) < len(answered[row[-1] - 1].ids) for row in rows]
    assert any(cut)
    assert all(following[0] == row[-1] for row, following, was_cut in zip(rows, rows[1:], cut, strict=False) if was_cut)
    assert len(pack_whole([], length=6, seed=0).ids) == 0


def test_rows_tell_where_the_target_speaks_next() -> None:
    rows = pack_whole([Continuation([1, 2, 3, 4, 5], 3)] * 3, length=7, seed=0)
    assert rows.ids.tolist() == [[1, 2, 3, 4, 5, 1, 2]] * 2
    assert rows.before_own.tolist() == [[False, False, True, True, False, False, False]] * 2


def test_long_prompts_are_generated_in_smaller_batches(tmp_path: Path, pair: Pair) -> None:
    target = AutoModelForCausalLM.from_pretrained(pair.target).eval()
    asked = [[2] * length for length in (1, 2, 3, 4, 7, 8, 20)]
    continued(LoadedTarget(lambda _: target), asked, 1, tmp_path, batch_prompts=3, batch_tokens=16)
    sizes = [len(load_file(path)["lengths"]) for path in sorted(tmp_path.iterdir())]
    assert sizes == [3, 2, 1, 1]


def test_the_loss_is_least_at_the_wanted_distribution() -> None:
    torch.manual_seed(0)
    ids, wanted = torch.randint(0, 7, (2, 3)), torch.randn(2, 3, 7).softmax(-1)
    probabilities, tokens = wanted.topk(7)
    lesson = DistillationRows(ids, torch.full((2, 3), 2.0), TargetMemory(tokens.int(), probabilities))
    greedy = torch.nn.functional.one_hot(wanted.argmax(-1), 7)

    def loss(share: float) -> float:
        said = Said((1 - share) * wanted + share * greedy)
        return mean_loss(lambda input_ids: said, torch.arange(2), lesson, lesson, 0, 0.2).item()

    entropy = torch.distributions.Categorical(0.8 * wanted + 0.2 * greedy).entropy().mean().item()
    assert loss(0.2) == pytest.approx(entropy, abs=1e-5)
    assert min(loss(0.0), loss(0.4)) > loss(0.2)


def test_tokens_that_a_draft_does_not_know_are_one_of_its_tokens() -> None:
    memory = TargetMemory(torch.tensor([[[3, 0, 1]]], dtype=torch.int32), torch.tensor([[[0.5, 0.3, 0.1]]]))
    lesson = DistillationRows(torch.tensor([[2]]), torch.ones(1, 1), memory, DraftVocabulary.create(torch.tensor([3]), 4, "abc"))
    said = torch.tensor([[[0.25, 0.75]]])  # of all others, and of token 3
    wanted = torch.tensor([4 / 9, 5 / 9])  # of the tokens that are kept
    found = mean_loss(lambda input_ids: Said(said), torch.arange(1), lesson, lesson, 0, 0.0)
    assert found.item() == pytest.approx(-(wanted * said[0, 0].log()).sum().item(), abs=1e-6)


def test_a_step_weighs_short_and_long_rows_by_their_tokens() -> None:
    short = DistillationRows(torch.zeros(4, 2, dtype=torch.int64), torch.ones(4, 2), undecided(4, 2))
    long_weights = torch.tensor([[0.0] * 5, [1, 1, 1, 3, 0]])
    long = DistillationRows(torch.ones(2, 5, dtype=torch.int64), long_weights, undecided(2, 5))

    def model(input_ids: torch.Tensor) -> Said:
        if input_ids.shape == (3, 2):
            return Said(torch.full((3, 2, 3), 1 / 3))
        assert input_ids.shape == (1, 5) and bool((input_ids == 1).all())
        return Said(torch.tensor([0.25, 0.25, 0.5]).expand(1, 5, 3))

    on_short, on_long = torch.tensor(3.0).log(), -torch.tensor([0.25, 0.25, 0.5]).log().mean()
    found = mean_loss(model, torch.tensor([3, 0, 2, 1]), short, long, num_long=1, greedy_share=0.0)
    assert found.item() == pytest.approx(((6 * on_short + 6 * on_long) / 12).item(), abs=1e-5)


def undecided(rows: int, tokens: int) -> TargetMemory:
    """A target that finds all of three tokens equally likely."""
    return TargetMemory(torch.arange(3, dtype=torch.int32).expand(rows, tokens, 3), torch.full((rows, tokens, 3), 1 / 3))


class Said:
    """What a model returns when it gives these probabilities."""

    def __init__(self, probabilities: torch.Tensor) -> None:
        self.logits = probabilities.log()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "no prompts to learn from: give --prompts FILE"),
        (["--problems", "x.jsonl"], "in a checkout of pipedec, use python -m recipes.reference_models draft"),
        (["--prompts", "nowhere.jsonl"], "cannot read nowhere.jsonl"),
        (["--prompts", "x.jsonl", "--steps", "0"], "'--steps': must be an integer (at least 1), not 0"),
        (["--prompts", "x.jsonl", "--target", "nowhere", "--draft", "nowhere"], "nowhere"),
        (["--prompts", "x.jsonl", "--draft", "none"], "to continue"),
    ],
)
def test_mistakes_are_told(flags: list[str], message: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(command, ["draft", "--out", str(tmp_path), "--work", str(tmp_path), *flags])
    assert message in refusal(result)
    assert "\n" not in str(result.exception)


def test_a_draft_with_another_tokenizer_is_refused(pair: Pair, tmp_path: Path) -> None:
    flags = ["--prompts", "x.jsonl", "--target", str(pair.target), "--draft", str(pair.foreign_draft)]
    test_mistakes_are_told(flags, "different tokenizer", tmp_path)


@pytest.mark.parametrize(("name", "recipe"), [("reference", "reference_models pair"), ("annotate", "thread_models annotate")])
def test_a_moved_command_is_refused(name: str, recipe: str) -> None:
    result = CliRunner().invoke(command, [name, "--problems", "train.jsonl", "--out", "a", "--work", "b", "--help"])
    assert isinstance(result.exception, UserError)
    assert str(result.exception) == f"pipedec train {name} is now python -m recipes.{recipe}, in a checkout of pipedec"


def test_the_command_prints_what_it_measured(pair: Pair, tmp_path: Path) -> None:
    asked = tmp_path / "asked.jsonl"
    asked.write_text("".join(json.dumps({"prompt": f"How many clips did {name} sell?"}) + "\n" for name in range(60)))
    flags = ["draft", "--target", str(pair.target), "--draft", str(pair.draft), "--prompts", str(asked), "--no-compile"]
    flags += ["--out", str(tmp_path / "out"), "--work", str(tmp_path / "work"), "--threads", "1", "--steps", "1"]
    flags += ["--max-prompts", "40", "--new-tokens", "6", "--batch", "2", "--length", "64"]
    result = CliRunner().invoke(command, flags, env={"COLUMNS": "160"}, catch_exceptions=False)
    report = json.loads((tmp_path / "out" / "training.json").read_text())
    assert f"{report['on_policy']['asked']['top4']:.1%}" in result.output and "Held-out text" not in result.output
