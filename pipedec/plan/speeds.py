"""The share of their data sheets that devices reach, as ``python -m benchmarks.kernels layers --write`` has measured it.

Owns ``speeds.json``, which has an entry for each device that was measured; all others count with their data sheet. Loads no
torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta

from pipedec.core.errors import UserError
from pipedec.core.values import unknown_name
from pipedec.hardware import DEVICES
from pipedec.validation import parse_json, read_text, validated

SHIPPED = Path(__file__).with_name("speeds.json")
# Where nothing was measured: ten kernels of a layer that are replayed as a CUDA graph, and a gap of one to two µs after each.
ASSUMED_LAYER_US = 15.0


@dataclass(frozen=True)
class MeasuredSpeed:
    """Constants of a device that layers of a stage have reached there, in a step of one row.

    Attributes:
        layer_us: time of a layer beside reading its weights: attention after a short past, norms, launches.
        bandwidth_share: of the data sheet's memory bandwidth, at which products read the weights. That of a processor is nominal,
            and may be exceeded.
        kernels: which kernels computed what is not a product.
        model, layers, dtype: what was measured, by the name of the model's shape.
        note: what else a reader should know.
    """

    layer_us: Annotated[float, Meta(ge=0)]
    bandwidth_share: Annotated[float, Meta(gt=0)]
    kernels: Literal["torch", "triton"]
    model: str
    layers: Annotated[int, Meta(ge=1)]
    dtype: str
    date: str
    revision: str
    torch: str
    driver: str | None = None
    note: str = ""

    @property
    def source(self) -> str:
        """When it was measured, and with which versions."""
        return f"measured on {self.date} (torch {self.torch}, kernels of {self.kernels})"


@dataclass(frozen=True)
class _File:
    devices: Mapping[str, MeasuredSpeed]


@dataclass(frozen=True)
class Speed:
    """The constants of a device's passes, and their source: a measurement or a data sheet."""

    layer_us: float
    bandwidth_share: float
    source: str


def speed_of(device: str) -> Speed:
    """The constants of a device by the file that is shipped. Raises UserError as ``read_speeds``."""
    if (measured := _shipped().get(device)) is not None:
        return Speed(measured.layer_us, measured.bandwidth_share, measured.source)
    return Speed(ASSUMED_LAYER_US, 1.0, f"data sheet ({DEVICES[device].source})" if DEVICES[device].is_gpu else "nominal")


def read_speeds(path: Path) -> dict[str, MeasuredSpeed]:
    """The entries of a file, by the device's name in ``hardware``. Raises UserError of one line if it is not such a file."""
    return _checked(parse_json(_File, read_text(path), str(path)), path)


def write_speed(path: Path, device: str, speed: MeasuredSpeed) -> None:
    """Add or replace the entry of a device in a file, which need not exist. Raises UserError as ``read_speeds``, also for this
    entry, and then writes nothing.
    """
    known = read_speeds(path) if path.exists() else {}
    document = {"devices": {name: asdict(one) for name, one in sorted((known | {device: speed}).items())}}
    _checked(validated(_File, document, str(path)), path)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(partial, path)


def _checked(file: _File, path: Path) -> dict[str, MeasuredSpeed]:
    for name, speed in file.devices.items():
        if name not in DEVICES:
            raise UserError(f"{path}: devices: {unknown_name('device', name, DEVICES)}")
        if DEVICES[name].is_gpu and speed.bandwidth_share > 1:
            share = f"{speed.bandwidth_share:.3g}"
            raise UserError(f"{path}: devices.{name}.bandwidth_share: must be at most 1, the data sheet's bandwidth, not {share}")
    return dict(file.devices)


@cache
def _shipped() -> dict[str, MeasuredSpeed]:
    return read_speeds(SHIPPED)
