"""The benchmark of the HTTP server, from its command to its row, on a tiny emulated cluster."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.tiny_pair import Pair

from pipedec.bench.serve.benchmark import ServeConfig
from pipedec.cli.main import program
from pipedec.core import UserError


@pytest.mark.slow
@pytest.mark.usefixtures("leaves_nothing")
def test_every_figure_is_in_the_row_and_in_the_table(pair: Pair, tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    sizes = ["--streams", "3", "--tokens", "6", "--repeats", "1", "--connections", "20", "--drops", "15", "--waiting", "8"]
    flags = ["--stages", "2", "--target", str(pair.target), "--draft", str(pair.draft), *sizes, "--out", str(out)]
    done = CliRunner().invoke(program, ["bench", "serve", *flags], catch_exceptions=False)
    assert done.exit_code == 0
    [row] = [json.loads(line) for line in out.read_text().splitlines()]
    assert row["config"] == {"streams": 3, "tokens": 6, "repeats": 1, "connections": 20, "drops": 15, "waiting": 8}
    assert row["cluster"]["stages"] == 2
    for part, unit in (("one_stream", "ms_per_token"), ("many_streams", "tokens_per_second")):
        figures = row[part]
        assert figures["ratio"] == pytest.approx(figures[f"http_{unit}"] / figures[f"python_{unit}"])
    assert row["many_streams"]["server_cpu_ms_per_token"] > 0
    assert 0 < row["round_trips"]["per_second"] <= 10
    assert row["drops"]["same_answer"]


@pytest.mark.parametrize("name", ["streams", "tokens", "repeats", "connections", "drops", "waiting"])
def test_a_size_below_one_is_refused(name: str) -> None:
    with pytest.raises(UserError, match=f"--{name} must be at least 1"):
        ServeConfig(**{name: 0})
