"""Whatever else is in the pipeline, a request is computed as it is alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from bita_files import save_random_bita
from checkpoints import save_tiny
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from lane_scripts import LIKELY, MASKS, OPENERS, Script, run, sequences
from torch import Tensor
from toy_dialects import TEXTS

from pipedec.core import Opening, SamplingParams, Step, Update, UserError, Verdict
from pipedec.model import BitaWeights, ModelConfig, StageModel
from pipedec.stage import FinalStageWorker, StageWorker

CUT = [range(0, 1), range(1, 2), range(2, 3)]
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "window": ("mistral", {"sliding_window": 5}),
    "dynamic": ("llama", {"rope_parameters": {"rope_theta": 1000.0, "rope_type": "dynamic", "factor": 3.0},
                          "max_position_embeddings": 12}),
}  # fmt: skip


@dataclass(frozen=True)
class Target:
    path: Path
    bita: BitaWeights = field(repr=False)

    def workers(self, cut: list[range], dtype: torch.dtype, block: int, capacity: int | None = None) -> list[StageWorker]:
        config = ModelConfig.from_directory(self.path)
        return [self._worker(StageModel.load(self.path, layers, dtype, "cpu", config), block, capacity) for layers in cut]

    def _worker(self, model: StageModel, block: int, capacity: int | None) -> StageWorker:
        layers = slice(model.layers.start, model.layers.stop)
        model.attach(BitaWeights(self.bita.prompt[layers].to(model.dtype), self.bita.masks.to(model.dtype)))
        worker = (FinalStageWorker if model.is_last else StageWorker)(model, sequences)
        worker._pool = model.make_pool(block, capacity)
        return worker


@pytest.fixture(scope="module", params=MODELS)
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Target:
    family, changes = MODELS[request.param]
    path = tmp_path_factory.mktemp("target")
    save_tiny(family, path, layers=3, vocab=len(TEXTS), **changes)
    return Target(path, save_random_bita(path / "bita", path, MASKS))


def scripts() -> st.SearchStrategy[dict[str, Any]]:
    """Arguments of a script."""
    samplings = st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.0, 0.8]),
        seed=st.integers(0, 99),
        max_tokens=st.integers(1, 14),
        frequency_penalty=st.sampled_from([0.0, 0.5]),
        repetition_penalty=st.sampled_from([1.0, 1.01]),
        logprobs=st.sampled_from([None, 2]),
        logit_bias=st.sampled_from([LIKELY, LIKELY | OPENERS]),
    )
    return st.fixed_dictionaries(
        {
            "seed": st.integers(0, 10_000),
            "arrival": st.integers(0, 8),
            "chunks": st.lists(st.integers(1, 5), min_size=1, max_size=4),
            "sampling": samplings,
            "has_masks": st.booleans(),
            "has_threads": st.booleans(),
            "delay": st.integers(0, 2),
            "patience": st.sampled_from([0, 1, 3, 9, 20]),
        }
    )


def assert_equal(alone: Script, in_company: Script, tolerance: float) -> None:
    assert alone.verdicts == in_company.verdicts
    assert len(alone.seen) == len(in_company.seen)
    for one, other in zip(flat(alone.seen), flat(in_company.seen), strict=True):
        if isinstance(one, Tensor):
            assert isinstance(other, Tensor)
            torch.testing.assert_close(other, one, atol=tolerance, rtol=0)
        else:
            assert other == (pytest.approx(one, abs=1e-6) if isinstance(one, float) else one)


def flat(seen: list[object]) -> Iterator[object]:
    """Log-probabilities are compared one by one, as they are rounded."""
    for entry in seen:
        if isinstance(entry, Update):
            yield from (entry.number, entry.verdict, *(value for token in entry.logprobs for pair in token for value in pair))
        else:
            yield entry


@examples(60)
@given(drawn=st.lists(scripts(), min_size=2, max_size=5), block=st.sampled_from([3, 16]), reserved=st.sampled_from([0, 50]))
def test_a_request_in_company_is_computed_as_it_is_alone(
    target: Target, drawn: list[dict[str, Any]], block: int, reserved: int
) -> None:
    together = [Script(number, **arguments) for number, arguments in enumerate(drawn)]
    workers = target.workers(CUT, torch.float64, block)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pipedec.stage.worker.MOST_RESERVED", reserved)
        run(workers, together)
        assert [(worker.num_lanes, worker._pool.used_slots) for worker in workers] == [(0, 0)] * len(CUT)
        for number, arguments in enumerate(drawn):
            alone = Script(number, **arguments)
            run(target.workers(CUT, torch.float64, block), [alone])
            assert_equal(alone, together[number], 1e-12)


def many(count: int, max_tokens: int = 12) -> list[Script]:
    """Requests of every kind, which arrive over eight timesteps."""
    return [
        Script(
            number=number, seed=number, arrival=number % 8, chunks=[3, 1 + number % 4], has_masks=number % 3 == 0,
            has_threads=number % 4 == 1, delay=number % 3, patience=5 if number % 7 == 6 else 60,
            sampling=SamplingParams(
                temperature=0.8 * (number % 2), seed=number, max_tokens=max_tokens + number % 20,
                logit_bias=LIKELY | OPENERS if number % 4 == 1 else LIKELY,
            ),
        )
        for number in range(count)
    ]  # fmt: skip


def test_the_scripts_fork_hit_and_end_in_every_way(target: Target) -> None:
    """What the comparisons see, and that rows of all requests are computed in one forward."""
    together, workers = many(28), target.workers(CUT, torch.float64, 4)
    widest = 0

    def watch() -> None:
        nonlocal widest
        widest = max(widest, workers[0].num_lanes)
        own = [lane._cache for lane in workers[0]._lanes.values()]
        slots = [slot for cache in own for slot in range(cache.start - cache.prompt_length, cache.start + cache.slots)]
        assert len(set(slots)) == len(slots)

    run(workers, together, watch)
    verdicts = [verdict for script in together for verdict in script.verdicts]
    assert {verdict.finished for verdict in verdicts} == {None, "stop", "length", "cancelled"}
    assert max(len(part.tokens) for verdict in verdicts for part in verdict.accepted) > 1
    assert any(part.forecast for verdict in verdicts for part in verdict.accepted)
    assert any(part.thread > 0 for verdict in verdicts for part in verdict.accepted)
    assert widest > 15


def test_rows_of_all_requests_are_one_forward(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    [worker] = target.workers([range(3)], torch.float64, 8)
    opening, counts = Opening(2, SamplingParams()), list[int]()
    forward = worker._model.forward
    monkeypatch.setattr(worker._model, "forward", lambda inputs, lanes: counts.append(len(inputs)) or forward(inputs, lanes))
    for number in range(5):
        worker.open(number, opening)
    chunk = Step(torch.tensor([4, 5]), torch.tensor([-1, -1]))
    steps = dict.fromkeys(range(7), chunk)
    assert worker.load(steps) == (10, 0)
    worker.compute(steps)
    assert counts == [10], "numbers 5 and 6 are unknown"
    results = worker.results()
    assert [update.number for update in results] == list(range(5)) and worker.results() == ()
    for update in results:
        assert update.verdict is not None
        worker.sync(update.number, update.verdict)
    worker.sync(3, Verdict(finished="cancelled"))
    token = results[0].verdict.tokens[0] if results[0].verdict else 0
    root = Step(torch.tensor([token]), torch.tensor([-1]))
    assert worker.load({0: root, 3: root}) == (1, 2)
    worker.compute({0: root, 3: root})
    assert counts == [10, 1] and [update.number for update in worker.results()] == [0]


def test_a_full_pool_is_reported(target: Target) -> None:
    [worker] = target.workers([range(3)], torch.float64, 8, capacity=16)
    opening = Opening(8, SamplingParams(max_tokens=1))
    with pytest.raises(UserError, match="KV cache is full"):
        for number in range(3):
            worker.open(number, opening)
    assert worker.num_lanes == 1
