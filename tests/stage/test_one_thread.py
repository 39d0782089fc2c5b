"""An answer that cannot fork is computed as one that may but does not; a timestep in one call is one in its parts."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from support.bita_files import save_random_bita
from support.checkpoints import save_tiny
from support.driven_stage import DrivenStage
from support.examples import examples
from support.kv_caches import read_cache
from torch import Tensor

from pipedec.core import NewRequest, RequestUpdate, SamplingParams, StageMessage, Step, Verdict
from pipedec.families import model_config
from pipedec.model import BitaWeights, StageModel
from pipedec.stage import FinalStageWorker, StageWorker
from pipedec.threads import NewSequence, Sequence, ThreadedSequence
from pipedec.threads.dialect import NO_DIALECT

PROMPT = [1, 9, 30, 4, 51, 7]
WORDS = 3  # the tokens that are said, besides END
MASKS, TOKENS_PER_MASK = 2, 3
END = 3
LIKELY = {**{token: 100.0 for token in range(WORDS)}, END: 98.5}
SAMPLINGS = {
    "greedy": SamplingParams(logit_bias=LIKELY),
    "drawn": SamplingParams(temperature=1.0, seed=5, logit_bias=LIKELY, logprobs=2),
    "penalised": SamplingParams(temperature=0.7, seed=8, logit_bias=LIKELY, frequency_penalty=0.5, repetition_penalty=1.01),
}
TokenPath = tuple[int, ...]
NUMBER = 3
SLOTS = 512
Through = Callable[[list[StageWorker], RequestUpdate], tuple[RequestUpdate | None, list[Step | None]]]


def alone(max_tokens: int) -> Sequence:
    return Sequence(len(PROMPT), (END,), max_tokens)


def among_none(max_tokens: int) -> Sequence:
    """It might fork, for all that the forest knows, but nothing ever opens a thread."""
    sequence = ThreadedSequence(replace(NO_DIALECT), len(PROMPT), (END,), max_tokens)
    assert sequence.can_fork
    return sequence


@dataclass(frozen=True)
class Target:
    path: Path
    bita: BitaWeights = field(repr=False)

    def workers(self, cut: list[range], with_masks: bool, new_sequence: Callable[[int], Sequence]) -> list[StageWorker]:
        config, workers = model_config(self.path), list[StageWorker]()
        for layers in cut:
            model = StageModel.load(self.path, layers, torch.float64, "cpu", config)
            if with_masks:
                model.attach(BitaWeights(self.bita.prompt[layers.start : layers.stop].double(), self.bita.masks.double()))
            workers.append((FinalStageWorker if model.is_last else StageWorker)(model, opened(new_sequence), slots=SLOTS))
        return workers


def opened(new_sequence: Callable[[int], Sequence]) -> Callable[[NewRequest], NewSequence]:
    return lambda opening: lambda: new_sequence(opening.sampling.max_tokens)


@pytest.fixture(scope="module", params=["llama", "mistral"])
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Target:
    path = tmp_path_factory.mktemp("target")
    save_tiny(request.param, path, layers=3, **({"sliding_window": 5} if request.param == "mistral" else {}))
    return Target(path, save_random_bita(path / "bita", path, MASKS))


def in_one_call(workers: list[StageWorker], update: RequestUpdate) -> tuple[RequestUpdate | None, list[Step | None]]:
    """The last stage's result, and what leaves each stage."""
    moving, envelope = list[Step | None](), StageMessage((update,))
    for worker in workers[:-1]:
        envelope = worker.advance(envelope)
        assert [(passed.number, passed.verdict) for passed in envelope.updates] == [(update.number, update.verdict)]
        moving.append(envelope.updates[0].step)
    results = workers[-1].advance(envelope).updates
    if update.verdict is not None and update.verdict.finished:
        assert results == (RequestUpdate(update.number, verdict=Verdict((), update.verdict.finished)),), (
            "the lane is closed everywhere"
        )
        return None, [*moving, None]
    return (results[0] if results else None), [*moving, None]


def in_parts(workers: list[StageWorker], update: RequestUpdate) -> tuple[RequestUpdate | None, list[Step | None]]:
    steps = {} if update.step is None else {update.number: update.step}
    moving, results = list[Step | None](), tuple[RequestUpdate, ...]()
    for worker in map(DrivenStage, workers):
        if update.opening is not None:
            worker.open(update.number, update.opening)
        if update.verdict is not None:
            worker.sync(update.number, update.verdict)
        worker.compute(steps)
        results = worker.results()
        steps = worker.outgoing()
        moving.append(steps.get(update.number))
    return (results[0] if results else None), moving


@dataclass
class Rank0:
    """Proposes children of any rows, with groups of masks behind some of them. Rows are paths of the answer's tokens."""

    rng: random.Random
    with_masks: bool
    said: TokenPath = ()
    rows: list[TokenPath] = field(default_factory=list)

    def apply(self, verdict: Verdict) -> None:
        self.said += verdict.tokens
        self.rows = [path for path in self.rows if path[: len(self.said)] == self.said]

    def propose(self) -> Step | None:
        if not self.rows:
            new = [self.said]
        else:
            new = list[TokenPath]()
            for _ in range(self.rng.randrange(10)):
                plain = [path for path in self.rows if path[-1] >= 0] + new
                path = (*self.rng.choice(plain), self.rng.randrange(WORDS))
                new += [] if path in plain else [path]
        masks = [(*path, *range(-1, -count - 1, -1)) for path in new for count in range(1, MASKS + 1)] if self.with_masks else []
        self.rows += [*new, *masks]
        if not new:
            return None
        token_ids = torch.tensor([path[-1] for path in (*new, *masks)])
        known = {path: row for row, path in enumerate(self.rows)}
        return Step(token_ids, torch.tensor([known.get(path[:-1], -1) for path in (*new, *masks)]))


def prefill(workers: list[StageWorker], opening: NewRequest, through: Through) -> RequestUpdate:
    after = range(-1, -MASKS - 1, -1) if opening.tokens_per_mask else ()
    for number, chunk in enumerate((PROMPT[:4], [*PROMPT[4:], *after])):
        step = Step(torch.tensor(chunk), torch.full((len(chunk),), -1))
        result, _ = through(workers, RequestUpdate(NUMBER, opening if number == 0 else None, step=step))
        assert (result is not None) == (number == 1)
    assert result is not None
    return result


def transcript(
    target: Target, cut: list[range], new_sequence: Callable[[int], Sequence], sampling: SamplingParams, seed: int,
    with_masks: bool, delay: int, through: Through = in_one_call,
) -> list[object]:  # fmt: skip
    """All that there is to see of an answer. Rank 0 learns a verdict ``delay`` timesteps after it fell."""
    workers = target.workers(cut, with_masks, new_sequence)
    opening = NewRequest(len(PROMPT), sampling, TOKENS_PER_MASK if with_masks else 0, slots=((0, SLOTS),))
    rank0, seen = Rank0(random.Random(seed), with_masks), list[object]()
    results: deque[RequestUpdate | None] = deque([prefill(workers, opening, through), *[None] * delay])
    for _ in range(24):
        result = results.popleft()
        verdict = None if result is None else result.verdict
        if verdict is not None:
            rank0.apply(verdict)
        step = rank0.propose()
        reply, moving = through(workers, RequestUpdate(NUMBER, verdict=verdict, step=step))
        seen += [verdict, reply and reply.verdict, reply and reply.logprobs]
        if verdict is not None and verdict.finished:
            assert reply is None and moving == [None] * len(workers)
            assert [worker.num_lanes for worker in workers] == [0] * len(workers)
            return seen
        results.append(reply)
        seen += [part for moved in moving for part in tensors_of(moved)]
        seen += [part for worker in workers for part in state_of(worker)]
        if step is None:
            seen.append("nothing entered")
    return seen


def tensors_of(step: Step | None) -> list[object]:
    return [None] if step is None else [step.token_ids, step.parents, step.hidden]


def state_of(worker: StageWorker) -> list[object]:
    """Rows, their attention masks over all slots, and the cache."""
    lane = worker._lanes[NUMBER]
    forest, cache = lane.forest, lane.cache
    visibility = forest.visibility(slice(0, forest.num_rows))
    shared = torch.ones(forest.num_rows, visibility.shared, dtype=torch.bool)
    positions = torch.cat((torch.arange(visibility.shared), visibility.slot_positions()))
    rows = [forest.token_ids.clone(), forest.parents.clone(), forest.positions_of(slice(None))]
    kept = [torch.stack(read_cache(cache, layer, with_prompt=True)) for layer in range(len(worker._model.layers))]
    return [*rows, torch.cat((shared, visibility.seen), 1), positions, cache.past_length, *kept]


def assert_equal(one: list[object], other: list[object]) -> None:
    assert len(one) == len(other)
    for first, second in zip(one, other, strict=True):
        if isinstance(first, Tensor):
            assert isinstance(second, Tensor) and torch.equal(first, second)
        else:
            assert first == second


CUT = [range(0, 1), range(1, 2), range(2, 3)]


@pytest.mark.parametrize("with_masks", [False, True], ids=["", "masks"])
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@examples(12)
@given(seed=st.integers(0, 10_000), delay=st.integers(0, 2), max_tokens=st.sampled_from([5, 100]))
def test_the_shortcut_of_one_thread_changes_nothing(
    target: Target, sampling: SamplingParams, with_masks: bool, seed: int, delay: int, max_tokens: int
) -> None:
    sampling = structs.replace(sampling, max_tokens=max_tokens)
    short, general = (
        transcript(target, CUT, new_sequence, sampling, seed, with_masks, delay) for new_sequence in (alone, among_none)
    )
    assert_equal(short, general)


@examples(20)
@given(seed=st.integers(0, 10_000), delay=st.integers(0, 2), with_masks=st.booleans())
def test_a_timestep_is_its_parts(target: Target, seed: int, delay: int, with_masks: bool) -> None:
    sampling = SAMPLINGS["drawn"]
    whole, parts = (
        transcript(target, CUT, alone, sampling, seed, with_masks, delay, through) for through in (in_one_call, in_parts)
    )
    assert_equal(whole, parts)


def test_answers_of_the_transcripts_hit_and_end(target: Target) -> None:
    """The comparisons above see verdicts of several tokens, rows that stay, and both ends of an answer."""
    verdicts = list[Verdict]()
    for seed in range(12):
        sampling = structs.replace(SAMPLINGS["drawn"], seed=seed, max_tokens=5 if seed % 2 else 100)
        seen = transcript(target, [range(3)], alone, sampling, seed, True, seed % 3)
        verdicts += [entry for entry in seen if isinstance(entry, Verdict)]
    finished = {verdict.finished for verdict in verdicts}
    assert finished == {None, "stop", "length"}
    assert max(len(verdict.tokens) for verdict in verdicts) > 2
    assert any(verdict.accepted and verdict.accepted[0].forecast for verdict in verdicts)
