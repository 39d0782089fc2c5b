"""The layers benchmark at toy size: what it counts, against which bound, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from click.testing import CliRunner
from support.checkpoints import save_tiny_llama, stage_parameters
from support.refusals import refusal

from benchmarks.kernels import layers
from benchmarks.kernels.__main__ import kernels
from benchmarks.kernels.layers import LayersConfig, Roofline, driver, measure_layers
from benchmarks.kernels.operations import filled_caches
from pipedec.core import UserError
from pipedec.families import KNOWN_MODELS, model_config
from pipedec.families.llama import LlamaConfig
from pipedec.hardware import DEVICES
from pipedec.model import KVCache, LaneRows, StageModel

TINY = LlamaConfig(
    model_type="llama", hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=100,
)  # fmt: skip


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shape that fits everywhere, under the name ``tiny``."""
    monkeypatch.setitem(KNOWN_MODELS, "tiny", TINY)


def test_steps_are_counted_against_the_bound() -> None:
    config = LayersConfig("tiny", 2, rows=(1, 3), past=(4, 9), tree_rows=(20,), device="cpu", repeats=2)
    rows = measure_layers(config)
    forward = [row for row in rows if row["operation"] == "forward"]
    assert [(row["past"], row["rows"]) for row in forward] == [(4, 1), (4, 3), (9, 1), (9, 3)]
    step = forward[-1]
    weights = 2 * TINY.layer_parameters
    assert step["bytes"] == 4 * (weights + 2 * (9 + 3) * TINY.cache_values_per_token)
    assert step["flops"] == 2 * 3 * weights + 4 * 2 * 3 * (9 + 3) * 32
    roofline = Roofline(**step["roofline"])
    assert step["bound_us"] == 1000 * roofline.bound_ms(step["bytes"], step["flops"])[0]
    assert step["share_of_bound"] == pytest.approx(step["bound_us"] / step["time_us"]["median"])
    beside = {(row["operation"], row["verdict"]) for row in rows if row["operation"] != "forward"}
    assert beside == {("grow", None), *((name, verdict) for name in ("prune tree", "prune cache") for verdict in ("hit", "miss"))}
    assert step["config"]["dtype"] == "float32" and step["config"]["device"] == "cpu" and step["date"]


def test_one_row_of_each_of_many_requests_is_compared_with_as_many_rows_of_one() -> None:
    config = LayersConfig("tiny", 2, rows=(1,), past=(9,), lanes=(3,), tree_rows=(20,), device="cpu", repeats=2)
    alone, step = (row for row in measure_layers(config) if row["operation"] == "forward")
    assert [(row["lanes"], row["rows"]) for row in (alone, step)] == [(1, 1), (3, 3)]
    assert step["over_one_lane"] == step["time_us"]["median"] / step["one_lane_time_us"]["median"]
    weights = 2 * TINY.layer_parameters
    assert step["bytes"] == 4 * (weights + 3 * 2 * (9 + 1) * TINY.cache_values_per_token)
    assert step["flops"] == 3 * alone["flops"]


def test_caches_in_several_runs_hold_as_much() -> None:
    config = LayersConfig("tiny", 2, past=(9, 600), lanes=(3,), runs=2, device="cpu").operations(torch.device("cpu"))
    caches = filled_caches(config, 20, torch.device("cpu"), 3)
    assert [len(cache.ranges(0, cache.slots)) for cache in caches] == [2, 2, 2]
    assert all(cache.past_length == 600 and cache.slots >= 620 for cache in caches)
    slots = [slot for cache in caches for run in cache.ranges(0, cache.slots) for slot in run]
    assert len(set(slots)) == len(slots)


def test_the_slower_of_reading_and_computing_is_the_bound() -> None:
    roofline = Roofline(bytes_per_second=100, flops_per_second=1000, source="a test")
    assert roofline.bound_ms(50, 100) == (500, "memory")
    assert roofline.bound_ms(50, 900) == (900, "compute")


def test_a_known_device_is_bound_by_its_data_sheet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    known = Roofline.of(torch.device("cuda"), "bfloat16")
    assert (known.bytes_per_second, known.flops_per_second) == (4.8e12, 9.89e14) and "H200" in known.source
    assert set(layers.DATA_SHEETS.values()) == {name for name, device in DEVICES.items() if device.is_gpu}


def test_an_unknown_device_is_measured() -> None:
    measured = Roofline.of(torch.device("cpu"), "float32")
    assert measured.bytes_per_second > 0 and measured.flops_per_second > 0 and "measured" in measured.source


def test_random_layers_compute_finite_numbers(tmp_path: Path) -> None:
    save_tiny_llama(tmp_path)
    config = model_config(tmp_path)
    stage = StageModel.random(config, range(0, 4), torch.float32, "cpu")
    assert stage.stack.num_bytes == 4 * stage_parameters(tmp_path, range(4))
    tokens = torch.arange(5)
    cache = KVCache(stage.make_pool(16), ((0, 16),))
    hidden = stage.forward(tokens, [LaneRows(tokens, cache)])
    assert bool(stage.logits(hidden).isfinite().all()) and float(hidden.std()) > 0.1


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"model": "gpt-2"}, "unknown model 'gpt-2': choose one of llama-3.1-405b, llama-3.1-70b"),
        ({"device": "tpu"}, "--device tpu: choose one of"),
        ({"dtype": "float8"}, "--dtype float8: choose one of float32, bfloat16, float16"),
        ({"layers": 0}, "--layers must be at least 1"),
        ({"lanes": (4, 0)}, "--lanes must be at least 1"),
        ({"rows": (1, 0)}, "--rows must be at least 1"),
        ({"past": (0,)}, "--past must be at least 1"),
        ({"tree_rows": ()}, "--tree-rows must have at least one entry"),
        ({"repeats": 0}, "--repeats must be at least 1"),
    ],
)
def test_impossible_settings_are_refused(flags: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        LayersConfig(**flags)


def test_layers_that_do_not_fit_are_refused_before_they_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=20_000_000_000))
    monkeypatch.setattr(StageModel, "random", None)
    with pytest.raises(UserError, match=r"6 layers of llama-3.1-70b in float32 would take 2\d\.\d GB, .* 20.0 GB free: lower"):
        measure_layers(LayersConfig(device="cpu"))


def test_no_driver_is_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert driver() is None
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 570.86.15\n")
    smi.chmod(0o755)
    assert driver() == "570.86.15"
    smi.write_text("#!/bin/sh\necho it is broken\nexit 9\n")
    assert driver() is None


def test_command_prints_tables_and_writes_rows(tmp_path: Path) -> None:
    out = tmp_path / "figures.jsonl"
    flags = ["--model", "tiny", "--layers", "1", "--rows", "1,8", "--past", "64", "--lanes", "4", "--tree-rows", "20"]
    flags += ["--repeats", "1"]
    done = CliRunner().invoke(kernels, ["layers", *flags, "--device", "cpu", "--out", str(out)])
    assert done.exit_code == 0, (done.output, done.exception)
    assert "of the bound" in done.stdout and "grow by a layer" in done.stdout and "…" not in done.stdout
    assert "One row of each of many requests" in done.stdout
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == 3 + 5 and rows[0]["benchmark"] == "layers" and "driver" in rows[0]


def test_command_refuses_words_for_numbers() -> None:
    done = CliRunner().invoke(kernels, ["layers", "--rows", "many"])
    assert "'--rows': 'many' is not a valid integer" in refusal(done)
