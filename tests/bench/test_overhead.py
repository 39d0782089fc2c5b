"""The overhead benchmark at toy size, what it counts, and what is left when a rank dies."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from support.clusters import with_settings

from pipedec.bench.overhead.benchmark import OverheadConfig, RunningOverheadConfig, measure_overhead, measure_running, run_ranks
from pipedec.bench.record import append_rows, check_writable, header, revision
from pipedec.cli.main import program
from pipedec.client.running import Running
from pipedec.cluster.local import LocalCluster
from pipedec.config import NONE
from pipedec.core.errors import PipedecError, RankLost, UserError


@pytest.mark.slow
@pytest.mark.usefixtures("leaves_nothing")
def test_toy_run_counts_what_a_timestep_must_cost() -> None:
    rows = measure_overhead(OverheadConfig(stages=(1, 2), rows=(1, 3), timesteps=5, hidden_size=8, repeats=2))
    dispatches = [(stages, dispatch) for stages in (1, 2) for dispatch in ("windows", "tasks")]
    assert [(row["stages"], row["dispatch"], row["rows"]) for row in rows] == [
        (*one, rows) for one in dispatches for rows in (1, 3)
    ]
    for row in rows:
        stages = row["stages"]
        assert row["config"]["timesteps"] == 5 and row["machine"]["cores"] >= 1
        assert row["timesteps"] == 10 and len(row["repeat_means_ms"]["raw"]) == 2
        assert row["message_bytes"] == row["rows"] * (24 + 8 * 4)
        assert 0 < row["pipedec_ms"]["median"] <= row["pipedec_ms"]["p90"]
        assert 0 < row["raw_ms"]["median"] <= row["raw_ms"]["p90"]
        assert len(row["round_trips_per_rank"]) == stages + 1
        renewals = max(row["repeat_means_ms"]["pipedec"]) / 1000  # of leases, per rank and timestep: one per second
        if row["dispatch"] == "windows":
            assert row["round_trips"] < (2 + renewals) * (stages + 1)
            continue
        # Two reports, of what was computed and of what was replayed, each together with the wait that follows. Rank 0 publishes
        # events besides, and after the last verdict there is nothing to compute.
        of_rank_zero, *of_stages = row["round_trips_per_rank"]
        assert all(1.5 < trips < 3 + renewals for trips in of_stages) and of_rank_zero > 1.5


def test_impossible_sizes_are_refused() -> None:
    for flags in ({"stages": (0,)}, {"rows": ()}, {"hidden_size": -1}):
        with pytest.raises(UserError, match=r"at least (1|one)"):
            OverheadConfig(**flags)  # type: ignore[arg-type]


def _sleep_or_die(rank: int, report: Callable[[Any], None]) -> None:
    report(os.getpid())
    if rank == 1:
        os._exit(3)
    time.sleep(60)


def _refuse(rank: int, report: Callable[[Any], None]) -> None:
    raise UserError(f"rank {rank} will not")


def _crash(rank: int, report: Callable[[Any], None]) -> None:
    raise ZeroDivisionError("by design")


@pytest.mark.usefixtures("leaves_nothing")
def test_a_dead_rank_is_named_and_nothing_is_left_over() -> None:
    with pytest.raises(RankLost, match="rank 1 failed with exit status 3"):
        run_ranks(_sleep_or_die, [0, 1], 30)


@pytest.mark.usefixtures("leaves_nothing")
def test_silence_has_an_end() -> None:
    with pytest.raises(RankLost, match="ranks 0 have reported nothing for 1 s"):
        run_ranks(_sleep_or_die, [0], 1.0)


def test_a_rank_that_fails_says_why() -> None:
    for body, words in ((_refuse, "rank 0 will not"), (_crash, "internal error: ZeroDivisionError")):
        with pytest.raises(PipedecError, match=words):
            run_ranks(body, [0], 30)


def test_rows_are_appended_with_their_header_where_they_can_be_written(tmp_path: Path) -> None:
    out = tmp_path / "figures.jsonl"
    check_writable(out)
    for number in (1, 2):
        append_rows(out, [header("x", {"a": number})])
    assert [line.count('"benchmark": "x"') for line in out.read_text().splitlines()] == [1, 1]
    known = revision()
    assert known == "unknown" or len(known.removesuffix("-dirty")) == 40
    for place, words in ((tmp_path / "missing" / "x.jsonl", "no directory"), (tmp_path, "cannot be written")):
        with pytest.raises(UserError, match=words):
            check_writable(place)


def test_command_prints_a_table_and_writes_rows(tmp_path: Path) -> None:
    out = tmp_path / "figures.jsonl"
    flags = ["--stages", "2", "--rows", "1", "--timesteps", "5", "--repeats", "1", "--hidden", "8", "--out", str(out)]
    done = CliRunner().invoke(program, ["bench", "overhead", *flags])
    assert done.exit_code == 0, done.output
    assert "gloo" in done.stdout and "…" not in done.stdout
    assert [json.loads(line)["dispatch"] for line in out.read_text().splitlines()] == ["windows", "tasks"]


@pytest.mark.slow
@pytest.mark.parametrize("resident", ["windows"], indirect=True)
def test_a_running_cluster_is_measured_by_traced_answers(resident: LocalCluster, tmp_path: Path) -> None:
    place, out = ["--redis", resident.address.redis_url, "--run", resident.run_id], tmp_path / "figures.jsonl"
    flags = ["--rows", "1,4", "--timesteps", "7", "--repeats", "2", "--out", str(out)]
    done = CliRunner().invoke(program, ["bench", "overhead", *place, *flags])
    assert done.exit_code == 0, (done.output, done.exception)
    plain, wide = map(json.loads, out.read_text().splitlines())
    assert [(row["method"], row["rows"]) for row in (plain, wide)] == [("pp", 1), ("pipedec", 4)]
    assert plain["timesteps"] == 2 * 2 * 4, "four tokens by two stages, twice"
    for row in (plain, wide):
        assert (row["stages"], row["run"], row["dispatch"]) == (2, resident.run_id, resident.spec.settings.cluster.dispatch)
        assert len(row["repeat_ms"]) == 2 and 0 < row["slowest_compute_ms"] < row["timestep_ms"]
        assert set(row["breakdown_ms"]) == {"compute", "wait", "transfer", "sync", "scheduler"}
        assert [rank["device"] for rank in row["ranks"]] == ["cpu"] * 3
    assert "slowest" in done.stdout and "…" not in done.stdout
    refused = CliRunner().invoke(program, ["bench", "overhead", *place, "--stages", "2", "--hidden", "8"])
    assert "--stages, --hidden: a running cluster is measured as it is" in str(refused.exception)


@pytest.mark.parametrize("resident", ["windows"], indirect=True)
def test_without_a_draft_only_one_row_can_be_measured(resident: LocalCluster) -> None:
    assert resident.scheduler is not None
    without = with_settings(Running.of(resident.scheduler, resident.run_id), draft=NONE)
    (row,) = measure_running(RunningOverheadConfig((4, 1), 2, 1), without)
    assert row["rows"] == 1
    with pytest.raises(UserError, match="has no draft model, so there is nothing but 1 row per timestep"):
        measure_running(RunningOverheadConfig((4,), 2, 1), without)
