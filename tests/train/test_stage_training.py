"""Training BiTA over stages: each has its own layers; four processes learn and write what one does, also after one was killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from architectures.zoo import save_model
from safetensors.torch import load_file
from support.checkpoints import save_tiny
from support.processes import wait_until
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from pipedec.core.errors import UserError
from pipedec.data import PromptSource
from pipedec.families import model_config
from pipedec.plan.training import training_cut
from pipedec.scheduler.redis_process import free_port
from pipedec.text.prompt import Prompter
from pipedec.train.bita import BitaRecipe, train_bita
from pipedec.train.continuations import Continuation, SplitPrompts, file_prompts
from pipedec.train.mask_rows import Learned, TargetLayers, mask_rows
from pipedec.train.replicas import Replicas
from pipedec.train.run import Run
from pipedec.verify.reference import load_transformers

STAGES = 4
RECIPE = BitaRecipe(
    masks=2, prompt_tokens=3, groups=4, steps=26, batch=6, warmup_steps=20, new_tokens=8, markov_rank=4, markov_steps=4
)
SAMPLES = [Continuation([5, 9, 3, 17, 8, 11, 30, 4], 3), Continuation([7, 21, 6, 40, 13], 2)]


@dataclass(frozen=True)
class Target:
    """A target with its prompts, and answers that a single process has given in ``single``."""

    folder: Path

    @property
    def model(self) -> Path:
        return self.folder / "target"

    def prompts(self) -> dict[str, SplitPrompts]:
        return file_prompts(Prompter(self.model, 512), (PromptSource("asked", self.folder / "asked.jsonl"),), RECIPE.new_tokens)

    def run(self, name: str, **options: Any) -> Run:
        return Run(self.folder / name, self.folder / name / "work", threads=1, **options)

    def start(self, name: str) -> subprocess.Popen[str]:
        """The stages, as torchrun starts them, with the answers of the single process."""
        work = self.run(name).work
        work.mkdir(parents=True, exist_ok=True)
        if not (work / "answers").exists():
            (work / "answers").symlink_to(self.run("single").work / "answers")
        flags = ["--target", self.model, "--prompts", f"asked={self.folder / 'asked.jsonl'}", "--out", self.folder / name]
        flags += ["--work", work, "--threads", 1, "--device", "cpu", "--masks", 2, "--prompt-tokens", 3, "--groups", 4]
        flags += ["--steps", 26, "--batch", 6, "--new-tokens", 8, "--markov-rank", 4, "--markov-steps", 4]
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", STAGES, "-m"]
        command = map(str, [*torchrun, "pipedec.cli", "train", "bita", *flags])
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def log(self, name: str, of: str = "bita") -> list[dict[str, Any]]:
        path = self.run(name).work / f"{of}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def written(self, name: str) -> dict[str, Tensor]:
        return load_file(self.folder / name / "model.safetensors")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerBase) -> Target:
    made = Target(tmp_path_factory.mktemp("stages"))
    save_tiny("llama", made.model, layers=8, hidden=64, vocab=len(tokenizer))
    tokenizer.save_pretrained(made.model)
    asked = [json.dumps({"prompt": f"How many clips did {name} sell?"}) for name in range(24)]
    (made.folder / "asked.jsonl").write_text("\n".join(asked))
    train_bita(made.model, made.prompts(), RECIPE, made.run("single"))
    return made


@pytest.fixture(scope="module")
def staged(target: Target) -> Target:
    """The same, after an uninterrupted training by stages."""
    process = target.start("staged")
    output, _ = process.communicate(timeout=150)
    assert process.returncode == 0, output
    return target


def test_stages_learn_and_write_what_a_single_process_does(staged: Target, leaves_nothing: None) -> None:
    for log in ("bita", "markov"):
        single, found = ([row["loss"] for row in staged.log(name, log)] for name in ("single", "staged"))
        assert found == pytest.approx(single, abs=1e-4) and len(found) in (RECIPE.steps, RECIPE.markov_steps)
    single, found = staged.written("single"), staged.written("staged")
    assert single.keys() == found.keys()
    for name, tensor in single.items():
        torch.testing.assert_close(found[name].float(), tensor.float(), atol=0.02, rtol=0.02)  # in bfloat16
    reports = [json.loads((staged.folder / name / "training.json").read_text()) for name in ("single", "staged")]
    held_out = [report.pop("held_out")["asked"] for report in reports]
    assert reports[0] == reports[1] and held_out[0]["groups"] == held_out[1]["groups"] > 0
    assert held_out[1]["loss"] == pytest.approx(held_out[0]["loss"], abs=2e-3)
    assert sorted(path.name for path in (staged.folder / "staged").iterdir()) == sorted(
        path.name for path in (staged.folder / "single").iterdir()
    )


@pytest.mark.slow
def test_a_training_whose_stage_was_killed_goes_on_to_the_same_weights(staged: Target, leaves_nothing: None) -> None:
    process = staged.start("killed")
    assert wait_until(lambda: len(staged.log("killed")) > 21, seconds=90)
    ranks = {child.environ()["RANK"]: child for child in psutil.Process(process.pid).children()}
    os.kill(ranks["2"].pid, signal.SIGKILL)
    output, _ = process.communicate(timeout=60)
    assert process.returncode != 0 and len(staged.log("killed")) < RECIPE.steps
    lines = [line for line in output.splitlines() if line.startswith("pipedec: ")]
    assert len(lines) == STAGES - 1 and all("another process of this training has ended" in line for line in lines), output
    again = staged.start("killed")
    output, _ = again.communicate(timeout=150)
    assert again.returncode == 0, output
    assert staged.log("killed") == staged.log("staged") and staged.log("killed", "markov") == staged.log("staged", "markov")
    for name, tensor in staged.written("staged").items():
        assert torch.equal(tensor, staged.written("killed")[name]), name


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_stage_has_a_third_of_the_bytes(target: Target, tmp_path: Path, is_tied: bool) -> None:
    """Parameters, buffers, what is learned and the state of its optimizer."""
    save_tiny("llama", tmp_path, layers=16, hidden=64, tie_word_embeddings=is_tied)
    spans = training_cut(model_config(tmp_path), STAGES)
    whole, *stages = (held_bytes(tmp_path, span) for span in (None, *spans))
    assert max(stages) <= 0.35 * whole
    assert [span.layers for span in spans][-1].stop == 16 and spans[0].first and spans[-1].last


def held_bytes(model: Path, span: Any) -> int:
    made = load_transformers(model, torch.float32, span=span)
    learned = Learned(TargetLayers(made, span), 2, 3, "deep", 0.5, seed=0)
    held = {tensor.data_ptr(): tensor.nbytes for tensor in (*made.parameters(), *made.buffers())}
    return sum(held.values()) + 3 * sum(parameter.nbytes for parameter in learned.parameters())


@pytest.mark.fast_cases
@pytest.mark.parametrize("model_type", ["llama", "gemma2", "mixtral", "qwen3"])
def test_stages_compute_what_the_whole_target_does(model_type: str, tmp_path: Path) -> None:
    save_model(model_type, tmp_path)
    config = model_config(tmp_path)
    whole = TargetLayers(load_transformers(tmp_path, torch.float32))
    learned = Learned(whole, 3, 2, "deep", 0.5, seed=0)
    rows = mask_rows(SAMPLES, [torch.tensor([2, 3]), torch.tensor([1])], 3, 2)
    _, past = whole.token_pass(whole.embedded(rows.tokens))
    expected = whole.logits(whole.mask_pass(learned.masks[rows.masks], learned.prompt, rows, past), rows)
    tokens, masks = whole.embedded(rows.tokens), learned.masks[rows.masks]
    for span in training_cut(config, 2):
        stage = TargetLayers(load_transformers(tmp_path, torch.float32, span=span), span)
        tokens, past = stage.token_pass(tokens)
        masks = stage.mask_pass(masks, learned.prompt, rows, past)
    torch.testing.assert_close(stage.logits(masks, rows), expected)


def test_mistakes_are_told(target: Target, tmp_path: Path) -> None:
    alone = target.run("nowhere", replicas=Replicas(1, STAGES))
    with pytest.raises(UserError, match=r"^[^\n]* lacks answers, [^\n]*: gather them first, by `pipedec train bita --redis"):
        train_bita(target.model, target.prompts(), RECIPE, alone)
    with pytest.raises(UserError, match="--prompting shallow needs all layers in one process: use deep or none"):
        train_bita(target.model, target.prompts(), replace(RECIPE, prompting="shallow"), alone)
    many = Run(tmp_path, target.run("single").work, threads=1, replicas=Replicas(1, 9))
    with pytest.raises(UserError, match="9 stages, but the target has 8 layers"):
        train_bita(target.model, target.prompts(), RECIPE, many)


def test_a_process_waits_no_longer_than_it_may(leaves_nothing: None) -> None:
    """The other one is there, but stands still."""
    program = """
import sys, time, torch
from datetime import timedelta
from pipedec.core.errors import RankLost
from pipedec.train.replicas import replicas
with replicas(torch.device("cpu"), timedelta(seconds=2)) as together:
    try:
        if together.is_first:
            together.total(torch.ones(2))
        else:
            sys.stdin.read()
    except RankLost as error:
        print(error)
"""
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    waiting, still = (
        subprocess.Popen(
            [sys.executable, "-c", program], env={**os.environ, **where, "RANK": rank}, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True,
        )
        for rank in "01"
    )  # fmt: skip
    assert waiting.stdout is not None
    assert waiting.stdout.readline().startswith("another process of this training has ended or stands still (")
    for process in (waiting, still):
        process.communicate("", timeout=30)
