"""Counting what the host reads from a device, and the budgets of rank 0 and the stages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.counted_device import DEVICE, CountedDevice
from support.tiny_pair import Pair
from torch import Tensor

from pipedec.core import SamplingParams, StructuredOutputs, UserError
from pipedec.methods import METHOD_NAMES
from soak.reads import ReadsConfig, measure_reads, over_budget

VALUES = [3, 0, 2, 1]
READS: dict[str, Callable[[Tensor], Any]] = {
    "tolist": lambda values: values.tolist(),
    "bool": lambda values: bool((values > 0).any()),
    "numpy": lambda values: values.numpy(),
    "cpu": lambda values: values.cpu(),
    "to, with a data type": lambda values: values.to(device="cpu", dtype=torch.float32),
    "nonzero": lambda values: values.nonzero(),
    "where": lambda values: torch.where(values > 0),
    "bincount": lambda values: torch.bincount(values),
    "a mask as index": lambda values: values[values > 0],
    "a mask as index of an assignment": lambda values: values.__setitem__(values > 0, 0),
    "repeat_interleave": lambda values: values.repeat_interleave(values),
    "of a result": lambda values: (values.clone().view(2, 2).sum(1) + 1)[:1].tolist(),
}
NO_READS: dict[str, Callable[[Tensor], Any]] = {
    "arithmetic": lambda values: (values + 1) * 2 > values,
    "indices": lambda values: values[values],
    "indices on the host": lambda values: values[torch.tensor(VALUES)],
    "a copy to the device": lambda values: values.copy_(torch.tensor(VALUES)),
    "a number": lambda values: values.masked_fill(values > 0, torch.tensor(1)),
}
MIXED: dict[str, Callable[[Tensor], Any]] = {
    "sum": lambda values: values + torch.tensor(VALUES),
    "cat": lambda values: torch.cat((torch.tensor(VALUES), values)),
    "gather": lambda values: torch.tensor(VALUES).gather(0, values),
    "values for indices": lambda values: values.__setitem__(values.clone(), torch.tensor(VALUES)),
}


def counted(work: Callable[[Tensor], Any]) -> tuple[int, int]:
    """Reads and mixed operations of some work on a tensor of the device."""
    device = CountedDevice()
    with device:
        work(torch.tensor(VALUES, device=DEVICE))
    return device.reads.total(), device.mixed.total()


def test_reads_are_counted_and_tensors_of_host_and_device_do_not_meet() -> None:
    for expected, cases in (((1, 0), READS), ((0, 0), NO_READS), ((0, 1), MIXED)):
        for what, work in cases.items():
            assert counted(work) == expected, what


def test_what_was_read_is_on_the_host() -> None:
    with CountedDevice() as device:
        assert torch.arange(3, device=DEVICE).device == DEVICE
        on_host = torch.arange(3, device=DEVICE).cpu()
        assert on_host.device == torch.device("cpu") and on_host.to(DEVICE).device == DEVICE
        before = device.reads.total()
        on_host.tolist()
    assert device.reads.total() == before


def test_reads_belong_to_who_works() -> None:
    device = CountedDevice()
    with device, device.working("rank 0"):
        with device.working("stage 1"):
            torch.zeros(1, device=DEVICE).item()
        torch.zeros(1, device=DEVICE).item()
    assert sorted(who for who, _ in device.reads) == ["rank 0", "stage 1"]


SAMPLING = {
    "greedy": SamplingParams(max_tokens=12),
    "drawn": SamplingParams(0.8, top_k=40, top_p=0.9, min_p=0.01, seed=3, max_tokens=12),
    "penalties": SamplingParams(0.8, seed=3, max_tokens=12, repetition_penalty=1.2, frequency_penalty=0.3, logit_bias={5: 2.0}),
    "structured": SamplingParams(max_tokens=12, structured_outputs=StructuredOutputs(regex="[a-z ]{30}")),
}


@pytest.mark.fast_cases
@pytest.mark.slow
@pytest.mark.parametrize("kind", SAMPLING)
def test_every_method_keeps_to_its_budget(pair: Pair, kind: str) -> None:
    config = ReadsConfig(METHOD_NAMES, (1, 3), "Natalia sold 12 clips in April.", SAMPLING[kind])
    rows = measure_reads(pair.spec(3).replaced(dtype="float64"), config)
    assert len(rows) == 2 * len(METHOD_NAMES)
    assert [line for row in rows for line in over_budget(row)] == []
    assert all(row["stages"]["stage 3"] > 0 and row["stages"]["stage 1"] == 0 for row in rows)
    assert all(row["rank_0"] > 0 for row in rows if row["config"]["method"] in ("stpp", "pipedec", "pipedec-bestfirst"))


@pytest.mark.slow
def test_log_probabilities_are_read_but_never_mixed(pair: Pair) -> None:
    config = ReadsConfig(METHOD_NAMES, (2,), "Natalia sold clips.", SamplingParams(max_tokens=8, logprobs=2, prompt_logprobs=1))
    for row in measure_reads(pair.spec(3).replaced(dtype="float64"), config):
        assert row["mixed_places"] == [] and row["stages"]["stage 3"] > 1


def test_what_is_over_budget_is_named_and_bad_numbers_are_refused() -> None:
    config = {"method": "pipedec", "requests": 2}
    row = {"config": config, "rank_0": 4.5, "budget": 4.0, "stages": {"stage 1": 2.5}, "stage_budget": 2.0, "mixed": 3}
    assert over_budget(row) == [
        "pipedec with 2 requests: rank 0 reads 4.5 times per timestep",
        "pipedec with 2 requests: stage 1 reads 2.5 times",
        "pipedec with 2 requests: 3 operations on tensors of host and device",
    ]
    with pytest.raises(UserError, match="--requests must be at least 1"):
        ReadsConfig(("pp",), (0,), "Hello")
