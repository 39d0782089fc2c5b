"""The operations benchmark at toy size: what it builds, what it writes down, and what it refuses."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from benchmarks.kernels.__main__ import kernels
from benchmarks.kernels.operations import OperationsConfig, grown_tree, measure_operations
from benchmarks.kernels.stopwatch import check_memory
from pipedec.core.errors import UserError

CPU = torch.device("cpu")


def test_the_command_measures_every_operation_at_every_size(tmp_path: Path) -> None:
    out = tmp_path / "figures.jsonl"
    flags = ["--sizes", "1,40", "--past", "5", "--layers", "1", "--repeats", "2", "--device", "cpu", "--out", str(out)]
    done = CliRunner().invoke(kernels, ["operations", *flags])
    assert done.exit_code == 0, (done.output, done.exception)
    for words in ("grow by a layer", "prune cache, hit", "tree attention", "rows that the hit keeps"):
        assert words in done.stdout
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    verdicts = [("prune tree", "hit"), ("prune cache", "hit"), ("prune tree", "miss"), ("prune cache", "miss")]
    attention = [("attention plan", None), ("tree attention", None), ("reference attention", None)]
    found = [(row["operation"], row["verdict"]) for row in rows if row["tree_rows"] == 40]
    assert found == [("grow", None), *verdicts, *attention]
    assert {row["verdict"] for row in rows if row["tree_rows"] == 1} == {None, "miss"}, "a root has no row that a verdict hits"
    for row in rows:
        assert 0 < row["time_us"]["p10"] <= row["time_us"]["median"] <= row["time_us"]["p90"]
    kept = {row["verdict"]: row["kept_rows"] for row in rows if row["tree_rows"] == 40}
    assert kept["miss"] == 0 and 40 // 16 <= kept["hit"] < 40 and kept[None] is None


@pytest.mark.parametrize("size", [1, 33, 1024])
def test_a_tree_has_the_size_asked_for_and_room_for_a_layer(size: int) -> None:
    tree, candidates = grown_tree(OperationsConfig(), size, CPU)
    assert tree.num_rows == size
    depths = tree.positions.tolist()
    layers = [depths.count(depth) for depth in range(depths[-1] + 1)]
    assert depths == sorted(depths) and max(layers) <= 32
    assert candidates.rows.tolist() == list(range(size - layers[-1], size)) and candidates.token_ids.shape[1] == 16
    assert all(before.tolist() != after.tolist() for before, after in pairwise(candidates.log_probs))
    storage = tree.tree_mask.untyped_storage().data_ptr()
    tree.grow(candidates, 32)
    assert tree.tree_mask.untyped_storage().data_ptr() == storage
    if size == 1024:
        assert layers[-30:] == [32] * 30


def test_impossible_settings_are_refused() -> None:
    for flags, words in (
        ({"sizes": (32, 0)}, r"sizes\[1\]: must be an integer \(at least 1\), not 0"),
        ({"heads": 5}, "--heads 5 must be a multiple of --kv-heads 2"),
        ({"device": "tpu"}, "device: must be one of auto, cpu, cuda, not 'tpu'"),
    ):
        with pytest.raises(UserError, match=words):
            OperationsConfig(**flags)  # type: ignore[arg-type]


def test_a_tree_that_does_not_fit_is_refused_before_it_is_made() -> None:
    with pytest.raises(UserError, match=r"a tree of 10000000 rows .* would take .* GB free: lower --sizes"):
        measure_operations(OperationsConfig(sizes=(10_000_000,), device="cpu"))
    check_memory("nothing", 1, CPU, "no advice")
