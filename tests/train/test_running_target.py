"""Training a draft on answers and hidden states of a running cluster: its stages say what a single process would."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from support.clusters import scheduler_of
from support.refusals import refusal
from support.tiny_pair import Pair
from torch import Tensor
from transformers import AutoModelForCausalLM

from pipedec.cli.main import train as command
from pipedec.client.run_handle import RunHandle
from pipedec.cluster.local import LocalCluster
from pipedec.core.errors import PipedecError
from pipedec.core.request import TokenizedRequest
from pipedec.core.sampling import SamplingParams
from pipedec.engine.local import LocalAnswer, LocalPipeline
from pipedec.train import targets
from pipedec.train.run import Run
from pipedec.train.targets import LoadedTarget, RunningTarget, output_embeddings

ROWS = torch.tensor([[7 + (31 * index * index + row) % 290 for index in range(150)] for row in range(5)])  # several chunks


@pytest.fixture
def one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """No two prompts share a forward, whose rounding depends on its rows."""
    monkeypatch.setattr(targets, "ROWS_IN_FLIGHT", 1)
    monkeypatch.setattr(targets, "ANSWERS_IN_FLIGHT", 1)


@pytest.fixture(scope="module")
def cluster(pair: Pair) -> Iterator[LocalCluster]:
    with LocalCluster(pair.spec(4)) as running:
        yield running


def running_target(cluster: LocalCluster, pair: Pair) -> RunningTarget:
    return RunningTarget.of(RunHandle.of(scheduler_of(cluster), cluster.run_id), pair.target)


class OneProcess:
    """The engine with one stage, in this process."""

    def __init__(self, pair: Pair) -> None:
        self._pipeline = LocalPipeline.load(pair.spec(1))

    def _run(self, ids: list[int], sampling: SamplingParams) -> LocalAnswer:
        list(self._pipeline.run(TokenizedRequest(0, tuple(ids), sampling)))
        return self._pipeline.last

    def generate(self, prompts: list[list[int]], sampling: SamplingParams) -> list[list[int]]:
        return [self._run(ids, sampling).token_ids for ids in prompts]

    def hidden_states(self, ids_BT: Tensor) -> Tensor:
        asked = SamplingParams(max_tokens=1, prompt_hidden_states=True)
        rows = [b"".join(self._run(ids, asked).hidden_states) for ids in ids_BT.tolist()]
        return torch.stack([torch.frombuffer(bytearray(row), dtype=torch.float32).view(ids_BT.shape[1], -1) for row in rows])


@pytest.mark.usefixtures("one_by_one")
def test_hidden_states_are_those_of_one_process(cluster: LocalCluster, pair: Pair) -> None:
    assert torch.equal(running_target(cluster, pair).hidden_states(ROWS), OneProcess(pair).hidden_states(ROWS))


def test_hidden_states_of_several_prompts_are_those_of_transformers(cluster: LocalCluster, pair: Pair) -> None:
    found = running_target(cluster, pair).hidden_states(ROWS)
    target = AutoModelForCausalLM.from_pretrained(pair.target)
    with torch.no_grad():
        expected = target.model(ROWS, use_cache=False).last_hidden_state
        logits = target(ROWS).logits
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(output_embeddings(pair.target, torch.device("cpu"))(found), logits, atol=1e-4, rtol=1e-4)


def test_greedy_answers_are_those_of_transformers_and_sampled_ones_differ(
    cluster: LocalCluster, pair: Pair, tmp_path: Path
) -> None:
    running, alone = running_target(cluster, pair), LoadedTarget.of(pair.target, Run(tmp_path, tmp_path, threads=1))
    prompts = [ids[: 4 + row].tolist() for row, ids in enumerate(ROWS)]
    assert running.generate(prompts, SamplingParams(max_tokens=12)) == alone.generate(prompts, SamplingParams(max_tokens=12))
    drawn = SamplingParams(max_tokens=12, temperature=1.0, seed=3)
    first, again = (running.generate([prompts[0]] * 3, drawn) for _ in range(2))
    assert first == again and len(set(map(tuple, first))) == 3


def flags(pair: Pair, cluster: LocalCluster, folder: Path) -> list[str]:
    asked = folder / "asked.jsonl"
    asked.write_text("".join(json.dumps({"prompt": f"How many clips did {name} sell?"}) + "\n" for name in range(40)))
    return [
        "draft", "--target", str(pair.target), "--draft", str(pair.draft), "--prompts", str(asked), "--no-compile",
        "--threads", "1", "--steps", "2", "--new-tokens", "6", "--batch", "2", "--length", "64", "--device", "cpu",
        "--redis", cluster.address.redis_url, "--run", cluster.run_id,
        "--out", str(folder / "out"), "--work", str(folder / "work"),
    ]  # fmt: skip


@pytest.mark.usefixtures("one_by_one")
def test_a_draft_learns_from_a_cluster_what_it_learns_from_one_process(
    cluster: LocalCluster, pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole of ``train draft``, which loads no target; then the same again from one process, with the same weights."""
    called = flags(pair, cluster, tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(LoadedTarget, "of", None)
        done = CliRunner().invoke(command, called, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    with monkeypatch.context() as patched:
        patched.setattr(RunningTarget, "of", lambda *_: OneProcess(pair))
        other = [*called[:-4], "--out", str(tmp_path / "alone"), "--work", str(tmp_path / "alone-work")]
        assert CliRunner().invoke(command, other, catch_exceptions=False).exit_code == 0
    first, second = (load_file(tmp_path / name / "draft" / "model.safetensors") for name in ("out", "alone"))
    assert all(torch.equal(first[name], second[name]) for name in first | second)
    before = load_file(pair.draft / "model.safetensors")
    assert not all(torch.equal(first[name].float(), before[name].float()) for name in first)
    reports = [json.loads((tmp_path / name / "training.json").read_text()) for name in ("out", "alone")]
    assert reports[0] == reports[1]


def test_a_bita_gets_its_answers_from_a_cluster(cluster: LocalCluster, pair: Pair, tmp_path: Path) -> None:
    _, *called = flags(pair, cluster, tmp_path)
    kept = [word for word in called if word != "--no-compile"]
    for flag in ("--draft", "--batch", "--length"):
        del kept[kept.index(flag) : kept.index(flag) + 2]
    found = CliRunner().invoke(command, ["bita", *kept, "--only-answers"], catch_exceptions=False)
    assert found.exit_code == 0 and f"{tmp_path / 'work'} has all answers" in found.output
    assert len(list((tmp_path / "work" / "answers").rglob("*.safetensors"))) == 2, "of training prompts and of held-out ones"
    assert "give both or neither" in refusal(CliRunner().invoke(command, ["bita", *kept]))


def test_what_does_not_fit_is_refused(cluster: LocalCluster, pair: Pair, tmp_path: Path) -> None:
    called = flags(pair, cluster, tmp_path)
    other = [*called, "--target", str(pair.draft)]
    assert f"run {cluster.run_id} serves {pair.target}, not --target {pair.draft}: give the target that it serves" in refusal(
        CliRunner().invoke(command, other)
    )
    assert "no cluster" in refusal(CliRunner().invoke(command, [*called, "--run", "nowhere"]))
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_training_whose_cluster_is_lost_goes_on_with_another(pair: Pair, tmp_path: Path, leaves_nothing: None) -> None:
    with LocalCluster(pair.spec(2)) as cluster:
        ask = RunningTarget.generate

        def lose(self: RunningTarget, prompts: list[list[int]], sampling: SamplingParams) -> list[list[int]]:
            found = ask(self, prompts, sampling)
            cluster.stop()
            return found

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(RunningTarget, "generate", lose)
            lost = CliRunner().invoke(command, flags(pair, cluster, tmp_path))
        assert isinstance(lost.exception, PipedecError) and "goes on" in str(lost.exception)
        kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "work").rglob("*.safetensors")}
    with LocalCluster(pair.spec(2)) as cluster:
        assert CliRunner().invoke(command, flags(pair, cluster, tmp_path), catch_exceptions=False).exit_code == 0
    assert kept and all(path.stat().st_mtime_ns == time for path, time in kept.items())
