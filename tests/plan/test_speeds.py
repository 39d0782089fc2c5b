"""What plans know of devices: entries that were measured, data sheets for all others, and mistakes in the file in one line."""

from __future__ import annotations

import io
import json
import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from rich.console import Console
from support.clusters import clustered

from pipedec.config import DeviceConfig, ServerConfig
from pipedec.core.errors import UserError
from pipedec.core.stage_message import Load
from pipedec.families import KNOWN_MODELS
from pipedec.formats import WeightFormat
from pipedec.hardware import DEVICES
from pipedec.plan.costs import ModelCosts
from pipedec.plan.emulation import Emulation
from pipedec.plan.partition import plan
from pipedec.plan.speeds import SHIPPED, MeasuredSpeed, read_speeds, speed_of, write_speed
from pipedec.plan.table import plan_table

SPEED = MeasuredSpeed(120.5, 0.9, "triton", "llama-3.1-70b", 6, "bfloat16", "2026-12-01", "abc", "2.13.0", "580.1")


def test_the_shipped_times_are_those_that_were_measured() -> None:
    """Six layers of a 70B in a step of one row after 512 tokens: the table of docs/gpu.md."""
    costs = ModelCosts(KNOWN_MODELS["llama-3.1-70b"], WeightFormat("bfloat16"), rows=32, max_model_len=4096, passage=14)
    times = {name: costs.pass_time(DEVICES[name], range(10, 16), False) for name in ("h100", "h200", "rtx3090")}
    assert times["h100"].ms(1, 512) == pytest.approx(4.58, abs=0.01) and times["h200"].ms(1, 512) == pytest.approx(3.36, abs=0.01)
    assert times["rtx3090"].launch_ms == pytest.approx(6 * 0.015), "assumed, since it was not measured"
    assert all(DEVICES[name].is_gpu and speed.note for name, speed in read_speeds(SHIPPED).items())


def test_a_plan_says_of_each_device_whether_it_was_measured() -> None:
    servers = (ServerConfig("a", {"h100": 1, "l4": 1, "cpu": 1}),)
    devices = [DeviceConfig("a", "h100"), DeviceConfig("a", "l4")]
    partition = {"stages": 2, "devices": devices, "draft_device": DeviceConfig("a", "cpu")}
    planned = plan(clustered(servers, {"only": partition}, target="llama-3.2-1b", draft="llama-3.2-1b", dtype="bfloat16"))
    Console(width=100, file=(output := io.StringIO())).print(plan_table(planned))
    lines = re.findall(r"^ .{22}(cpu|h100|l4): (.*)$", output.getvalue(), re.MULTILINE)
    assert lines == [
        ("cpu", "nominal"),
        ("h100", "measured on 2026-11-26 (torch 2.11, kernels of torch)"),
        ("l4", "data sheet (NVIDIA L4 data sheet)"),
    ]
    first, second = planned.stages
    slower = 0.85 * DEVICES["h100"].bandwidth_gb_per_s / DEVICES["l4"].bandwidth_gb_per_s
    layers = [len(stage.layers) for stage in planned.stages]
    assert first.timing.compute.launch_ms == pytest.approx(layers[0] * 0.163)
    assert second.timing.compute.past_ms / layers[1] == pytest.approx(slower * first.timing.compute.past_ms / layers[0])
    emulated = Emulation.of_plan(planned).stages[0].compute_ms(Load(1))
    assert emulated == first.timing.compute_ms(Load(1)), "emulations take the same times"


def test_an_entry_is_added_or_replaced(tmp_path: Path) -> None:
    path = tmp_path / "speeds.json"
    write_speed(path, "l4", SPEED)
    write_speed(path, "a10", replace(SPEED, layer_us=0.5, driver=None))
    write_speed(path, "l4", replace(SPEED, layer_us=99.0))
    assert read_speeds(path) == {"a10": replace(SPEED, layer_us=0.5, driver=None), "l4": replace(SPEED, layer_us=99.0)}
    assert list(json.loads(path.read_text())["devices"]) == ["a10", "l4"] and list(tmp_path.iterdir()) == [path]
    assert speed_of("l4").source.startswith("data sheet"), "the shipped file is another one"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bandwidth_share": 1.2}, "devices.l4.bandwidth_share: must be at most 1, the data sheet's bandwidth, not 1.2"),
        ({"bandwidth_share": 0}, "devices.l4.bandwidth_share: must be a number (above 0), not 0"),
        ({"layer_us": -1}, "devices.l4.layer_us: must be a number (at least 0), not -1"),
        ({"layer_us": "fast"}, "devices.l4.layer_us: must be a number (at least 0), not 'fast'"),
        ({"kernels": "cutlass"}, "devices.l4.kernels: must be one of torch, triton, not 'cutlass'"),
        ({"speed": 1}, "devices.l4: unknown key 'speed': known: layer_us, bandwidth_share"),
    ],
)  # fmt: skip
def test_a_bad_entry_gives_one_line_and_is_not_written(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    (path := tmp_path / "speeds.json").write_text(text := json.dumps({"devices": {"l4": asdict(SPEED) | changes}}))
    for act in (lambda: read_speeds(path), lambda: write_speed(path, "a10", SPEED)):
        with pytest.raises(UserError, match=f"^{re.escape(f'{path}: {message}')}") as refused:
            act()
        assert "\n" not in str(refused.value) and path.read_text() == text
    if "bandwidth_share" in changes:
        path.unlink()
        with pytest.raises(UserError, match=re.escape(message)):
            write_speed(path, "l4", replace(SPEED, **changes))  # type: ignore[arg-type]
        assert not path.exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not valid JSON"),
        ("[]", "must be a mapping, not []"),
        ("{}", "devices: missing"),
        (json.dumps({"devices": {"rtx3080": asdict(SPEED)}}), "devices: unknown device 'rtx3080': did you mean rtx3090?"),
    ],
)  # fmt: skip
def test_another_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (path := tmp_path / "speeds.json").write_text(text)
    with pytest.raises(UserError, match=re.escape(f"{path}: {message}")):
        read_speeds(path)
