"""Sweeps of clusters that run, or are launched from a file: rows, prompts that only the cluster can judge, ties, resuming."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from msgspec import structs
from support.clusters import clustered, with_settings
from support.hosts import Hosts
from support.silent_progress import Silent
from support.tiny_pair import Pair

from benchmarks.reports.tables import tables
from pipedec.bench.report.figures import FIGURES, draw_figures
from pipedec.bench.report.frames import read_answers, studies
from pipedec.bench.sweep.benchmark import sweep
from pipedec.bench.sweep.config import SweepConfig
from pipedec.bench.sweep.pipelines import RunningShape, described_pair
from pipedec.bench.sweep.rows import read_rows
from pipedec.cli.main import program
from pipedec.client.client import Client
from pipedec.client.reply import Reply
from pipedec.client.run_handle import RunHandle
from pipedec.cluster.local import LocalCluster
from pipedec.config import NONE, ClusterConfig, DeviceConfig, ServerConfig
from pipedec.core.errors import UserError
from pipedec.core.sampling import SamplingParams
from pipedec.data import PromptSet
from pipedec.messages.request import PromptRequest
from pipedec.verify.divergence import TIE_BOUNDS

pytestmark = pytest.mark.slow

in_windows = pytest.mark.parametrize("resident", ["windows"], indirect=True)

LONG = "word " * 3000
PROMPTS = [PromptSet("first", ("The pipeline", LONG, "Natalia sold", "Größe"))]
METHODS = ("pp", "stpp", "pipedec", "bita")


def cluster_file(pair: Pair, **changes: Any) -> ClusterConfig:
    partitions = {f"p{stages}": {"stages": stages, "draft_device": DeviceConfig("here", "cpu")} for stages in (1, 2)}
    keys = {"target": pair.target, "draft": pair.draft, "max_model_len": 2048, **changes}
    return clustered([ServerConfig("here", {"cpu": 4})], partitions, **keys)


def config(pair: Pair, **changes: Any) -> SweepConfig:
    sampling = SamplingParams(max_tokens=6, ignore_eos=True)
    made = SweepConfig(cluster_file(pair), stages=(1,), methods=("pp",), samples=2, seed=1, sampling=sampling)
    return replace(made, **changes)


def running(cluster: LocalCluster) -> RunHandle:
    assert cluster.scheduler is not None
    return RunHandle.of(cluster.scheduler, cluster.run_id)


def lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "rows.jsonl").read_text().splitlines()]


@pytest.fixture
def measured(pair: Pair, resident: LocalCluster) -> SweepConfig:
    return config(pair, running=running(resident), methods=METHODS)


@in_windows
def test_a_running_cluster_is_measured_and_a_prompt_that_it_refuses_is_replaced(
    measured: SweepConfig, resident: LocalCluster, pair: Pair, tmp_path: Path
) -> None:
    assert PROMPTS[0].shuffled(1)[0] == 1, "the long one comes first"
    progress = Silent()
    rows = sweep(measured, PROMPTS, tmp_path, progress)
    assert rows == lines(tmp_path) and len(rows) == progress.rows == progress.total == 8
    assert [row["method"] for row in rows] == 2 * list(METHODS) and {row["prompt_index"] for row in rows} < {0, 2, 3}
    assert len(rows[0]["cluster"]["hosts"]) == 3 and rows[0]["cluster"]["draft_device"] == "cpu"
    for row in rows:
        assert not row["emulated"] and row["preset"] is None and row["clock"] == "measured" and row["divergence"] is None
        assert (row["cluster"]["stages"], row["cluster"]["groups"], row["cluster"]["dtype"]) == (2, 2, "float32")
        assert row["pair"]["target"] == str(pair.target) and row["pair"]["run"] == resident.run_id
    assert rows[3]["bita"] == {**rows[3]["bita"], "name": "bita", "masks": 3, "prompting": "deep"}
    assert [row["breakdown"] is not None for row in rows] == [True] * 4 + [False] * 4
    assert len(read_rows([tmp_path])) == 8
    with pytest.raises(UserError, match=r"no prompt of long fits: the prompt has \d+ tokens"):
        sweep(measured, [PromptSet("long", (LONG,))], tmp_path / "long", Silent())
    assert "Measured on a cluster of 2 cpu, nothing emulated" in tables(studies(read_answers([tmp_path])))


def nearly_tied() -> Callable[..., Reply]:
    """``Client.follow`` of a cluster whose ``stpp`` takes another third token, with a logit that is little below the best."""
    original = Client.follow

    def follow(client: Client, request: PromptRequest, *callbacks: Any) -> Reply:
        reply = original(client, request, *callbacks)
        completion = reply.completed()
        other = (completion.token_ids[2] + 1) % 290
        if completion.logprobs is not None:
            completion.logprobs[2] = {completion.token_ids[2]: -1.0, other: -1.0005}
        if request.method == "stpp":
            completion.token_ids[2] = other
        return reply

    return follow


@in_windows
def test_a_near_tie_is_recorded_and_the_sweep_goes_on(
    measured: SweepConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TIE_BOUNDS, "float32", 1e-3)
    monkeypatch.setattr(Client, "follow", nearly_tied())
    rows = sweep(measured, PROMPTS, tmp_path, Silent())
    assert [row["divergence"] is not None for row in rows] == [row["method"] == "stpp" for row in rows]
    found = rows[1]["divergence"]
    assert found["position"] == 2 and found["near_tie"] and found["margin"] == pytest.approx(0.0005)
    assert sweep(measured, PROMPTS, tmp_path, Silent()) == rows == lines(tmp_path)


@in_windows
def test_a_cluster_is_known_by_its_weights_where_its_ranks_have_compared_them(resident: LocalCluster) -> None:
    here = running(resident)
    description = structs.replace(here.description, digests={"target": "aa", "draft": "bb", "bita": "cc"})
    assert described_pair(description, "x") == {"target": description.target, "draft": description.draft, "digest": "aabb"}
    assert described_pair(here.description, "x")["digest"] is None and described_pair(here.description, "x")["run"] == "x"
    compared = replace(here, description=description)
    shape, without = RunningShape(compared), RunningShape(here)
    assert shape.bita is not None and shape.bita["digest"] == "cc"
    assert without.bita is not None and without.bita["digest"] != "cc"
    assert shape.scope != RunningShape(with_settings(compared, dtype="bfloat16")).scope


@pytest.mark.usefixtures("leaves_nothing")
def test_every_partition_is_launched_and_measured(pair: Pair, tmp_path: Path) -> None:
    def launch(config: ClusterConfig, partition: str) -> LocalCluster:
        """Starts it here instead of on hosts."""
        return LocalCluster(pair.spec(config.partitions[partition].settings.cut.stages))

    chosen = config(pair, stages=(), launched=("p1", "p2"), methods=("pp,pipedec",))
    progress = Silent()
    rows = sweep(chosen, PROMPTS, tmp_path / "out", progress, launch=launch)
    assert len(rows) == progress.total == progress.rows
    assert [(row["preset"], row["cluster"]["stages"], row["method"]) for row in rows] == [
        (name, stages, method) for name, stages in (("p1", 1), ("p2", 2)) for _ in range(2) for method in ("pp", "pipedec")
    ]
    for row in rows:
        assert not row["emulated"] and row["cluster"]["devices"] == ["cpu"] * row["cluster"]["stages"]
        assert row["divergence"] is None and row["computed_ms_per_token"] is None
    found = studies(read_answers([tmp_path / "out"]))
    assert list(found) == ["machine"]
    text = tables(found)
    assert "Measured on a cluster of 1 cpu and a cluster of 2 cpu, nothing emulated" in text and "## p2, measured" in text
    assert "mulated" not in text.replace("nothing emulated", "")
    names = {path.name for path in draw_figures(found, tmp_path, {"speedup": FIGURES["speedup"]}).files}
    assert names == {"speedup.png", "speedup.svg"}, "over two numbers of stages"


@pytest.mark.usefixtures("leaves_nothing")
def test_partitions_are_launched_over_hosts(pair: Pair, hosts3: Hosts, tmp_path: Path) -> None:
    devices = {"host-1": {"cpu": 2}, "host-2": {"cpu": 1}, "host-3": {"cpu": 1}}
    partitions = {f"p{stages}": {"stages": stages, "draft_device": {"host": "host-1", "device": "cpu"}} for stages in (1, 3)}
    servers = [{"host": host, "devices": found} for host, found in devices.items()]
    models = {"target": str(pair.target), "draft": str(pair.draft), "max_model_len": 512}
    (tmp_path / "cluster.yaml").write_text(json.dumps({**models, "servers": servers, "partitions": partitions}))
    flags = ["--launch", tmp_path / "cluster.yaml", "--partitions", "p1,p3", "--methods", "pp,pipedec", "--out", tmp_path / "out"]
    command = [sys.executable, "-m", "pipedec.cli", "bench", "sweep", *flags, "--prompt", "Who?", "--max-tokens", "4"]
    done = hosts3.run(0, *command, timeout=150)
    assert done.returncode == 0, done.stderr
    assert [(row["preset"], row["method"]) for row in lines(tmp_path / "out")] == [
        (name, method) for name in ("p1", "p3") for method in ("pp", "pipedec")
    ]


@in_windows
def test_what_a_cluster_cannot_do_is_refused(pair: Pair, resident: LocalCluster, tmp_path: Path) -> None:
    here = running(resident)
    with pytest.raises(UserError, match="emulates paper-14: measure a cluster that does not"):
        config(pair, running=replace(here, description=structs.replace(here.description, emulation="paper-14")))
    with pytest.raises(UserError, match="p3"):
        config(pair, stages=(), launched=("p3",))
    without = with_settings(here, draft=NONE, bita=NONE)
    for place, methods, message in (
        ({"running": without}, ("stpp",), "method stpp needs a draft model"),
        ({"running": without}, ("bita",), "give --bita DIR"),
        ({"launched": ("p1",)}, ("bita",), "give --bita DIR"),
    ):
        with pytest.raises(UserError, match=message):
            sweep(config(pair, stages=(), methods=methods, **place), PROMPTS, tmp_path, Silent())


@in_windows
def test_command_measures_a_running_cluster_and_refuses_flags_of_others(resident: LocalCluster, tmp_path: Path) -> None:
    place = ["--redis", resident.address.redis_url, "--run", resident.run_id]
    command = ["bench", "sweep", *place, "--prompt", "Who?", "--max-tokens", "4", "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(program, command)
    assert done.exit_code == 0, (done.output, done.exception)
    assert [row["method"] for row in lines(tmp_path / "out")] == ["pp", "stpp", "pipedec", "pipedec-bestfirst"]
    for flags, message in (
        (["--preset", "paper-14", "--target", "x"], "--preset, --target: a running cluster is measured as it is"),
        (["--clock", "computed"], "--clock: a running cluster"),
        (["--launch", "cluster.yaml"], "--redis, --run: the clusters are those of --launch"),
        (["--partitions", "p1"], "--partitions goes with --launch FILE"),
    ):
        refused = CliRunner().invoke(program, [*command, *flags])
        assert isinstance(refused.exception, UserError) and message in str(refused.exception)
