"""The resources benchmark on a toy cluster."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from support.tiny_pair import Pair

from pipedec.config import Settings
from pipedec.core.errors import PipedecError, UserError
from pipedec.engine.build import resolve
from pipedec.plan.budgets import kv_slots
from soak.resources import ResourcesConfig, TimedAnswer, latencies, resources


@pytest.mark.numbers
@pytest.mark.slow
def test_toy_cluster(pair: Pair, tmp_path: Path) -> None:
    out = tmp_path / "figures.jsonl"
    flags = [*pair.flags, "--stages", "2", "--device", "cpu"]
    flags += ["--idle-seconds", "0.3", "--requests", "2", "--max-tokens", "5", "--out", str(out)]
    done = CliRunner().invoke(resources, flags)
    assert done.exit_code == 0, (done.output, done.exception)
    assert "Memory by rank" in done.stdout and "idle CPU" in done.stdout
    row: dict[str, Any] = json.loads(out.read_text())
    assert row["benchmark"] == "resources" and row["config"]["pipeline"]["layers"] == [[0, 4], [4, 8]]
    assert [rank["rank"] for rank in row["ranks"]] == [0, 1, 2]
    spec = resolve(Settings.of(target=pair.target, draft=pair.draft, stages=2, device="cpu"))
    for rank in row["ranks"]:
        assert rank["peak_bytes"] > rank["weight_bytes"] > 0
        capacity = None if rank["rank"] == 0 else kv_slots(spec)
        assert rank["cache_slots"] == {"before": capacity, "after": capacity}
    latency = row["second_request_ms"]
    assert latency["first_decoded"] > latency["first_token"] >= latency["prefill"] > 0
    assert row["redis_keys"]["after"] == row["redis_keys"]["before"] > 0
    assert row["idle_cpu_percent"]["total"] == pytest.approx(row["idle_cpu_percent"]["ranks"] + row["idle_cpu_percent"]["redis"])


def test_impossible_sizes_are_refused_and_an_answer_of_one_token_has_no_decoded_token() -> None:
    with pytest.raises(UserError, match="idle_seconds: must be a number"):
        ResourcesConfig(idle_seconds=0)
    with pytest.raises(PipedecError, match="no decoding was timed"):
        latencies(TimedAnswer(token_seconds=[0.1]))
