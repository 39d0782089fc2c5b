"""The choice between kernels and torch, in a process that interprets kernels."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from support.kernels import interpreted

from pipedec.model import kernel_choice
from pipedec.model.kernel_choice import choose_kernels
from pipedec.model.kernels import language

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(kernel_choice, "_tried", set())
    monkeypatch.setattr(kernel_choice, "_failures", {})
    with interpreted():
        yield


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_kernels_compute_where_first_ones_do_what_torch_does(dtype: torch.dtype) -> None:
    assert choose_kernels("auto", CPU, dtype) == "first kernels computed what torch does"
    assert language.has_kernels(CPU)
    assert choose_kernels("auto", CPU, torch.float64) == "float64 is left to torch"


def test_torch_computes_if_it_is_asked_for() -> None:
    assert choose_kernels("torch", CPU, torch.float32) == "as given"
    assert not language.has_kernels(CPU)


def test_torch_computes_where_triton_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable.\nmore")

    monkeypatch.setattr(language, "launch", fail)
    why = "Triton does not work here (Failed to find C compiler. Please specify via CC environment variable.)"
    assert choose_kernels("auto", CPU, torch.float32) == why
    assert choose_kernels("auto", CPU, torch.bfloat16) == why, "devices of this type are left to torch"
    assert not language.has_kernels(CPU)


def test_torch_computes_where_kernels_compute_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(language, "launch", lambda *arguments, **options: None)
    assert choose_kernels("auto", CPU, torch.float32).startswith("Triton computes something else here")
    assert not language.has_kernels(CPU)


def test_a_product_that_is_wrong_is_seen_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_choice.matmul, "matmul", lambda rows, weights: rows[:, :64])
    assert choose_kernels("auto", CPU, torch.float32).startswith("Triton computes something else here")


def test_other_devices_have_no_kernels() -> None:
    language.devices.discard("cpu")
    assert choose_kernels("auto", CPU, torch.float32) == "kernels need CUDA"
