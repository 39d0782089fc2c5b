"""The operations benchmark at toy size: what it builds, what it writes down, and what it refuses."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from support.kv_caches import read_cache
from support.refusals import refusal

from benchmarks.kernels.__main__ import kernels
from benchmarks.kernels.operations import OperationsConfig, filled_cache, grown_tree, measure_operations
from benchmarks.kernels.stopwatch import Stopwatch, check_memory, device_named
from pipedec.core import UserError
from pipedec.directories import reference_pair
from pipedec.families import model_config

CPU = torch.device("cpu")
TOY: dict[str, Any] = {"past": 5, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 8, "device": "cpu", "repeats": 2}


def test_every_operation_is_measured_at_every_size() -> None:
    seen: list[int] = []
    rows = measure_operations(OperationsConfig(sizes=(1, 40), **TOY), lambda row: seen.append(row["tree_rows"]))
    verdicts = [("prune tree", "hit"), ("prune cache", "hit"), ("prune tree", "miss"), ("prune cache", "miss")]
    attention = [("attention plan", None), ("tree attention", None), ("reference attention", None)]
    found = [(row["operation"], row["verdict"]) for row in rows if row["tree_rows"] == 40]
    assert found == [("grow", None), *verdicts, *attention]
    # A root alone has no row that a verdict could hit.
    assert {row["verdict"] for row in rows if row["tree_rows"] == 1} == {None, "miss"}
    assert seen == [row["tree_rows"] for row in rows]
    for row in rows:
        assert 0 < row["time_us"]["p10"] <= row["time_us"]["median"] <= row["time_us"]["p90"]
    kept = {row["verdict"]: row["kept_rows"] for row in rows if row["tree_rows"] == 40}
    assert kept["miss"] == 0 and 40 // 16 <= kept["hit"] < 40 and kept[None] is None


@pytest.mark.parametrize("size", [1, 2, 32, 33, 50, 128, 1024])
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


def test_a_cache_is_filled_in_both_levels() -> None:
    cache = filled_cache(OperationsConfig(**TOY), 7, CPU)
    assert (cache.past_length, cache.tree_length) == (5, 7) and cache.slots >= 12
    for layer in (0, 1):
        assert all(level.shape == (2, 12, 8) and bool((level != 0).all()) for level in read_cache(cache, layer))


def test_the_stopwatch_prepares_before_every_run() -> None:
    prepared: list[int] = []
    ran: list[int] = []

    def prepare() -> int:
        prepared.append(len(prepared))
        return prepared[-1]

    Stopwatch(CPU, 4).time_us(prepare, ran.append)
    assert ran == prepared and len(ran) > 4


def test_the_default_shape_is_the_shipped_target() -> None:
    layers, default = model_config(reference_pair() / "target").layers, OperationsConfig()
    layer = layers[0]
    assert (default.heads, default.kv_heads, default.head_dim) == (layer.num_heads, layer.num_kv_heads, layer.key_dim)
    assert default.layers * 4 == len(layers)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"sizes": (32, 0)}, "--sizes must be at least 1"),
        ({"sizes": ()}, "--sizes must have at least one entry"),
        ({"past": 0}, "--past must be at least 1"),
        ({"layers": -1}, "--layers must be at least 1"),
        ({"kv_heads": 0}, "--kv-heads must be at least 1"),
        ({"repeats": 0}, "--repeats must be at least 1"),
        ({"heads": 5}, "--heads 5 must be a multiple of --kv-heads 2"),
        ({"dtype": "int4"}, "--dtype int4: choose one of float32"),
        ({"device": "tpu"}, "--device tpu: choose one of auto, cpu, cuda"),
    ],
)
def test_impossible_settings_are_refused(flags: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        OperationsConfig(**flags)


def test_a_tree_that_does_not_fit_is_refused_before_it_is_made() -> None:
    with pytest.raises(UserError, match=r"a tree of 10000000 rows .* would take .* GB free: lower --sizes"):
        measure_operations(OperationsConfig(sizes=(10_000_000,), device="cpu"))
    check_memory("nothing", 1, CPU, "no advice")


def test_a_missing_gpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device_named("auto") == device_named("cpu") == CPU
    with pytest.raises(UserError, match="--device cuda, but torch sees no GPU"):
        device_named("cuda")


def test_command_prints_a_table_and_writes_rows(tmp_path: Path) -> None:
    out = tmp_path / "figures.jsonl"
    flags = ["--sizes", "1,20", "--past", "5", "--layers", "1", "--repeats", "1", "--device", "cpu", "--out", str(out)]
    done = CliRunner().invoke(kernels, ["operations", *flags])
    assert done.exit_code == 0, (done.output, done.exception)
    for words in ("grow by a layer", "prune cache, hit", "tree attention", "rows that the hit keeps"):
        assert words in done.stdout
    assert "…" not in done.stdout
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == 6 + 8 and rows[0]["benchmark"] == "operations" and rows[0]["config"]["device"] == "cpu"


def test_command_refuses_words_for_numbers() -> None:
    done = CliRunner().invoke(kernels, ["operations", "--sizes", "large"])
    assert "'--sizes': 'large' is not a valid integer" in refusal(done)
