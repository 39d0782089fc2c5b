"""The partitions of a model over the GPUs of one host, for a plan without a cluster.yaml."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from pipedec.config import NONE, ClusterConfig
from pipedec.config.cluster import cluster_from
from pipedec.core.errors import UserError
from pipedec.core.values import unknown_name
from pipedec.hardware import DEVICES
from pipedec.plan.partition import Measured, Plan, plan

_COUNTED = re.compile(r"(?:(\d+)\s*[x×*]\s*)?(\S+)", re.IGNORECASE)
_MAX_COUNT = 64
_QUANTIZE = ("int8", "int4")


def gpus_of(text: str) -> dict[str, int]:
    """The number of GPUs by kind, of ``4x3090`` or ``2xrtx3090,4090``. Raises UserError for anything else."""
    found: dict[str, int] = {}
    for part in text.split(","):
        match = _COUNTED.fullmatch(part.strip())
        count, name = (int(match[1] or 1), match[2].lower()) if match else (0, part)
        kind = next((kind for kind in (name, f"rtx{name}") if kind in DEVICES), None)
        if kind is None:
            raise UserError(f"--gpus {text}: {unknown_name('device', name, DEVICES)}: write 4x3090, or 2x3090,1x4090")
        found[kind] = found.get(kind, 0) + count
        if not 1 <= found[kind] <= _MAX_COUNT:
            raise UserError(f"--gpus {text}: give 1 to {_MAX_COUNT} of a kind")
    return found


def one_host_plan(gpus: Mapping[str, int], given: Mapping[str, Any], measured: Measured) -> Plan:
    """The plan of a model on these GPUs: a stage on each, the draft, if there is one, on the last GPU, alone if the model then
    fits. If none fits, the last of these plans.

    Args:
        given: settings by name, ``target`` among them.

    Raises UserError as ``plan``.
    """
    plans = [plan(config, None, measured) for config in _partitions(gpus, given)]
    return next((made for made in plans if not made.problems), plans[-1])


def fitting_quantize(gpus: Mapping[str, int], given: Mapping[str, Any], measured: Measured) -> str | None:
    """The first ``--quantize`` with which a model fits that is stored in 16 or 32 bits; None if there is none."""
    if "quantize" in given:
        return None
    for quantize in _QUANTIZE:
        try:
            if not one_host_plan(gpus, {**given, "quantize": quantize}, measured).problems:
                return quantize
        except UserError:  # its weights are in fewer bits already
            return None
    return None


def _partitions(gpus: Mapping[str, int], given: Mapping[str, Any]) -> Iterator[ClusterConfig]:
    count, last = sum(gpus.values()), list(gpus)[-1]
    drafts = given.get("draft", NONE) != NONE
    name = "-".join(f"{number}x{kind}" for kind, number in gpus.items())
    for is_shared in (False, True) if drafts and count > 1 else (drafts,):
        stages = count if is_shared or not drafts else count - 1
        draft_device = {"draft_device": {"host": "localhost", "device": last, "shared": is_shared}} if drafts else {}
        yield cluster_from({
            "draft": NONE,
            **given,
            "servers": [{"host": "localhost", "devices": dict(gpus)}],
            "partitions": {name: {"stages": stages, **draft_device}},
        })  # fmt: skip
