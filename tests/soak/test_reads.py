"""Counting what the host reads from a device, and the budgets of rank 0 and the stages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from support.counted_device import DEVICE, CountedDevice
from support.tiny_pair import Pair

from pipedec.core.errors import UserError
from pipedec.core.sampling import SamplingParams, StructuredOutputs
from pipedec.methods import METHOD_NAMES
from soak.reads import ReadsConfig, measure_reads, over_budget


def test_reads_are_counted_for_who_works_and_tensors_of_host_and_device_do_not_meet() -> None:
    device = CountedDevice()
    with device:
        values, on_host = torch.arange(4, device=DEVICE), torch.arange(4)
        assert values.device == DEVICE and values.cpu().device == torch.device("cpu") != DEVICE
        cases: dict[str, list[Callable[[], object]]] = {
            "reads": [
                values.tolist, values.numpy, values.nonzero, values.unique, values[0].item, (values > 0).any().__bool__,
                values.topk(2).values.tolist, (values.view(2, 2).sum(1) + 1)[:1].tolist, lambda: torch.where(values > 0),
                lambda: values[values > 0], lambda: values.__setitem__(values > 0, 1), lambda: values.repeat_interleave(values),
                lambda: values.to(device="cpu", dtype=torch.float32),
            ],
            "alone": [
                lambda: (values + 1) * 2 > values, lambda: values[values], lambda: values[on_host], lambda: values.copy_(on_host),
                lambda: torch.where(values > 0, values, 0), lambda: values.masked_fill(values > 0, torch.tensor(1)),
            ],
            "mixes": [
                lambda: values + on_host, lambda: torch.cat((on_host, values)), lambda: on_host.gather(0, values),
                lambda: values.__setitem__(values.clone(), on_host),
            ],
        }  # fmt: skip
        for who, works in cases.items():
            with device.working(who):
                for work in works:
                    work()
    reads, mixed = (Counter(who for who, _ in found.elements()) for found in (device.reads, device.mixed))
    assert reads - Counter({"": 1}) == {"reads": len(cases["reads"])} and mixed == {"mixes": len(cases["mixes"])}


SAMPLING = {
    "greedy": SamplingParams(max_tokens=12),
    "drawn": SamplingParams(0.8, top_k=40, top_p=0.9, min_p=0.01, seed=3, max_tokens=12),
    "penalties": SamplingParams(0.8, seed=3, max_tokens=12, repetition_penalty=1.2, frequency_penalty=0.3, logit_bias={5: 2.0}),
    "structured": SamplingParams(max_tokens=12, structured_outputs=StructuredOutputs(regex="[a-z ]{30}")),
}


@pytest.mark.fast_cases
@pytest.mark.slow
@pytest.mark.in_turn(2)
@pytest.mark.parametrize("kind", SAMPLING)
def test_every_method_keeps_to_its_budget(pair: Pair, kind: str) -> None:
    config = ReadsConfig(METHOD_NAMES, (3,), "Natalia sold 12 clips in April.", SAMPLING[kind])
    rows = measure_reads(pair.spec(3).replaced(dtype="float64"), config)
    assert len(rows) == len(METHOD_NAMES)
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
    with pytest.raises(UserError, match=r"requests\[0\]: must be an integer \(at least 1\)"):
        ReadsConfig(("pp",), (0,), "Hello")
