"""Requests through stages that compute nothing: their answers are known, and with them the timestep of every verdict.

Owns the last stage, which knows the answers, the emulated time, and where the timesteps of an answer went: for each token, how
much later its row entered than the row before it, and why. All else is real: loop, scheduler, methods, and the stages' lanes.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import torch
from msgspec.structs import replace
from torch import Tensor

from benchmarks.policy.recording import RecordedDrafter
from pipedec.core.completion import Metrics
from pipedec.core.limits import DRAFTED_ROWS
from pipedec.core.request import TokenizedRequest
from pipedec.core.sampling import SamplingParams
from pipedec.core.stage_message import Load, NewRequest, RequestUpdate, StageMessage, Step
from pipedec.core.verdict import Verdict
from pipedec.decoding import Experience, Request, Resources, Scheduler
from pipedec.decoding.acceptance import AcceptanceModel, Choices
from pipedec.decoding.events import Advanced, Record, RequestEnded, RequestOpened, Timestep
from pipedec.decoding.learned import NOTHING_LEARNED, LearnedAcceptance
from pipedec.engine.emulation import EmulatedClock
from pipedec.engine.local import LocalStages
from pipedec.engine.loop import decode
from pipedec.engine.recorder import Recorder
from pipedec.families import StateCounts
from pipedec.kv import KVManager
from pipedec.model import KVCache, KVPool, LaneRows, StageModel
from pipedec.plan.emulation import Emulation
from pipedec.stage import StageWorker
from pipedec.stage.final import FinalLane, FinalStageWorker, SlotTokens
from pipedec.threads import NewSequence, replay
from pipedec.threads import Sequence as ThreadSequence
from pipedec.topology import Topology
from pipedec.tree import Advance
from pipedec.tree.forest import ThreadChanges


@dataclass
class KnownAnswer:
    """An answer in one thread, without an end token, and the timesteps in which its rows arrived at the last stage."""

    token_ids: Sequence[int]
    prefilled: int | None = None  # that of the whole prompt; None before it
    arrivals: list[int] = field(default_factory=list)  # those of the accepted tokens, in their order


AnswerOf = Callable[[int, NewRequest], KnownAnswer]


class _NoLayers:
    """Stands in for a ``StageModel``: a model of no layers, whose activations are zeros."""

    config = SimpleNamespace(vocab_size=1)
    stack = SimpleNamespace(routed=(), experts_read=None)

    def make_pool(self, slots: int, block: int, states: StateCounts | None = None) -> KVPool:
        return _EmptyPool((), torch.float32, slots, block)

    def forward(self, inputs: Tensor, lanes: Sequence[LaneRows]) -> Tensor:
        for lane in lanes:
            lane.append()
        return torch.zeros(len(inputs), 1)


class _EmptyPool(KVPool):
    """Any number of slots that hold nothing."""

    def copy(self, sources: Sequence[int], targets: Iterable[range]) -> None:
        """There is nothing to copy."""


_NO_LAYERS = cast(StageModel, _NoLayers())


def sequence_of(opening: NewRequest, max_tokens: int = sys.maxsize) -> NewSequence:
    """Makes sequences that begin with the output of ``opening`` and end after ``max_tokens`` tokens."""

    def new_sequence() -> ThreadSequence:
        sequence = ThreadSequence(opening.prompt_length, (), max_tokens)
        replay(sequence, opening.output_token_ids)
        return sequence

    return new_sequence


class _NoTokens(SlotTokens):
    """Remembers nothing: without penalties, past tokens are not needed."""

    def __init__(self) -> None:
        super().__init__(0)

    def read(self, slots: Iterable[range]) -> Tensor:
        return torch.zeros(0, dtype=torch.int64)

    def write(self, slots: Iterable[range], token_ids: Tensor) -> None:
        """Do nothing."""


class _AnsweringLane(FinalLane):
    """Returns after each row the answer's token for the next position; rows off the answer's path are dropped anyway."""

    def __init__(self, answer: KnownAnswer, now: Callable[[], int], opening: NewRequest, cache: KVCache, stage: int) -> None:
        plain = replace(opening, sampling=SamplingParams())
        super().__init__(plain, sequence_of(opening, len(answer.token_ids)), cache, "cpu", 1, _NoTokens(), stage)
        self._answer = answer
        self._now = now
        self._arrivals: list[int] = []  # of each row of the tree

    def say(self) -> list[int]:
        """The tokens after the rows that entered last."""
        token_ids, last = self._answer.token_ids, len(self._answer.token_ids) - 1
        positions = self._entered.positions[self._entered.num_rows - self.num_judged :].tolist()
        if self._entered.visibility is not None:
            self._arrivals += [self._now()] * len(positions)
        elif positions and not self._answer.arrivals:
            self._answer.prefilled = self._now()
        return [token_ids[min(position + 1 - self._prompt_length, last)] for position in positions]

    def sync(self, verdict: Verdict) -> tuple[Advance, ThreadChanges] | None:
        if (replayed := super().sync(verdict)) is not None:
            advance, _ = replayed
            self._answer.arrivals += [self._arrivals[row] for row in advance.committed.tolist()]
            self._arrivals = [self._arrivals[row] for row in advance.kept.tolist()]
        return replayed


class AnsweringStage(FinalStageWorker):
    """A last stage that knows the answers: ``answer_of`` returns that of a request, ``now`` the present timestep.

    It is a real worker, so rows, verdicts and slots are treated as everywhere. Sampling parameters are ignored.
    """

    def __init__(self, answer_of: AnswerOf, now: Callable[[], int], slots: int, block: int = 16, stage: int = 1) -> None:
        super().__init__(_NO_LAYERS, sequence_of, slots=slots, block=block, stage=stage)
        self._answer_of = answer_of
        self._now = now

    def _new_lane(self, number: int, opening: NewRequest, cache: KVCache) -> FinalLane:
        return _AnsweringLane(self._answer_of(number, opening), self._now, opening, cache, self._stage)

    def _reply(
        self, updates: tuple[RequestUpdate, ...], steps: Mapping[int, Step], activations: Mapping[int, Tensor], is_finite: bool
    ) -> tuple[RequestUpdate, ...]:
        """The results in the order in which their lanes were opened, after those of lanes that have ended."""
        places = {number: place for place, number in enumerate(self._lanes)}
        results = super()._reply(updates, steps, activations, is_finite)
        return tuple(sorted(results, key=lambda result: places.get(result.number, -1)))

    def _judge(self, activations: Mapping[int, Tensor], is_finite: bool) -> dict[int, list[int]]:
        return {number: cast(_AnsweringLane, self._lane(number)).say() for number in activations}


@dataclass(frozen=True)
class TimestepLosses:
    """Timesteps of decoded tokens by cause; all except ``together`` add up to the timesteps of the answer."""

    together: int = 0  # tokens (not timesteps) whose row entered in the same timestep as the row before it
    first: int = 0  # until the first decoded token is verified; no method can shorten it
    tokens: int = 0  # one for each further token whose row entered later than the row before it
    late: int = 0  # beyond that one, for rows that entered before their token was accepted
    named: int = 0  # beyond that one, for rows that entered after it although a draft source had proposed the token
    unnamed: int = 0  # the same, for tokens that no draft source had proposed

    @property
    def timesteps(self) -> int:
        return self.first + self.tokens + self.late + self.named + self.unnamed


def losses(entries: Sequence[int], is_proposed: Sequence[bool], passage: int) -> TimestepLosses:
    """The timesteps of one answer by cause.

    Args:
        entries: the timestep, from 1, in which the row of each token except the last entered.
        is_proposed: whether a draft source had proposed each of these tokens before it was accepted.
        passage: timesteps from a row's entry to its verdict.
    """
    if not entries:
        return TimestepLosses()
    lost = Counter(first=entries[0] - 1 + passage)
    for (before, after), was_proposed in zip(pairwise(entries), is_proposed[1:], strict=True):
        step = after - before
        if step == 0:
            lost["together"] += 1
        else:
            cause = "late" if step < passage else "named" if was_proposed else "unnamed"
            lost.update({"tokens": 1, cause: step - 1})
    return TimestepLosses(**lost)


@dataclass(frozen=True)
class Replayed:
    """The cost of one answer: ``tokens`` are the decoded tokens, all except the first; ``decode_ms`` is emulated."""

    tokens: int
    timesteps: int
    hits: int
    misses: int
    decode_ms: float
    losses: TimestepLosses


_T = TypeVar("_T")


def round_ms(emulation: Emulation, rows: int, forwards: int) -> float:
    """Milliseconds of a round in which so many draft forwards are followed by one pass of ``rows`` rows through all stages."""
    drafting = emulation.draft.compute_ms(Load(DRAFTED_ROWS)) if emulation.draft else 0.0
    passing = sum(stage.compute_ms(Load(rows)) + stage.send_ms(rows) for stage in emulation.stages)
    return forwards * drafting + passing


class WatchedExperience(Experience):
    """Experience that also reports which accepted tokens had been proposed, and knows how long a round takes."""

    round_ms: Callable[[int, int], float]  # by rows and draft forwards, in the pipeline that replays

    def __init__(self, passage: int, prior: LearnedAcceptance = NOTHING_LEARNED, expected_ms: Sequence[float] = ()) -> None:
        super().__init__(passage, prior, expected_ms=expected_ms)
        self._is_proposed: list[bool] = []
        self._watched: dict[int, AcceptanceModel] = {}  # by the identity of what is watched: who shares it is scored together

    def learned(self, request: TokenizedRequest, kind: type[_T], *args: Any) -> _T:
        known: Any = super().learned(request, kind, *args)
        if isinstance(known, AcceptanceModel):
            known = self._watched.setdefault(id(known), _WatchedAcceptance(known, self._is_proposed))
        return cast(_T, known)

    def take_proposed(self, tokens: int) -> list[bool]:
        """For each of the ``tokens`` of the last verdict: was it among the choices? False if there were none.

        A token after a row that was not drafted is not observed. It is the last of its verdict, as such a row has no children.
        """
        is_proposed = self._is_proposed + [False] * (tokens - len(self._is_proposed))
        self._is_proposed.clear()
        return is_proposed


class _WatchedAcceptance(AcceptanceModel):
    """Records the result of ``observe`` for every accepted token."""

    def __init__(self, watched: AcceptanceModel, is_proposed: list[bool]) -> None:
        self._watched = watched
        self._is_proposed = is_proposed

    def log_chances(self, choices: Choices) -> Tensor:
        return self._watched.log_chances(choices)

    def observe(self, choices: Choices, place: int, token: int) -> bool:
        is_proposed = self._watched.observe(choices, place, token)
        self._is_proposed.append(is_proposed)
        return is_proposed


@dataclass
class ReplayedAnswer:
    """A request whose answer is known, and what becomes of it. All times are seconds of the emulated clock."""

    request: TokenizedRequest
    answer: tuple[int, ...]  # the tokens that the target generates
    began: float  # when its first row entered the pipeline, or at first when it arrived there
    metrics: Metrics = field(default_factory=Metrics)  # its counters; their seconds are emulated
    events: list[tuple[float, int]] = field(default_factory=list)  # when tokens were accepted, and how many
    rows: int = 0  # of the request that have entered
    is_proposed: list[bool] = field(default_factory=list)  # for each token: by a draft source, before it was accepted
    drafted: list[bool] = field(default_factory=list)  # by a draft model, when the answer has ended; empty without one
    finished: str | None = None
    has_opened: bool = False

    def __post_init__(self) -> None:
        self.known = KnownAnswer(self.answer)

    def cost(self, passage: int) -> Replayed:
        """The cost of an answer that was alone in a pipeline of ``passage`` timesteps."""
        metrics, is_proposed = self.metrics, self.is_proposed
        if self.drafted:
            is_proposed = [one or other for one, other in zip(is_proposed, self.drafted, strict=True)]
        entries = [arrival - (self.known.prefilled or 0) - (passage - 1) for arrival in self.known.arrivals]
        causes = losses(entries, is_proposed[:-1], passage)
        decode_ms = 1000 * metrics.decode_seconds
        return Replayed(len(self.answer) - 1, metrics.timesteps, metrics.hits, metrics.misses, decode_ms, causes)


class ReplayedPipeline:
    """Replays requests through the groups of ``topology``; they may come at any time.

    ``experience`` is what earlier answers have taught, with the passage; it learns on. ``drafter`` is None without a draft
    model, ``kv``, the devices' KV memory, for no limit. ``prunes_at_once`` as in ``LocalStages``.
    """

    def __init__(
        self,
        emulation: Emulation,
        topology: Topology,
        drafter: RecordedDrafter | None,
        experience: WatchedExperience,
        kv: KVManager | None = None,
        prunes_at_once: bool = True,
    ) -> None:
        self.clock = EmulatedClock(emulation, topology)
        self.timesteps = 0
        self.own_seconds = 0.0  # rank 0's own work in them, as measured on this machine, without the draft's forwards
        self.fill: list[list[dict[int, int]]] = []  # by timestep, for each group the requests and their numbers of rows there
        self.kv_slots: list[int] = []  # by timestep, those of running requests; empty without ``kv``
        self._kv, self._drafter, self._experience = kv, drafter, experience
        experience.round_ms = partial(round_ms, emulation)
        self._passage = experience.controller.passage
        scheduler = self._scheduler = Scheduler(Resources(experience, drafter), kv, emulation.room, listeners=[self._on_record])
        scheduler.draft_rounds.time_forward = self.clock.own_work.drafting
        scheduler.now = self.clock.seconds
        slots, block, last = scheduler.kv.capacity, scheduler.kv.block, topology.num_stages
        workers = [StageWorker(_NO_LAYERS, sequence_of, slots=slots, block=block, stage=stage) for stage in range(1, last)]
        workers.append(AnsweringStage(self._known, lambda: self.timesteps, slots, block, last))
        self._stages = LocalStages(workers, topology, Recorder(), self.clock, prunes_at_once)
        self._answers: dict[int, ReplayedAnswer] = {}

    def check(self, request: TokenizedRequest) -> None:
        """Raises UserError if the method does not accept ``request``, or the devices can never have memory for it."""
        self._prepared(request, 1)

    def _prepared(self, request: TokenizedRequest, num_tokens: int) -> Request:
        return self._scheduler.prepare(request, partial(ThreadSequence, len(request.prompt_token_ids), (), num_tokens))

    @property
    def num_running(self) -> int:
        return len(self._scheduler.requests)

    def begin(self, request: TokenizedRequest, answer: tuple[int, ...]) -> ReplayedAnswer:
        """Let ``request`` enter, to which the target generates ``answer``. Raises UserError as ``check``."""
        prepared = self._prepared(request, len(answer))
        replayed = self._answers[request.number] = ReplayedAnswer(request, answer, self.clock.seconds(), metrics=prepared.metrics)
        self._scheduler.open(prepared)
        return replayed

    def run(self, admit: Callable[[], None] = lambda: None) -> Iterator[ReplayedAnswer]:
        """Decode until no request is running; yields each whose tokens were accepted, after every verdict.

        ``admit`` is called before every timestep; it may ``begin`` requests, and let time pass while none is running.
        """
        for request, verdict in decode(self._scheduler, self._stages, admit):
            replayed = self._answers[request.number]
            replayed.is_proposed += self._experience.take_proposed(len(verdict.tokens))
            yield replayed

    def run_alone(self, request: TokenizedRequest, answer: tuple[int, ...]) -> Replayed:
        """The cost of ``request`` alone in the pipeline. Raises UserError as ``check``."""
        replayed = self.begin(request, answer)
        for _ in self.run():
            pass
        return replayed.cost(self._passage)

    def _known(self, number: int, opening: NewRequest) -> KnownAnswer:
        return self._answers[number].known

    def _on_record(self, record: Record) -> None:
        match record:
            case Timestep():
                assert record.load is not None
                self.timesteps += 1
                self.own_seconds += record.load.deciding_seconds + record.load.beside_seconds
                self.fill.append(list(map(_rows_of, self._stages.arrived)))
                for number, rows in _rows_of(record.entered).items():
                    self._answers[number].rows += rows
                if self._kv is not None:
                    self.kv_slots.append(self._kv.used_slots)
            case RequestOpened() if not self._answers[record.request.number].has_opened:
                replayed = self._answers[record.request.number]
                replayed.has_opened, replayed.began = True, self.clock.seconds()
            case Advanced():
                replayed = self._answers[record.request.number]
                replayed.events.append((self.clock.seconds(), len(record.verdict.tokens)))
                if record.verdict.finished and self._drafter is not None:
                    replayed.drafted = self._drafter.proposed(
                        record.request.number, replayed.answer
                    )  # before the method closes it
            case RequestEnded():
                self._answers[record.request.number].finished = record.reason


def _rows_of(message: StageMessage) -> dict[int, int]:
    """The number of rows of each request."""
    return {update.number: update.step.num_rows for update in message.updates if update.step is not None}
