"""What a timestep of a running cluster costs beside its slowest stages."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.clusters import with_settings

from benchmarks.overhead import OverheadConfig, measure, overhead, slowest_compute_ms
from pipedec.client.run_handle import RunHandle
from pipedec.cluster.local import LocalCluster
from pipedec.config import NONE
from pipedec.core.errors import UserError
from pipedec.topology import Topology
from pipedec.tracing import SCHEDULER_TRACK, TraceEvent


def event(label: str, start_ms: float, end_ms: float, rank: int = 0) -> TraceEvent:
    return TraceEvent(rank, label, "", round(1000 * start_ms), round(1000 * end_ms))


def test_the_slowest_group_of_every_timestep() -> None:
    events = [
        event("1P0", -9, -1, 1), event("1F1", 0, 2, 1), event("2F1", 2, 5, 2), event("3F1", 0, 4, 3),
        event("0F2", 5, 25), event("3F2", 5, 11, 3), event("1F2", 0, 99, SCHEDULER_TRACK),
    ]  # fmt: skip
    assert slowest_compute_ms(events, Topology(((1,), (2,), (3,)))) == pytest.approx((4 + 6) / 2)
    assert slowest_compute_ms(events, Topology(((1, 2), (3,)))) == pytest.approx((5 + 6) / 2), "its stages follow one another"
    assert slowest_compute_ms(events[:1], Topology(((1,),))) is None


@pytest.mark.slow
@pytest.mark.parametrize("resident", ["windows"], indirect=True)
def test_a_running_cluster_is_measured_by_traced_answers(resident: LocalCluster, tmp_path: Path) -> None:
    place, out = ["--redis", resident.address.redis_url, "--run", resident.run_id], tmp_path / "figures.jsonl"
    flags = ["--rows", "1,4", "--timesteps", "7", "--repeats", "2", "--out", str(out)]
    done = CliRunner().invoke(overhead, [*place, *flags])
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


@pytest.mark.parametrize("resident", ["windows"], indirect=True)
def test_without_a_draft_only_one_row_can_be_measured(resident: LocalCluster) -> None:
    assert resident.scheduler is not None
    without = with_settings(RunHandle.of(resident.scheduler, resident.run_id), draft=NONE)
    (row,) = measure(OverheadConfig((4, 1), 2, 1), without)
    assert row["rows"] == 1
    with pytest.raises(UserError, match="has no draft model, so there is nothing but 1 row per timestep"):
        measure(OverheadConfig((4,), 2, 1), without)
