"""A new draft for a target: with all of its tokens or few, from prompts of files or of its own; it works in every method."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from support.refusals import refusal
from support.tiny_pair import Pair

from pipedec.cli.main import train as command
from pipedec.config import Settings
from pipedec.core.errors import UserError
from pipedec.core.request import TokenizedRequest
from pipedec.core.sampling import SamplingParams
from pipedec.engine.build import resolve
from pipedec.engine.local import LocalPipeline
from pipedec.model import DraftVocabulary
from pipedec.text.prompt import Prompter
from pipedec.train.continuations import SplitPrompts, invented_prompts, invented_sets
from pipedec.train.draft import DraftRecipe, DraftShape, train_draft
from pipedec.train.measuring import MeasuredDraft
from pipedec.train.run import Run
from pipedec.train.targets import LoadedTarget
from pipedec.verify.reference import load_transformers

RECIPE = DraftRecipe(steps=60, batch=4, length=32, warmup_steps=2, new_tokens=12)
ASKED = [[1, 5 + number, 9, 30] for number in range(28)]
PROMPTS = {"asked": SplitPrompts(ASKED[:24], ASKED[:4])}  # what it has learned it must know
SMALL = DraftShape(hidden_size=64, layers=1, vocabulary=40)


@pytest.fixture(scope="module")
def trained(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft of 40 tokens."""
    folder = tmp_path_factory.mktemp("new")
    train_draft(pair.target, SMALL, PROMPTS, RECIPE, Run(folder, folder / "work", threads=1), compiled=False)
    return folder


@pytest.mark.slow
def test_a_new_draft_learns_and_its_card_says_from_what(trained: Path) -> None:
    report = json.loads((trained / "training.json").read_text())
    before = report["continuations"][0]["before"]["on_policy"]["asked"]
    assert report["on_policy"]["asked"]["top4"] > before["top4"] + 0.1
    chains = report["on_policy"]["asked"]["chains"]
    assert chains["4"][0] == report["on_policy"]["asked"]["top4"] and chains["4"] == sorted(chains["4"], reverse=True)
    assert not list(trained.glob("draft/tokenizer*"))
    assert "24 prompts of `asked`" in (trained / "README.md").read_text()


@pytest.mark.slow
@pytest.mark.in_turn(2)
def test_the_same_run_again_makes_the_same_draft(pair: Pair, trained: Path, tmp_path: Path) -> None:
    train_draft(pair.target, SMALL, PROMPTS, RECIPE, Run(tmp_path, tmp_path / "work", threads=1), compiled=False)
    first, second = (load_file(path / "draft" / "model.safetensors") for path in (trained, tmp_path))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.fast_cases
@pytest.mark.parametrize("method", ["stpp", "pipedec", "pipedec-bestfirst"])
def test_answers_are_the_targets(pair: Pair, trained: Path, method: str) -> None:
    answers_are_the_targets(pair, trained / "draft", method)


def answers_are_the_targets(pair: Pair, draft: Path, method: str) -> None:
    prompt = tuple(PROMPTS["asked"].held_out[0])
    sampling = SamplingParams(max_tokens=24)
    drafted = LocalPipeline.load(resolve(Settings.of(target=pair.target, draft=draft, stages=3, device="cpu")))
    alone = LocalPipeline.load(resolve(Settings.of(target=pair.target, draft="none", stages=1, device="cpu")))
    verdicts = list(drafted.run(TokenizedRequest(0, prompt, sampling, method=method)))
    wanted = [token for verdict in alone.run(TokenizedRequest(0, prompt, sampling, method="pp")) for token in verdict.tokens]
    assert [token for verdict in verdicts for token in verdict.tokens] == wanted
    if method == "stpp":
        assert len(verdicts) < len(wanted)  # some guesses were right


def test_a_draft_of_another_vocabulary_is_refused(pair: Pair, trained: Path) -> None:
    with pytest.raises(UserError, match="trained for a target with another vocabulary"):
        resolve(Settings.of(target=pair.foreign_draft, draft=trained / "draft", stages=1, device="cpu"))


def test_unknown_tokens_count_as_missed() -> None:
    class Flat(torch.nn.Module):
        def forward(self, input_ids: torch.Tensor) -> object:
            logits = torch.tensor([9.0, 1.0, 2.0]).expand(*input_ids.shape, 3)
            return type("Said", (), {"logits": logits})

    draft = MeasuredDraft(Flat(), DraftVocabulary.create(torch.tensor([7, 2]), 9, "abc"))
    ids = torch.tensor([[7, 2, 5]])
    assert draft.ids(ids).tolist() == [[1, 2, 0]]
    assert draft.top_ranks(draft.logits(ids), ids).tolist() == [[1, 0, 3]]


@pytest.mark.slow
def test_invented_prompts_are_kept_and_different(pair: Pair, tmp_path: Path) -> None:
    prompter, target = Prompter(pair.target, 2048), load_transformers(pair.target, torch.float32)
    found = invented_prompts(LoadedTarget(lambda _: target), prompter.tokenizer, 30, 0, tmp_path)
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert len(set(found.prompts)) == 30 and all(text == text.strip() != "" for text in found.prompts)
    assert invented_prompts(LoadedTarget(lambda _: target), prompter.tokenizer, 30, 0, tmp_path) == found
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == kept
    assert invented_prompts(LoadedTarget(lambda _: target), prompter.tokenizer, 30, 1, tmp_path / "other") != found
    with pytest.raises(UserError, match="--invented must be at least 1"):
        invented_sets(LoadedTarget(lambda _: target), prompter, 0, 8, Run(tmp_path, tmp_path))


@pytest.mark.slow
def test_the_command_trains_from_invented_prompts(pair: Pair, tmp_path: Path) -> None:
    flags = ["draft", "--target", str(pair.target), "--invented", "40", "--hidden-size", "64", "--layers", "1", "--no-compile"]
    flags += ["--vocabulary", "50", "--length", "96", "--batch", "2", "--new-tokens", "16", "--steps", "2", "--threads", "1"]
    flags += ["--out", str(tmp_path / "out"), "--work", str(tmp_path / "work"), "--device", "cpu", "--drawn", "1"]
    result = CliRunner().invoke(command, [*flags, "--weights", "Q5_0"], env={"COLUMNS": "160"}, catch_exceptions=False)
    assert "Share of positions whose next tokens are all among the top k" in result.output
    report = json.loads((tmp_path / "out" / "training.json").read_text())
    assert set(report["on_policy"]) == {"invented", "invented, drawn", "texts", "texts, drawn"}
    assert report["continuations"][0]["prompts"] == {"invented": 34, "texts": 4}
    stored = [min((tmp_path / "work" / name / "invented").iterdir()) for name in ("continuations", "continuations-1")]
    greedy, drawn = map(load_file, stored)
    assert torch.equal(greedy["prompt_lengths"], drawn["prompt_lengths"]) and greedy["ids"].tolist() != drawn["ids"].tolist()
    draft = tmp_path / "out" / "draft"
    assert DraftVocabulary.load(draft) is not None and not list(draft.glob("model*.safetensors"))
    assert (draft / "model.gguf").stat().st_size < load_transformers(draft, torch.float32).num_parameters()
    answers_are_the_targets(pair, draft, "pipedec")


@pytest.mark.slow
@pytest.mark.in_turn(2)
def test_processes_of_torchrun_share_the_work(pair: Pair, tmp_path: Path) -> None:
    """Two make the prompts, the answers and the losses of one, which needs no torchrun."""
    logs = []
    for count in (1, 2):
        folder = tmp_path / str(count)
        flags = ["--target", str(pair.target), "--invented", "150", "--hidden-size", "64", "--layers", "1", "--no-compile"]
        flags += ["--length", "96", "--batch", "4", "--new-tokens", "8", "--steps", "3", "--threads", "1", "--device", "cpu"]
        flags += ["--out", str(folder / "out"), "--work", str(folder / "work")]
        if count == 1:
            CliRunner().invoke(command, ["draft", *flags], catch_exceptions=False)
        else:
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
            subprocess.run([*torchrun, "pipedec.cli", "train", "draft", *flags], check=True, timeout=300, capture_output=True)
        logs.append([json.loads(line)["loss"] for line in (folder / "work" / "draft.jsonl").read_text().splitlines()])
    made = [sorted((tmp_path / count / "work" / "continuations" / "invented").iterdir()) for count in "12"]
    assert [path.read_bytes() for path in made[0]] == [path.read_bytes() for path in made[1]]
    assert logs[1] == pytest.approx(logs[0], rel=2e-3) and len(logs[0]) == 3
    assert (tmp_path / "2" / "out" / "draft" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--hidden-size", "100"], "--hidden-size must be a multiple of 64, not 100"),
        (["--layers", "0"], "'--layers': must be an integer (at least 1), not 0"),
        (["--vocabulary", "1"], "'--vocabulary': must be an integer (at least 2), not 1"),
        (["--draft", "here", "--layers", "2"], "--draft continues a draft, whose size is given"),
        (["--batch", "0"], "'--batch': must be an integer (at least 1), not 0"),
    ],
)
def test_mistakes_are_told(pair: Pair, flags: list[str], message: str, tmp_path: Path) -> None:
    where = ["--target", str(pair.target), "--invented", "5", "--out", str(tmp_path), "--work", str(tmp_path)]
    result = CliRunner().invoke(command, ["draft", *where, *flags])
    assert message in refusal(result)
