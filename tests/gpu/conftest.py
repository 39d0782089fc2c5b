"""What a GPU must show. Checks run on the CPU as well, so that they are known to work before there is a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Checks with a ``device`` run on the CPU and, with the marker ``gpu``, on the first GPU."""
    if "device" in metafunc.fixturenames:
        devices: Sequence[Any] = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))
        metafunc.parametrize("device", devices, scope="module")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        needed = next((mark.args[0] if mark.args else 1 for mark in item.iter_markers("gpu")), 0)
        if torch.cuda.device_count() < needed:
            missing = "no GPU" if needed == 1 else f"fewer than {needed} GPUs"
            item.add_marker(pytest.mark.skip(reason=f"{missing} (docs/gpu.md)"))
