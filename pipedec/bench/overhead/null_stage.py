"""Stages that compute nothing, and a rank 0 whose proposals are always accepted: what remains of a timestep is its fixed cost.

They run in the real ``StageLoop`` and ``DraftLoop``: queue, tasks, messages and transfers are real, only the models are not.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import cast

import torch
from torch import Tensor

from pipedec.core import (
    NO_MASKS,
    Load,
    MethodOptions,
    Opening,
    Request,
    SamplingParams,
    SchedulerLost,
    SlotRuns,
    Step,
    Update,
    Verdict,
)
from pipedec.decoding import Company, TimestepTiming
from pipedec.engine.admission import Admission
from pipedec.engine.answer import Answer
from pipedec.engine.draft_loop import DraftLoop
from pipedec.engine.pool import Pool
from pipedec.engine.rank_tasks import Wiring
from pipedec.scheduler import GrantedTask
from pipedec.scheduler.protocol import ClientCalls, Message
from pipedec.stage import FinalStageWorker, StageWorker
from pipedec.text.prompt import Prompter
from pipedec.threads import NewSequence, single_thread

_TOKEN = 7
_QUEUE_SECONDS = 10.0


class Probe:
    """Records the clocks and the Redis commands of one rank at each sync with a verdict.

    Attributes:
        wall_seconds, cpu_seconds, round_trips: one entry per sync of the current request, starting with the prefill's.
    """

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


class NullStage(StageWorker):
    """A stage that passes on the rows it receives, without pruning any; its activations are zeros [R, E].

    ``on_finished`` is called at the last sync of each request.
    """

    def __init__(self, hidden_size: int, probe: Probe, on_finished: Callable[[], None]) -> None:
        self.rows = self.pruned_rows = 0  # are not counted
        self._hidden_size = hidden_size
        self._probe = probe
        self._on_finished = on_finished
        self._zeros: dict[int, Tensor] = {}
        self._rows: dict[int, Step] = {}  # computed and not passed on, by request
        self._left: dict[int, int] = {}  # tokens of each open request that have yet to be accepted

    @property
    def num_lanes(self) -> int:
        return len(self._left)

    @property
    def cache_slots(self) -> int:
        return 0

    def reset(self) -> None:
        self._rows.clear()
        self._left.clear()

    def open(self, number: int, opening: Opening) -> None:
        self._probe.reset()
        self._left[number] = opening.sampling.max_tokens

    def extend(self, number: int, slots: SlotRuns) -> None:
        """There is no cache."""

    def sync(self, number: int, verdict: Verdict) -> None:
        if number not in self._left:
            return
        self._probe.note()
        if verdict.finished:
            del self._left[number]
            self._on_finished()

    def compute(self, steps: Mapping[int, Step]) -> None:
        for number, step in self._valid(steps).items():
            if step.num_rows not in self._zeros:
                self._zeros[step.num_rows] = torch.zeros(step.num_rows, self._hidden_size)
            self._rows[number] = Step(step.token_ids, step.parents, self._zeros[step.num_rows])

    def outgoing(self) -> dict[int, Step]:
        computed, self._rows = self._rows, {}
        return computed

    def load(self, steps: Mapping[int, Step]) -> Load:
        return Load(sum(step.num_rows for step in steps.values()))

    def _valid(self, steps: Mapping[int, Step]) -> dict[int, Step]:
        return {number: step for number, step in steps.items() if number in self._left}


class NullFinalStage(NullStage, FinalStageWorker):
    """The last stage: accepts one token per request and timestep until ``max_tokens``."""

    def outgoing(self) -> dict[int, Step]:
        return {}

    def results(self) -> tuple[Update, ...]:
        computed, self._rows = self._rows, {}
        return tuple(self._accept(number) for number in computed if self._left.get(number))

    def _accept(self, number: int) -> Update:
        self._left[number] -= 1
        return Update(number, verdict=Verdict.of(_TOKEN, finished=None if self._left[number] else "length"))


class ScriptedOptions(MethodOptions, frozen=True):
    """Rows that enter at every timestep."""

    rows: int = 1


class ScriptedMethod:
    """What a company and a reader of answers ask a method for."""

    masks = NO_MASKS
    has_drafter = False
    hits = misses = 0


class ScriptedCompany:
    """Of each request the prompt's only token enters, then at every timestep so many rows; verdicts change nothing."""

    whole_prompts = False

    def __init__(self, probe: Probe) -> None:
        self._probe = probe
        self._next: dict[int, Update] = {}
        self._rows: dict[int, Update] = {}

    def open(self, request: Request, new_sequence: NewSequence) -> None:
        assert isinstance(request.options, ScriptedOptions)
        opening = Opening(len(request.prompt_token_ids), request.sampling, trace=request.trace)
        self._next[request.number] = Update(request.number, opening, step=_step(1))
        self._rows[request.number] = Update(request.number, step=_step(request.options.rows))

    def method(self, number: int) -> ScriptedMethod:
        return ScriptedMethod()

    def to_pause(self) -> list[int]:
        return []

    def apply(self, number: int, verdict: Verdict) -> None:
        self._probe.note()
        if verdict.finished is not None:
            self.close(number)

    def close(self, number: int) -> None:
        del self._next[number], self._rows[number]

    def propose(self) -> dict[int, Update]:
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
    """Makes answers of requests that say how many rows enter, and how many tokens are accepted."""

    def __init__(self, num_stages: int) -> None:
        self._num_stages = num_stages

    def admit(self, message: Message, company: Company) -> tuple[Answer, NewSequence]:
        asked = json.loads(message.text)
        sampling, options = SamplingParams(max_tokens=asked["max_tokens"]), ScriptedOptions(asked["rows"])
        request = Request(message.number, (_TOKEN,), sampling, "scripted", options, trace=asked["trace"])
        prompter = cast(Prompter, OneWordPrompter())
        new_sequence = partial(single_thread, 1, (), sampling.max_tokens)
        return Answer(request, new_sequence, prompter, self._num_stages), new_sequence


class ScriptedDraftLoop(DraftLoop):
    """Rank 0 without a draft model and a tokenizer, which submits its requests itself."""

    def __init__(self, probe: Probe, client: ClientCalls, wiring: Wiring) -> None:
        super().__init__(cast(Prompter, OneWordPrompter()), None, 0, wiring)
        self._client = client
        self._company = cast(Company, ScriptedCompany(probe))
        self._pool = Pool(self._company)
        self._admission = cast(Admission, ScriptedAdmission(wiring.topology.num_stages))
        self._probe = probe

    @contextmanager
    def serving(self) -> Iterator[None]:
        """The context in which ``run_scripted`` may be called."""
        with self._queue.serving():
            yield

    def run_scripted(self, num_rows: int, max_tokens: int, trace: bool = False) -> list[GrantedTask]:
        """Run one request of ``max_tokens`` verdicts; returns the scheduler's trace of it if ``trace``.

        Raises:
            PipedecError: the run was aborted, or a rank or Redis was lost.
        """
        self._probe.reset()
        self._client.submit(json.dumps({"rows": num_rows, "max_tokens": max_tokens, "trace": trace}))
        message = self._queue.wait(_QUEUE_SECONDS)
        if message is None or message.kind != "request":
            raise SchedulerLost("the request that was submitted has not arrived")
        self._admit(message)
        self._decode()
        return self._wiring.scheduler.trace() if trace else []
