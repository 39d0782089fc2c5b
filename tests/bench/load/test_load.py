"""The load benchmark at toy size: in real processes that emulate devices, and on a cluster that runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from support.refusals import refusal
from support.tiny_pair import SENTENCES, Pair

from pipedec.cli.main import program
from pipedec.cluster.local import LocalCluster

pytestmark = pytest.mark.slow


def bench(pair: Pair | None, out: Path, *flags: str, prompts: Sequence[str] = SENTENCES[:3]) -> Result:
    models = [] if pair is None else ["--target", str(pair.target), "--draft", str(pair.draft)]
    asked = [flag for prompt in prompts for flag in ("--prompt", prompt)]
    return CliRunner().invoke(program, ["bench", "load", *models, *asked, "--raw-prompt", "--out", str(out), *flags])


def rows_of(done: Result, out: Path) -> list[dict[str, Any]]:
    assert done.exit_code == 0, (done.output, done.exception)
    return [json.loads(line) for line in (out / "rows.jsonl").read_text().splitlines()]


def test_real_processes_take_the_emulated_time(pair: Pair, tmp_path: Path, leaves_nothing: None) -> None:
    where = ("--preset", "paper-14", "--stages", "2", "--slow-motion", "0.2", "--max-tokens", "6")
    done = bench(pair, tmp_path, *where, "--method", "pp", "--concurrency", "1,3", "--requests", "3")
    alone, together = rows_of(done, tmp_path)
    assert alone["clock"] == "measured" and alone["refused"] == together["refused"] == 0
    assert alone["tpot_ms"]["mean"] > 2 * 20, "two stages of 40 layers"
    assert together["makespan_s"] < alone["makespan_s"]


@pytest.mark.parametrize("resident", ["windows"], indirect=True)
def test_a_running_cluster_is_measured_as_it_is(resident: LocalCluster, tmp_path: Path) -> None:
    place = ["--redis", resident.address.redis_url, "--run", resident.run_id]
    flags = ["--method", "pp,pipedec", "--concurrency", "2", "--requests", "4", "--max-tokens", "5"]
    rows = rows_of(bench(None, tmp_path, *place, *flags), tmp_path)
    assert [(row["method"], row["requests"], row["refused"], row["clock"]) for row in rows] == [
        ("pp", 4, 0, "measured"), ("pipedec", 4, 0, "measured"),
    ]  # fmt: skip
    assert rows[0]["cluster"]["run"] == resident.run_id and rows[0]["timesteps"] is None
    refused = bench(None, tmp_path, *place, *flags, "--preset", "paper-14")
    assert "--preset: a running cluster is measured as it is" in str(refused.exception)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "no load: give --concurrency N or --rate R"),
        (["--concurrency", "0"], "--concurrency must be at least 1, not 0"),
        (["--concurrency", "2", "--goodput", "itl:3"], "--goodput itl:3: write ttft:MS or tpot:MS"),
        (["--concurrency", "2", "--method", "bita"], "--method bita: unknown method 'bita'; choose one of"),
        (["--concurrency", "2"], "where? give --preset NAME"),
        (["--concurrency", "2", "--preset", "paper-14", "--replay"], "--replay has moved to python -m benchmarks.load"),
        (["--concurrency", "2", "--preset", "paper-14", "--kv-tokens", "9"], "--kv-tokens must be at least 16, one block, not 9"),
    ],
)
def test_what_cannot_work_is_refused(tmp_path: Path, flags: list[str], message: str) -> None:
    assert message in refusal(bench(None, tmp_path, *flags))
