"""Recordings of the live feed: what they hold, and that they are always the same."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.tiny_pair import Pair

from benchmarks.live_recording import live_recording


@pytest.mark.slow
def test_a_recording_has_a_run_of_each_method_and_is_always_the_same(pair: Pair, tmp_path: Path) -> None:
    flags = ["--target", str(pair.target), "--draft", str(pair.draft), "--stages", "2", "--prompt", "Who?", "--max-tokens", "4"]
    flags += ["--methods", "pp,pipedec", "--record"]
    for name in ("plain.jsonl", "packed.jsonl.gz"):
        done = CliRunner().invoke(live_recording, [*flags, str(tmp_path / name)])
        assert done.exit_code == 0, (done.output, done.exception)
    text = (tmp_path / "plain.jsonl").read_bytes()
    assert gzip.decompress((tmp_path / "packed.jsonl.gz").read_bytes()) == text
    frames = [json.loads(line) for line in text.splitlines()]
    assert list(dict.fromkeys(frame["run"] for frame in frames)) == ["pp", "pipedec"]
    assert {frame["stages"] for frame in frames if frame["k"] == "run"} == {2}
