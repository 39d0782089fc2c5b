"""LocalPipeline: all stages in one process and one thread, without Redis. A cluster must give the same answers.

The simplest place to debug a method. Knows neither tokenizers nor transports.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Literal

import torch
from msgspec import structs

from pipedec.core.completion import Metrics
from pipedec.core.errors import RequestFailed, UserError
from pipedec.core.request import TokenizedRequest
from pipedec.core.sampling import check_sets_of_tokens
from pipedec.core.stage_message import EMPTY, NO_LOAD, Load, RequestUpdate, StageMessage
from pipedec.core.verdict import Verdict
from pipedec.decoding import Experience, LaneSizes, Scheduler, TimestepTiming
from pipedec.decoding.events import (
    Advanced,
    PromptScored,
    Record,
    RequestClosed,
    RequestEnded,
    Timestep,
    TimestepLoad,
)
from pipedec.device import DeviceEvent, device_of
from pipedec.engine.admission import threads_within
from pipedec.engine.build import load_drafter, load_stage, new_scheduler
from pipedec.engine.devices import chosen_device, limit_threads, with_measured_memory
from pipedec.engine.emulation import EmulatedClock
from pipedec.engine.loop import decode, go_together
from pipedec.engine.recorder import Recorder
from pipedec.engine.run_counters import RunCounters
from pipedec.families import model_config
from pipedec.messages.stats import RunStats
from pipedec.model import NewCapture, device_capture
from pipedec.plan.spec import PipelineSpec
from pipedec.stage import FinalStageWorker, StageWorker
from pipedec.threads import NewSequence, Sequence
from pipedec.threads.sequences import Sequences
from pipedec.topology import Topology

_IDLE_TIMESTEPS = 16  # in a row are an error
Prunes = Literal["at once", "with the rows"]


@dataclass
class LocalAnswer:
    """A request and its result. Lists are in the order of decoding; those of an answer in threads begin at its last pause."""

    asked: TokenizedRequest  # with the seed that was chosen for it
    new_sequence: NewSequence
    sequence: Sequence = field(init=False)  # its decode threads
    metrics: Metrics = field(init=False)
    logprobs: list[dict[int, float]] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    prompt_logprobs: list[dict[int, float]] = field(default_factory=list)  # from the second token on
    hidden_states: list[bytes] = field(default_factory=list)  # of the tokens of the prompt
    finished: str | None = None  # why it ended; None while it goes on
    failure: str | None = None  # what has gone wrong in a rank and has ended it
    is_closed: bool = False  # every stage has closed its lane

    def begin(self) -> Sequence:
        """Make a new sequence for the request, which passes accepted tokens to it."""
        self.sequence = self.new_sequence()
        self.logprobs.clear()
        self.token_ids.clear()
        return self.sequence


class LocalPipeline:
    """Runs requests through ``stages``, the workers of stages 1..n of ``spec``. Cached prefixes outlast a run.

    Args:
        scheduler: without requests, with a KV manager of the stages' slots.
        prunes: when a stage prunes by a verdict: ``at once``, before its next step, as with the paper's dispatcher, or ``with
            the rows`` that follow the verdict, as with windows. Only the number of rows per stage depends on it.
    """

    def __init__(self, spec: PipelineSpec, stages: list[StageWorker], scheduler: Scheduler, prunes: Prunes = "at once") -> None:
        topology = spec.topology
        if len(stages) != topology.num_stages:
            raise ValueError(f"{len(stages)} stages do not fill a topology of {topology.num_stages}")
        if not isinstance(stages[-1], FinalStageWorker):
            raise ValueError("the last stage must be a FinalStageWorker")
        self.stages = stages
        self._topology = topology
        self._sequences, self._vocab_size = Sequences(spec.target), model_config(spec.target).vocab_size
        self._recorder = Recorder(device_of(torch.device(scheduler.resources.device)))
        self.scheduler = scheduler  # observers are its listeners
        scheduler.listeners.append(self._on_record)
        self._emulation = spec.emulation
        if spec.emulation is not None and spec.tunes_passage:
            scheduler.controller.fill_links(spec.emulation.ring_latency_seconds)
        self._prunes_at_once = prunes == "at once"
        self.answers: dict[int, LocalAnswer] = {}  # of the last run, by number; their metrics use the emulated time, if any
        self.emulated_ms: float | None = None  # since the run began, on the emulated devices; None without an emulation
        self.fill: list[list[int]] = []  # of the last run, for each timestep the number of rows in each group

    @classmethod
    def load(
        cls, spec: PipelineSpec, lane_sizes: LaneSizes = LaneSizes(), capture: NewCapture = device_capture,
        prunes: Prunes = "at once", experience: Experience | None = None,
    ) -> LocalPipeline:  # fmt: skip
        """Load all stages of ``spec``, and its draft, in this process.

        Args:
            capture: how forwards on a device are captured.
            experience: to begin with; None for an empty one, even if the settings allow priors. It is not kept.
        """
        limit_threads()
        device = chosen_device(spec.settings.cut.device)
        spec = with_measured_memory(spec, device)
        stages = [load_stage(spec, rank, device, capture=capture) for rank in range(1, spec.settings.cut.stages + 1)]
        drafter = load_drafter(spec, device, capture=capture)
        return cls(spec, stages, new_scheduler(spec, drafter, device, lane_sizes, experience), prunes)

    def run(self, request: TokenizedRequest) -> Iterator[Verdict]:
        """Decode ``request`` alone and yield every verdict. Raises as ``run_all``, and RequestFailed if it has failed."""
        for _, verdict in self.run_all({1: [request]}):
            yield verdict
        if (failure := self.last.failure) is not None:
            raise RequestFailed(failure)

    def run_all(
        self, arrivals: Mapping[int, Iterable[TokenizedRequest]], cancels: Mapping[int, Iterable[int]] | None = None,
        losses: Container[int] = (),
    ) -> Iterator[tuple[int, Verdict]]:  # fmt: skip
        """Decode requests together; yields (request number, verdict). Those of an answer in threads start over after a pause.

        Args:
            arrivals: by timestep, counted from 1, the requests that begin then. Timesteps without any request are skipped.
            cancels: by timestep, the numbers of requests to cancel.
            losses: timesteps at which the stages lose all lanes and caches, as when a rank of a cluster is lost.

        Raises:
            UserError: a request has stop strings (there is no tokenizer here), its method needs a draft or a BiTA and there is
                none, or it can never have enough memory.
        """
        self.answers, self.fill = {}, []
        clock = EmulatedClock(self._emulation, self._topology) if self._emulation else None
        self.scheduler.now = clock.seconds if clock else time.perf_counter
        self.scheduler.draft_rounds.time_forward = clock.own_work.drafting if clock else self._recorder.drafting
        stages = LocalStages(self.stages, self._topology, self._recorder, clock, self._prunes_at_once)
        waiting, timestep = sorted(arrivals.items()), 0

        def admit() -> None:
            nonlocal timestep
            timestep += 1
            if timestep in losses:
                stages.reset()
                self.scheduler.interrupt()
            for number in (cancels or {}).get(timestep, ()):
                self.scheduler.cancel(number)
            if waiting and not self.scheduler.requests:
                timestep = max(timestep, waiting[0][0])
            while waiting and waiting[0][0] <= timestep:
                for request in waiting.pop(0)[1]:
                    self._begin(request)

        try:
            while waiting:
                for request, verdict in decode(self.scheduler, stages, admit):
                    self.emulated_ms = clock.total_ms if clock else None
                    yield request.number, verdict
        finally:
            for number in self.answers:
                self.scheduler.cancel(number)  # of a run that was not finished
            stages.end_session(self.scheduler.entering())
            self.scheduler.closed()

    def forget_prefixes(self) -> None:
        """Discard the cached prompts and answers, so that the next run finds no prefixes. Call it between runs."""
        self.scheduler.forget_prefixes()

    @property
    def last(self) -> LocalAnswer:
        """The answer to the request that began last."""
        return self.answers[max(self.answers)]

    def _begin(self, request: TokenizedRequest) -> None:
        if request.sampling.stop:
            raise UserError("stop strings need a tokenizer, which LocalPipeline does not have: use stop_token_ids")
        sampling, dialect = request.sampling.seeded(), request.threads
        check_sets_of_tokens(self._vocab_size, logit_bias=sampling.logit_bias, stop_token_ids=sampling.stop_token_ids)
        threads = None if dialect is None else threads_within(dialect, self.scheduler.kv.capacity)
        request = replace(request, sampling=sampling, threads=threads)
        if sampling.structured_outputs is not None:
            self._sequences.check(sampling.structured_outputs, request.output_token_ids)
        new_sequence = self._sequences.maker(len(request.prompt_token_ids), sampling, threads, request.output_token_ids)
        answer = LocalAnswer(request, new_sequence)
        prepared = self.scheduler.prepare(request, answer.begin)
        answer.metrics = prepared.metrics
        self.answers[request.number] = answer
        self.scheduler.open(prepared)

    def seconds(self) -> float:
        """The time of the present run, on the emulated devices if there are any."""
        return self.scheduler.now()

    def stats(self) -> RunStats:
        """The counters of all runs so far."""
        return RunCounters(self.scheduler).stats()

    def _on_record(self, record: Record) -> None:
        """Keep new tokens of the answers, and the rows of each group."""
        match record:
            case Timestep():
                assert record.load is not None
                computed = record.load.computed
                self.fill.append([computed.get(group[0], NO_LOAD).rows for group in self._topology.groups])
            case Advanced():
                answer = self.answers[record.request.number]
                answer.logprobs += map(dict, record.logprobs)
                answer.token_ids += record.verdict.tokens
            case PromptScored():
                answer = self.answers[record.request.number]
                answer.prompt_logprobs += map(dict, record.logprobs)
                answer.hidden_states += () if record.hidden_states is None else record.hidden_states.rows
            case RequestEnded():
                answer = self.answers[record.request.number]
                answer.finished, answer.failure = record.reason, record.failure
            case RequestClosed():
                self.answers[record.request.number].is_closed = True


class LocalStages:
    """The ``Pipeline`` of the decode loop in one process: messages wait in a queue in front of each group. If the passage is
    longer than the groups, the results of the last one wait in another queue, as long as messages spend on links.

    A verdict travels with the next rows. If stages prune at once (PipeDec §3.4.3), all stages replay a verdict that does not
    end the answer before their next step instead. Updates that open or close a lane always travel with the rows: a request may
    have adopted rows in flight of one that has ended. ``recorder`` times rank 0's work, ``clock`` adds up emulated time, if
    any.
    """

    def __init__(
        self, workers: list[StageWorker], topology: Topology, recorder: Recorder, clock: EmulatedClock | None,
        prunes_at_once: bool = True,
    ) -> None:  # fmt: skip
        self._workers = dict(enumerate(workers, start=1))
        self._groups = topology.groups
        self._senders = (0, *topology.exit_ranks[:-1])  # the rank that each group receives from
        self._recorder = recorder
        self._clock = clock
        self._prunes_at_once = prunes_at_once
        self.arrived: list[StageMessage] = []  # the message that each group has received in the last timestep
        self._queues = self._empty_queues()
        self._returning = deque[tuple[RequestUpdate, ...]]()  # results on their way to rank 0
        self._load = TimestepLoad()
        self._events: list[DeviceEvent] = []  # before the first group of this timestep, and after each
        self._idle_timesteps = 0

    def run_timestep(self, number: int, entering: StageMessage, passage: int, meanwhile: Callable[[], None]) -> Timestep:
        load, clock = TimestepLoad(), self._clock
        self._load = load
        if clock is not None and number > 1:
            load.deciding_seconds = clock.own_work.seconds
        self._receive(self._replay(entering) if self._prunes_at_once else entering)
        is_idle = not any(self._returning) and not any(message.updates for message in self.arrived)
        self._idle_timesteps = self._idle_timesteps + 1 if is_idle else 0
        if self._idle_timesteps == _IDLE_TIMESTEPS:
            raise RuntimeError(f"no row has entered the pipeline for {self._idle_timesteps} timesteps, and no answer has ended")
        self._recorder.restart()
        if clock is None:
            meanwhile()
        else:
            clock.own_work.restart()
            meanwhile()
            load.drafted, load.beside_seconds = clock.own_work.drafted, clock.own_work.seconds
        self._returning.append(self._compute())
        results: tuple[RequestUpdate, ...] = ()
        taken = 0
        while len(self._returning) > passage - len(self._groups) and go_together(results, self._returning[0]):
            results, taken = results + self._returning.popleft(), taken + 1
        timing = self._timing(None if passage == len(self._groups) and not self._returning else taken)
        if clock is not None:
            clock.own_work.restart()
        return Timestep(number, entering, results, timing if number >= passage else None, load)

    def reset(self) -> None:
        """Discard the lanes of every stage, and all messages on their way."""
        self._queues = self._empty_queues()
        self._forget_returning()
        for worker in self._workers.values():
            worker.reset()

    def end_session(self, last: StageMessage) -> None:
        self._receive(last)
        self._compute()
        while any(message.updates for queue in self._queues for message in queue):
            self._receive(EMPTY)
            self._compute()
        self._forget_returning()

    def _forget_returning(self) -> None:
        self._returning.clear()
        if self._clock is not None:
            self._clock.restart()

    def _empty_queues(self) -> list[deque[StageMessage]]:
        """The queues of groups to which nothing is on its way."""
        return [deque(), *(deque([EMPTY]) for _ in self._groups[1:])]

    @torch.inference_mode()
    def _replay(self, entering: StageMessage) -> StageMessage:
        """Let every stage replay verdicts that do not end answers, and prune waiting messages. Returns what is left to enter."""
        verdicts, left = list[RequestUpdate](), list[RequestUpdate]()
        for update in entering.updates:
            if update.verdict is None or update.verdict.finished is not None:
                left.append(update)
                continue
            verdicts.append(RequestUpdate(update.number, verdict=update.verdict))
            if update != verdicts[-1]:
                left.append(structs.replace(update, verdict=None))
        if not verdicts:
            return entering
        waiting = dict(zip(self._senders[1:], self._queues[1:], strict=True))
        for rank, worker in self._workers.items():
            if rank in waiting:
                waiting[rank].append(worker.replay(verdicts, waiting[rank].pop()))
            else:
                worker.replay(verdicts)
        return StageMessage(tuple(left))

    def _receive(self, entering: StageMessage) -> None:
        """Let every group receive its message of this timestep."""
        self._queues[0].append(entering)
        self.arrived = [queue.popleft() for queue in self._queues]
        for rank, message in zip(self._senders, self.arrived, strict=True):
            if rows := message.num_rows:
                self._load.sent[rank] = rows

    @torch.inference_mode()
    def _compute(self) -> tuple[RequestUpdate, ...]:
        """Let every group compute its rows, stage by stage. Returns the results of the last stage."""
        self._events = [self._recorder.record_event()]
        for index, (group, message) in enumerate(zip(self._groups, self.arrived, strict=True), start=1):
            for rank in group if message.updates else ():
                message = self._workers[rank].advance(message, partial(self._note_load, rank))
                if rank != group[-1] and (rows := message.num_rows):
                    self._load.sent[rank] = rows
            self._events.append(self._recorder.record_event())
            if index < len(self._queues):
                self._queues[index].append(message)
        return message.updates

    def _note_load(self, rank: int, name: str, load: Load) -> AbstractContextManager[None]:
        """A ``SpanContext`` of a stage."""
        if load.rows:
            self._load.computed[rank] = load
        return nullcontext()

    def _timing(self, taken: int | None) -> TimestepTiming:
        """The timing that rank 0 would measure if every stage had its own device, or an emulated one. ``taken``: see
        ``EmulatedClock``.
        """
        if self._clock is not None:
            return self._clock.add(self._load, taken)
        forwards = self._recorder.timing().forward_seconds
        self._events[-1].wait()
        drafting, slowest = sum(forwards), max(ended.seconds - began.seconds for began, ended in pairwise(self._events))
        return TimestepTiming(max(slowest, drafting), max(slowest - drafting, 0.0), forwards)
