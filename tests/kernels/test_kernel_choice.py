"""The choice between kernels and torch, in a process that interprets kernels."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from support.kernels import interpreted

from pipedec.model.kernel_choice import choose_kernels
from pipedec.model.kernels import language

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def kernels() -> Iterator[None]:
    choose_kernels.cache_clear()
    with interpreted():
        yield


def test_kernels_compute_where_a_first_one_does_what_torch_does() -> None:
    assert choose_kernels("auto", CPU) == "a first kernel computed what torch does"
    assert language.has_kernels(CPU)


def test_torch_computes_if_it_is_asked_for() -> None:
    assert choose_kernels("torch", CPU) == "as given"
    assert not language.has_kernels(CPU)


def test_torch_computes_where_triton_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable.\nmore")

    monkeypatch.setattr(language, "launch", fail)
    why = "Triton does not work here (Failed to find C compiler. Please specify via CC environment variable.)"
    assert choose_kernels("auto", CPU) == why
    assert not language.has_kernels(CPU)


def test_torch_computes_where_kernels_compute_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(language, "launch", lambda *arguments, **options: None)
    assert choose_kernels("auto", CPU).startswith("Triton computes something else here")
    assert not language.has_kernels(CPU)


def test_other_devices_have_no_kernels() -> None:
    language.devices.discard("cpu")
    assert choose_kernels("auto", CPU) == "kernels need CUDA"
