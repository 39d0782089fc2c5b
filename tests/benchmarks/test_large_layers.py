"""The layers benchmark at toy size: what it counts, against which bound, and what it refuses."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from support.checkpoints import save_tiny_llama, stage_parameters

from benchmarks.kernels import layers
from benchmarks.kernels.__main__ import kernels
from benchmarks.kernels.layers import LayersConfig, Roofline, random_stage
from pipedec.core.errors import UserError
from pipedec.families import model_config
from pipedec.families.llama import LlamaConfig
from pipedec.hardware import DEVICES
from pipedec.model import KVCache, LaneRows
from pipedec.plan.speeds import read_speeds


def test_the_command_counts_steps_against_the_bound(tmp_path: Path, tiny: LlamaConfig) -> None:
    out = tmp_path / "figures.jsonl"
    flags = ["--model", "tiny", "--layers", "2", "--rows", "1,3", "--past", "4,9", "--lanes", "3", "--tree-rows", "20"]
    done = CliRunner().invoke(kernels, ["layers", *flags, "--repeats", "1", "--device", "cpu", "--out", str(out)])
    assert done.exit_code == 0, (done.output, done.exception)
    for words in ("of the bound", "grow by a layer", "One row of each of many requests"):
        assert words in done.stdout
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    forward = {(row["past"], row["lanes"], row["rows"]): row for row in rows if row["operation"] == "forward"}
    assert list(forward) == [(4, 1, 1), (4, 1, 3), (4, 3, 3), (9, 1, 1), (9, 1, 3), (9, 3, 3)]
    step, weights = forward[9, 1, 3], 2 * tiny.layer_parameters
    assert step["bytes"] == 4 * (weights + 2 * (9 + 3) * tiny.cache_values_per_token)
    assert step["flops"] == 2 * 3 * weights + 4 * 2 * 3 * (9 + 3) * 32
    roofline = Roofline(**step["roofline"])
    assert roofline.bytes_per_second > 0 and roofline.flops_per_second > 0 and "measured" in roofline.source
    assert step["bound_us"] == 1000 * roofline.bound_ms(step["bytes"], step["flops"])[0]
    assert step["share_of_bound"] == pytest.approx(step["bound_us"] / step["time_us"]["median"])
    many = forward[9, 3, 3]
    assert many["over_one_lane"] == many["time_us"]["median"] / many["one_lane_time_us"]["median"]
    assert many["bytes"] == 4 * (weights + 3 * 2 * (9 + 1) * tiny.cache_values_per_token)
    assert many["flops"] == 3 * forward[9, 1, 1]["flops"]
    beside = {(row["operation"], row["verdict"]) for row in rows if row["operation"] not in ("forward", "products")}
    assert beside == {("grow", None), *((name, verdict) for name in ("prune tree", "prune cache") for verdict in ("hit", "miss"))}


def test_what_plans_take_of_a_device_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny: LlamaConfig) -> None:
    """By the entry, the smallest step takes as long as it was measured, unless products alone were slower."""
    out, written = tmp_path / "figures.jsonl", tmp_path / "speeds.json"
    sizes = ["--layers", "2", "--rows", "3,1", "--past", "9,4", "--tree-rows", "20"]
    flags = ["layers", "--model", "tiny", *sizes, "--device", "cpu"]
    done = CliRunner().invoke(kernels, [*flags, "--repeats", "3", "--out", str(out), "--write", str(written)])
    assert done.exit_code == 0 and "For plans, cpu: products of one row read at" in done.stderr, (done.output, done.exception)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    (products,) = (row for row in rows if row["operation"] == "products")
    matrices = tiny.layer_parameters - 2 * 32  # without norms
    assert products["bytes"] == 4 * 2 * matrices
    ((name, speed),) = read_speeds(written).items()
    assert {"device": name, **asdict(speed)} == products["speed"]
    assert (name, speed.kernels, speed.layers, speed.torch) == ("cpu", "torch", 2, torch.__version__)
    assert speed.bandwidth_share == pytest.approx(products["bytes"] / products["time_us"]["median"] / 40e3, rel=0.01, abs=0.001)
    step = next(row for row in rows if row["operation"] == "forward" and (row["rows"], row["past"]) == (1, 4))
    read_us = step["bytes"] / products["bytes"] * products["time_us"]["median"]
    assert speed.layer_us == pytest.approx(max(0, step["time_us"]["median"] - read_us) / 2, abs=0.1)

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA T400")
    with pytest.raises(UserError, match=r"plans do not know a NVIDIA T400: add it to pipedec/hardware\.py"):
        layers.check_entry(written, torch.device("cuda"))
    written.write_text("{")
    refused = CliRunner().invoke(kernels, [*flags, "--write", str(written)])
    assert isinstance(refused.exception, UserError) and "not valid JSON" in str(refused.exception), "before anything is measured"


def test_the_slower_of_reading_and_computing_is_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    roofline = Roofline(bytes_per_second=100, flops_per_second=1000, source="a test")
    assert roofline.bound_ms(50, 100) == (500, "memory") and roofline.bound_ms(50, 900) == (900, "compute")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    known = Roofline.of(torch.device("cuda"), "bfloat16")
    assert (known.bytes_per_second, known.flops_per_second) == (4.8e12, 9.89e14) and "H200" in known.source, "by its data sheet"
    assert set(layers.DATA_SHEETS.values()) == {name for name, device in DEVICES.items() if device.is_gpu}


def test_random_layers_compute_finite_numbers(tmp_path: Path) -> None:
    save_tiny_llama(tmp_path)
    config = model_config(tmp_path)
    stage = random_stage(config, range(0, 4), torch.float32, torch.device("cpu"))
    assert stage.stack.num_bytes == 4 * stage_parameters(tmp_path, range(4))
    tokens = torch.arange(5)
    cache = KVCache(stage.make_pool(16), ((0, 16),))
    hidden = stage.forward(tokens, [LaneRows(tokens, cache)])
    assert bool(stage.logits(hidden).isfinite().all()) and float(hidden.std()) > 0.1


def test_impossible_settings_are_refused() -> None:
    for flags, words in (
        ({"model": "gpt-2"}, "unknown model 'gpt-2': choose one of llama-3.1-405b, llama-3.1-70b"),
        ({"dtype": "float8"}, "dtype: must be one of float32, bfloat16, float16, not 'float8'"),
        ({"rows": (1, 0)}, r"rows\[1\]: must be an integer \(at least 1\), not 0"),
        ({"tree_rows": ()}, r"tree_rows: must be a list \(not empty\), not \(\)"),
    ):
        with pytest.raises(UserError, match=words):
            LayersConfig(**flags)  # type: ignore[arg-type]
