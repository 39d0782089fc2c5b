"""Stages without layers, and a rank 0 whose proposals are always accepted: what remains of a timestep is its fixed cost.

They run in the real ``StageLoop`` and ``DraftLoop``: queue, tasks, messages, transfers and the stages' workers are real.
There are neither models nor trees: their cost depends on how much is speculated.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from types import SimpleNamespace
from typing import cast

import torch
from torch import Tensor

from pipedec.core import (
    EMPTY,
    MethodOptions,
    NewRequest,
    Request,
    RequestUpdate,
    SamplingParams,
    SchedulerLost,
    StageMessage,
    Step,
    Verdict,
)
from pipedec.decoding import Batch, TimestepTiming
from pipedec.engine.admission import Admission
from pipedec.engine.answer import RunningAnswer
from pipedec.engine.draft_loop import DraftLoop
from pipedec.engine.rank_tasks import Wiring
from pipedec.model import KVCache, KVPool, KVShape, LaneRows, StageModel
from pipedec.scheduler import ClientScheduler, GrantedTask
from pipedec.scheduler.protocol import RankMessage
from pipedec.stage import FinalStageWorker, StageWorker
from pipedec.stage.final import FinalLane
from pipedec.text.prompt import Prompter
from pipedec.threads import NewSequence, replay
from pipedec.threads import Sequence as ThreadSequence
from pipedec.tree import Forest

_TOKEN = 7
_SLOTS = 2**20  # of pools that take no memory
_QUEUE_SECONDS = 10.0


class _NoLayers:
    """Stands in for a ``StageModel`` (see ``no_layers``)."""

    config = SimpleNamespace(vocab_size=1)

    def __init__(self, hidden_size: int) -> None:
        self._hidden_size = hidden_size
        self._zeros: dict[int, Tensor] = {}  # by number of rows

    def make_pool(self, slots: int, block: int) -> KVPool:
        return _EmptyPool(KVShape(num_layers=0, num_kv_heads=0, head_dim=0, dtype=torch.float32), slots, block)

    def forward(self, inputs: Tensor, lanes: Sequence[LaneRows]) -> Tensor:
        for lane in lanes:
            lane.append()
        rows = len(inputs)
        if rows not in self._zeros:
            self._zeros[rows] = torch.zeros(rows, self._hidden_size)
        return self._zeros[rows]


def no_layers(hidden_size: int = 1) -> StageModel:
    """A model of no layers, whose activations are zeros, [R, ``hidden_size``]."""
    return cast(StageModel, _NoLayers(hidden_size))


class _EmptyPool(KVPool):
    """Any number of slots that hold nothing."""

    def copy(self, sources: Sequence[int], targets: Iterable[range]) -> None:
        """There is nothing to copy."""


def sequence_of(opening: NewRequest, max_tokens: int = sys.maxsize) -> NewSequence:
    """Makes sequences that begin with the output of ``opening`` and end after ``max_tokens`` tokens."""

    def new_sequence() -> ThreadSequence:
        sequence = ThreadSequence(opening.prompt_length, (), max_tokens)
        replay(sequence, opening.output_token_ids)
        return sequence

    return new_sequence


class Probe:
    """Records clocks and Redis commands of one rank at each sync with a verdict of the current request, the prefill's first."""

    def __init__(self, round_trips: Callable[[], int]) -> None:
        self._round_trips = round_trips
        self.reset()

    def reset(self) -> None:
        """Start a new request."""
        self.wall_seconds: list[float] = []
        self.cpu_seconds: list[float] = []
        self.round_trips: list[int] = []

    def note(self) -> None:
        """Called at each sync."""
        self.wall_seconds.append(time.perf_counter())
        self.cpu_seconds.append(time.process_time())
        self.round_trips.append(self._round_trips())


class _NullLane(FinalLane):
    """A lane without trees: it keeps count of rows, and prunes none. It accepts a token per timestep until ``max_tokens``."""

    def __init__(self, opening: NewRequest, cache: KVCache) -> None:
        self.cache = cache
        self.forest = Forest(ThreadSequence(opening.prompt_length, (), opening.sampling.max_tokens))
        self._left = opening.sampling.max_tokens

    def enter(self, step: Step) -> LaneRows:
        return LaneRows(step.token_ids, self.cache)

    def sync(self, verdict: Verdict) -> None:
        """Nothing is pruned."""

    def result(self, number: int, token_ids: list[int]) -> RequestUpdate:
        self._left -= 1
        self.has_ended = self._left == 0
        return RequestUpdate(number, verdict=Verdict.of(_TOKEN, finished="length" if self.has_ended else None))


class NullStage(StageWorker):
    """A stage without layers and trees; activations are zeros [R, E]. ``on_finished`` is called at each request's last sync."""

    def __init__(self, stage: int, hidden_size: int, probe: Probe, on_finished: Callable[[], None]) -> None:
        super().__init__(no_layers(hidden_size), sequence_of, slots=_SLOTS, stage=stage)
        self._probe = probe
        self._on_finished = on_finished

    def replay(self, updates: Iterable[RequestUpdate], waiting: StageMessage = EMPTY) -> StageMessage:
        waiting = super().replay(updates, waiting)
        for update in updates:
            if update.opening is not None:
                self._probe.reset()
            if update.verdict is not None:
                self._probe.note()
                if update.verdict.finished is not None:
                    self._on_finished()
        return waiting

    def _new_lane(self, number: int, opening: NewRequest, cache: KVCache) -> FinalLane:
        return _NullLane(opening, cache)


class NullFinalStage(NullStage, FinalStageWorker):
    """The last stage."""

    def _judge(self, computed: list[tuple[FinalLane, Tensor]], is_finite: bool) -> list[list[int]]:
        """Every lane knows its tokens."""
        return [[] for _ in computed]


class ScriptedOptions(MethodOptions, frozen=True):
    """Rows that enter at every timestep."""

    rows: int = 1


class ScriptedBatch:
    """The prompt's only token of each request enters, then its number of rows at every timestep; verdicts change nothing."""

    def __init__(self, probe: Probe) -> None:
        self.requests: dict[int, SimpleNamespace] = {}
        self._probe = probe
        self._next: dict[int, RequestUpdate] = {}
        self._rows: dict[int, RequestUpdate] = {}

    def open(self, request: Request, new_sequence: NewSequence) -> None:
        assert isinstance(request.options, ScriptedOptions)
        opening = NewRequest(len(request.prompt_token_ids), request.sampling, trace=request.trace, slots=((0, _SLOTS),))
        self.requests[request.number] = SimpleNamespace(hits=0, misses=0)  # which a pool reads at its end
        self._next[request.number] = RequestUpdate(request.number, opening, step=_step(1))
        self._rows[request.number] = RequestUpdate(request.number, step=_step(request.options.rows))

    def to_pause(self) -> list[int]:
        return []

    def apply(self, number: int, verdict: Verdict) -> None:
        self._probe.note()
        if verdict.finished is not None:
            self.close(number)

    def close(self, number: int) -> None:
        del self.requests[number], self._next[number], self._rows[number]

    def propose(self) -> dict[int, RequestUpdate]:
        updates, self._next = self._next, dict(self._rows)
        return updates

    def draft(self) -> None:
        """There is no draft."""

    def observe(self, timing: TimestepTiming) -> None:
        """Timestep timing is not used."""


def _step(num_rows: int) -> Step:
    return Step(torch.full((num_rows,), _TOKEN), torch.full((num_rows,), -1))


class OneWordPrompter:
    """A detokenizer in which every token is the same word."""

    def stream(self) -> OneWordPrompter:
        return self

    def add(self, tokens: Sequence[int]) -> str:
        return " word" * len(tokens)

    text = add

    def finish(self) -> str:
        return ""


class ScriptedAdmission:
    """Makes answers of requests that contain how many rows enter and how many tokens are accepted."""

    def __init__(self, num_stages: int) -> None:
        self._num_stages = num_stages

    def admit(self, message: RankMessage, batch: Batch) -> tuple[RunningAnswer, NewSequence]:
        asked = json.loads(message.text)
        sampling, options = SamplingParams(max_tokens=asked["max_tokens"]), ScriptedOptions(asked["rows"])
        request = Request(message.number, (_TOKEN,), sampling, "scripted", options, trace=asked["trace"])
        prompter = cast(Prompter, OneWordPrompter())
        new_sequence = partial(ThreadSequence, 1, (), sampling.max_tokens)
        return RunningAnswer(request, new_sequence, prompter, self._num_stages), new_sequence


class ScriptedDraftLoop(DraftLoop):
    """Rank 0 without a draft model and a tokenizer, which submits its requests itself."""

    def __init__(self, probe: Probe, client: ClientScheduler, wiring: Wiring) -> None:
        admission = cast(Admission, ScriptedAdmission(wiring.topology.num_stages))
        super().__init__(wiring, admission, Batch(wiring.topology.num_groups))
        self._client = client
        self._batch = self._pool.batch = cast(Batch, ScriptedBatch(probe))
        self._probe = probe

    def serving(self) -> AbstractContextManager[None]:
        """The context in which ``run_scripted`` may be called."""
        return self._queue.serving()

    def run_scripted(self, num_rows: int, max_tokens: int, trace: bool = False) -> list[GrantedTask]:
        """Run one request of ``max_tokens`` verdicts; returns the scheduler's trace of it if ``trace``.

        Raises PipedecError if the run was aborted, or a rank or Redis was lost.
        """
        self._probe.reset()
        self._client.submit(json.dumps({"rows": num_rows, "max_tokens": max_tokens, "trace": trace}))
        message = self._queue.wait(_QUEUE_SECONDS)
        if message is None or message.kind != "request":
            raise SchedulerLost("the request that was submitted has not arrived")
        self._admit(message)
        self._decode()
        return self._wiring.scheduler.trace() if trace else []
