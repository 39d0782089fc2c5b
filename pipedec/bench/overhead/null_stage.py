"""Stages that compute nothing, and a rank 0 whose proposals are always accepted: what remains of a timestep is its fixed cost.

They run in the real ``StageLoop`` and ``DraftLoop``: queue, tasks, messages, transfers and the lanes of stages are real;
the models and the method are not.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import cast

import torch

from pipedec.core import (
    EMPTY,
    NO_MASKS,
    Envelope,
    MethodOptions,
    Opening,
    Request,
    SamplingParams,
    SchedulerLost,
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
from pipedec.scheduler.protocol import Message
from pipedec.stage import StageWorker
from pipedec.stage.fakes import AnsweringStage, KnownAnswer, PassingStage
from pipedec.text.prompt import Prompter
from pipedec.threads import NewSequence, single_thread

_TOKEN, _WRONG_TOKEN = 7, 8
_SLOTS = 2**20  # of pools that take no memory
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


class _Probed(StageWorker):
    """A stage whose syncs with verdicts are noted. ``on_finished`` is called at the last one of each request."""

    probe: Probe
    on_finished: Callable[[], None]

    def replay(self, updates: Iterable[Update], waiting: Envelope = EMPTY) -> Envelope:
        waiting = super().replay(updates, waiting)
        for update in updates:
            if update.opening is not None:
                self.probe.reset()
            if update.verdict is not None:
                self.probe.note()
                if update.verdict.finished is not None:
                    self.on_finished()
        return waiting


class _NullStage(_Probed, PassingStage):
    """Not the last one."""


class _NullFinalStage(_Probed, AnsweringStage):
    """Accepts one token per request and timestep until ``max_tokens``."""


def null_stage(stage: int, is_last: bool, hidden_size: int, probe: Probe, on_finished: Callable[[], None]) -> StageWorker:
    """A stage that computes nothing. ``on_finished`` is called at the last sync of each request."""
    worker: _Probed
    if is_last:
        worker = _NullFinalStage(_answer, _SLOTS, stage=stage)
    else:
        worker = _NullStage(_SLOTS, stage=stage, hidden_size=hidden_size)
    worker.probe, worker.on_finished = probe, on_finished
    return worker


def _answer(number: int, opening: Opening) -> KnownAnswer:
    return KnownAnswer([_TOKEN] * opening.sampling.max_tokens)


class ScriptedOptions(MethodOptions, frozen=True):
    """Rows that enter at every timestep."""

    rows: int = 1


class ScriptedMethod:
    """What a company and a reader of answers ask a method for."""

    masks = NO_MASKS
    has_drafter = False
    hits = misses = 0


@dataclass
class _Rows:
    """The rows of a request: at every timestep the answer's next token, and others, which are wrong, so that each is a hit.

    Attributes:
        count: rows per timestep.
        path: the tree's rows with tokens of the answer, from the root on.
    """

    count: int
    path: list[int] = field(default_factory=list)
    _num_rows: int = 0  # of the tree

    def next(self) -> Step:
        token_ids = torch.full((self.count,), _WRONG_TOKEN)
        token_ids[-1 if self.path else 0] = _TOKEN
        parents = torch.full((self.count,), self.path[-1] if self.path else 0)
        if not self.path:
            parents[0] = -1
        self.path.append(self._num_rows + self.count - 1 if self.path else 0)
        self._num_rows += self.count
        return Step(token_ids, parents)

    def accept(self) -> None:
        """One token was accepted: the rows before its own, which is the last of its timestep, leave the tree."""
        first = self.path[1] if len(self.path) > 1 else self._num_rows
        self.path = [row - first for row in self.path[1:]]
        self._num_rows -= first


class ScriptedCompany:
    """Of each request the prompt's only token enters, and behind the first verdict so many rows at every timestep."""

    def __init__(self, probe: Probe) -> None:
        self._probe = probe
        self._opening: dict[int, Update] = {}
        self._rows: dict[int, _Rows] = {}  # of requests whose prompt has passed
        self._counts: dict[int, int] = {}  # rows per timestep

    def open(self, request: Request, new_sequence: NewSequence) -> None:
        assert isinstance(request.options, ScriptedOptions)
        opening = Opening(len(request.prompt_token_ids), request.sampling, trace=request.trace, slots=((0, _SLOTS),))
        self._opening[request.number] = Update(request.number, opening, step=_Rows(1).next())
        self._counts[request.number] = request.options.rows

    def method(self, number: int) -> ScriptedMethod:
        return ScriptedMethod()

    def to_pause(self) -> list[int]:
        return []

    def apply(self, number: int, verdict: Verdict) -> None:
        self._probe.note()
        if verdict.finished is not None:
            self.close(number)
        elif number in self._rows:
            self._rows[number].accept()
        else:
            self._rows[number] = _Rows(self._counts[number])

    def close(self, number: int) -> None:
        del self._counts[number]
        self._rows.pop(number, None)

    def propose(self) -> dict[int, Update]:
        opening, self._opening = self._opening, {}
        return opening | {number: Update(number, step=rows.next()) for number, rows in self._rows.items()}

    def draft(self) -> None:
        """There is no draft."""

    def observe(self, timing: TimestepTiming) -> None:
        """Timestep timing is not used."""


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

    def __init__(self, probe: Probe, wiring: Wiring) -> None:
        super().__init__(cast(Prompter, OneWordPrompter()), None, 0, wiring)
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
        scheduler = self._wiring.scheduler
        scheduler.submit(json.dumps({"rows": num_rows, "max_tokens": max_tokens, "trace": trace}))
        message = self._queue.wait(_QUEUE_SECONDS)
        if message is None or message.kind != "request":
            raise SchedulerLost("the request that was submitted has not arrived")
        self._admit(message)
        self._decode()
        return scheduler.trace() if trace else []
