"""Requests through stages that compute nothing: their answers are known, and with them the timestep of every verdict.

Owns the known answers, the emulated time, and where the timesteps of an answer went: for each token, how much later its row
entered than the row before it, and why. All else is real: loop, pool, batch, methods, and the stages' lanes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar, cast

from torch import Tensor

from benchmarks.policy.answering_stage import AnsweringStage, KnownAnswer
from benchmarks.policy.drafter import RecordedDrafter
from pipedec.bench.overhead.null_stage import no_layers, sequence_of
from pipedec.core import Metrics, NewRequest, Request, StageMessage
from pipedec.decoding import Batch, Experience
from pipedec.decoding.acceptance import AcceptanceModel, Choices
from pipedec.engine.counters import Counters
from pipedec.engine.local import LocalStages
from pipedec.engine.loop import Advanced, Record, RequestEnded, RequestOpened, RequestPool, Timestep, decode
from pipedec.engine.recorder import EmulatedClock, Pacer, Recorder
from pipedec.kv import KVManager
from pipedec.plan.emulation import Emulation
from pipedec.stage import StageWorker
from pipedec.threads import Sequence as ThreadSequence
from pipedec.topology import Topology


@dataclass(frozen=True)
class TimestepLosses:
    """Timesteps of decoded tokens by cause; all except ``together`` add up to the timesteps of the answer.

    Attributes:
        together: tokens (not timesteps) whose row entered in the same timestep as the row before it.
        first: until the first decoded token is verified; no method can shorten it.
        tokens: one for each further token whose row entered later than the row before it.
        late: beyond that one, for rows that entered before their token was accepted.
        named: beyond that one, for rows that entered after their token was accepted although a draft source had proposed it.
        unnamed: the same, for tokens that no draft source had proposed.
    """

    together: int = 0
    first: int = 0
    tokens: int = 0
    late: int = 0
    named: int = 0
    unnamed: int = 0

    @property
    def timesteps(self) -> int:
        return self.first + self.tokens + self.late + self.named + self.unnamed

    @classmethod
    def total(cls, several: Iterable[TimestepLosses]) -> TimestepLosses:
        """The sums over several answers."""
        columns = zip(*(asdict(losses).values() for losses in several), strict=True)
        return cls(*(sum(column) for column in columns))


def losses(entries: Sequence[int], is_proposed: Sequence[bool], passage: int) -> TimestepLosses:
    """The timesteps of one answer by cause.

    Args:
        entries: the timestep, from 1, in which the row of each token except the last entered.
        is_proposed: whether a draft source had proposed each of these tokens before it was accepted.
        passage: timesteps from a row's entry to its verdict.
    """
    if not entries:
        return TimestepLosses()
    found = TimestepLosses(first=entries[0] - 1 + passage)
    steps = [after - before for before, after in pairwise(entries)]
    return TimestepLosses.total(
        [found, *(_of_token(step, named, passage) for step, named in zip(steps, is_proposed[1:], strict=True))]
    )


def _of_token(step: int, is_proposed: bool, passage: int) -> TimestepLosses:
    if step == 0:
        return TimestepLosses(together=1)
    if step < passage:
        return TimestepLosses(tokens=1, late=step - 1)
    return TimestepLosses(tokens=1, named=step - 1) if is_proposed else TimestepLosses(tokens=1, unnamed=step - 1)


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


class WatchedExperience(Experience):
    """Experience that also reports which accepted tokens had been proposed."""

    def __init__(self, passage: int) -> None:
        super().__init__(passage)
        self._is_proposed: list[bool] = []
        self._watched: dict[int, AcceptanceModel] = {}  # by the identity of what is watched: who shares it is scored together

    def learned(self, request: Request, kind: type[_T], *args: Any) -> _T:
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
    """A request whose answer is known, and what becomes of it. All times are seconds of the emulated clock.

    Attributes:
        answer: the tokens that the target generates.
        began: when its first row entered the pipeline, or at first when it arrived there.
        metrics: its counters; their seconds are emulated.
        events: when tokens were accepted, and how many.
        rows: of the request that have entered.
        is_proposed: for each token whether a draft source had proposed it before it was accepted.
        drafted: the same for tokens that a draft model has proposed, when the answer has ended; empty without one.
        known: ``answer``, and when its rows passed the last stage.
    """

    request: Request
    answer: tuple[int, ...]
    began: float
    metrics: Metrics = field(default_factory=Metrics)
    events: list[tuple[float, int]] = field(default_factory=list)
    rows: int = 0
    is_proposed: list[bool] = field(default_factory=list)
    drafted: list[bool] = field(default_factory=list)
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

    Args:
        drafter: None without a draft model.
        experience: what earlier answers have taught; it learns on.
        kv: the devices' KV memory; None for no limit.

    Attributes:
        clock: the emulated time.
        timesteps: so far.
        own_seconds: rank 0's own work in them, as measured on this machine, without the draft's forwards.
        fill: by timestep, for each group the requests and their numbers of rows there.
        kv_slots: by timestep, the slots of running requests; empty without ``kv``.
    """

    def __init__(
        self,
        emulation: Emulation,
        topology: Topology,
        drafter: RecordedDrafter | None,
        experience: WatchedExperience,
        kv: KVManager | None = None,
    ) -> None:
        self.clock = EmulatedClock(emulation, topology)
        self.timesteps = 0
        self.own_seconds = 0.0
        self.fill: list[list[dict[int, int]]] = []
        self.kv_slots: list[int] = []
        self._kv = kv
        self._groups = topology.num_groups
        self._drafter = drafter
        self._experience = experience
        recorder = Recorder(Pacer(None, 0))
        batch = Batch(self._groups, drafter, knee=emulation.knee, experience=experience, kv=kv)
        batch.time_forward = recorder.drafting
        self._counters = Counters(self.clock.seconds)
        self._pool = RequestPool(batch, listeners=[self._counters.note, self._note])
        slots, block, last = batch.kv.capacity, batch.kv.block, topology.num_stages
        workers = [StageWorker(no_layers(), sequence_of, slots=slots, block=block, stage=stage) for stage in range(1, last)]
        workers.append(AnsweringStage(self._known, lambda: self.timesteps, slots, block, last))
        self._stages = LocalStages(workers, topology, recorder, self.clock)
        self._answers: dict[int, ReplayedAnswer] = {}

    def check(self, request: Request) -> None:
        """Raises UserError if the method does not accept ``request``, or the devices can never have memory for it."""
        self._pool.batch.check(request, ThreadSequence(len(request.prompt_token_ids), (), 1))

    @property
    def num_running(self) -> int:
        return len(self._pool.running)

    def begin(self, request: Request, answer: tuple[int, ...]) -> ReplayedAnswer:
        """Let ``request`` enter, to which the target generates ``answer``.

        Raises:
            UserError: as ``check``.
        """
        self.check(request)
        replayed = ReplayedAnswer(request, answer, self.clock.seconds())
        self._pool.open(request, partial(ThreadSequence, len(request.prompt_token_ids), (), len(answer)))
        self._counters.begin(request.number, replayed.metrics)
        self._answers[request.number] = replayed
        return replayed

    def run(self, admit: Callable[[], None] = lambda: None) -> Iterator[ReplayedAnswer]:
        """Decode until no request is running; yields each whose tokens were accepted, after every verdict.

        Args:
            admit: called before every timestep; may ``begin`` requests, and let time pass while none is running.
        """
        for number, verdict in decode(self._pool, self._stages, admit):
            replayed = self._answers[number]
            replayed.is_proposed += self._experience.take_proposed(len(verdict.tokens))
            yield replayed

    def run_alone(self, request: Request, answer: tuple[int, ...]) -> Replayed:
        """The cost of ``request`` alone in the pipeline. Raises UserError as ``check``."""
        replayed = self.begin(request, answer)
        for _ in self.run():
            pass
        return replayed.cost(self._groups)

    def _known(self, number: int, opening: NewRequest) -> KnownAnswer:
        return self._answers[number].known

    def _note(self, record: Record) -> None:
        match record:
            case Timestep():
                self._note_timestep(record)
            case RequestOpened() if not self._answers[record.number].has_opened:
                replayed = self._answers[record.number]
                replayed.has_opened, replayed.began = True, self.clock.seconds()
            case Advanced():
                replayed = self._answers[record.number]
                replayed.events.append((self.clock.seconds(), len(record.verdict.tokens)))
                if record.verdict.finished and self._drafter is not None:
                    replayed.drafted = self._drafter.proposed(record.number, replayed.answer)  # before the method closes it
            case RequestEnded():
                self._answers[record.number].finished = record.reason

    def _note_timestep(self, timestep: Timestep) -> None:
        assert timestep.load is not None
        self.timesteps += 1
        self.own_seconds += timestep.load.deciding_seconds + timestep.load.beside_seconds
        self.fill.append(list(map(_rows_of, self._stages.arrived)))
        for number, rows in _rows_of(timestep.entered).items():
            self._answers[number].rows += rows
        if self._kv is not None:
            self.kv_slots.append(self._kv.used_slots)


def _rows_of(message: StageMessage) -> dict[int, int]:
    """The number of rows of each request."""
    return {update.number: update.step.num_rows for update in message.updates if update.step is not None}
