"""Requests through a pipeline without stages: their answers are known, and with them the timestep of every verdict.

Owns the rows in flight and the emulated time. Loop, pool, company and methods are the real ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from pipedec.bench.policy.drafter import RecordedDrafter
from pipedec.bench.policy.losses import Losses, losses
from pipedec.core import Envelope, Load, Metrics, Opening, Request, Step, TokenLogprobs, Update, Verdict
from pipedec.decoding import Company, Experience, Method
from pipedec.decoding.acceptance import Acceptance
from pipedec.decoding.choices import Choices
from pipedec.engine.counters import Counters
from pipedec.engine.emulated_time import EmulatedClock, Pacer, TimestepLoad
from pipedec.engine.loop import decode
from pipedec.engine.pool import Pool
from pipedec.engine.recorder import Recorder, Timestep
from pipedec.engine.timed_drafter import TimedDrafter
from pipedec.kv import KVManager
from pipedec.plan.emulation import Emulation
from pipedec.threads import single_thread
from pipedec.topology import Topology
from pipedec.tree import PredictionTree

_IDLE_TIMESTEPS = 64


@dataclass(frozen=True)
class Replayed:
    """The cost of one answer: ``tokens`` are the decoded tokens, all except the first; ``decode_ms`` is emulated."""

    tokens: int
    timesteps: int
    hits: int
    misses: int
    decode_ms: float
    losses: Losses


class WatchedExperience(Experience):
    """Experience that also reports which accepted tokens had been proposed."""

    def __init__(self, passage: int) -> None:
        super().__init__(passage)
        self._is_proposed: list[bool] = []
        self._watched: dict[int, Acceptance] = {}  # by the identity of what is watched: who shares it is scored together

    def acceptance(self, request: Request, prior: tuple[float, ...]) -> Acceptance:
        watched = super().acceptance(request, prior)
        return self._watched.setdefault(id(watched), _WatchedAcceptance(watched, self._is_proposed))

    def take_proposed(self, tokens: int) -> list[bool]:
        """For each of the ``tokens`` of the last verdict: was it among the choices? False if there were none.

        A token after a row that was not drafted is not observed. It is the last of its verdict, as such a row has no children.
        """
        is_proposed = self._is_proposed + [False] * (tokens - len(self._is_proposed))
        self._is_proposed.clear()
        return is_proposed


class _WatchedAcceptance(Acceptance):
    """Records the result of ``observe`` for every accepted token."""

    def __init__(self, watched: Acceptance, is_proposed: list[bool]) -> None:
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
        events: when tokens were accepted, and how many.
        metrics: its counters; their seconds are emulated.
        rows: of the request that have entered.
        entries: the timesteps after prefill in which the rows of accepted tokens entered, in order.
        is_proposed: for each token whether a draft source had proposed it before it was accepted.
    """

    request: Request
    answer: tuple[int, ...]
    now: Callable[[], float]
    drafter: RecordedDrafter | None = None
    metrics: Metrics = field(default_factory=Metrics)
    events: list[tuple[float, int]] = field(default_factory=list)
    rows: int = 0
    entries: list[int] = field(default_factory=list)
    is_proposed: list[bool] = field(default_factory=list)
    finished: str | None = None

    def __post_init__(self) -> None:
        self.began = self.now()
        self._counters = Counters(self.metrics, self.now)
        self._drafted: list[bool] = []

    def waits(self) -> None:
        self._counters.waits()

    def interrupted(self) -> None:
        """Only clusters lose ranks."""

    def opened(self, opening: Opening) -> None:
        if self._counters.opened(opening) == 1:
            self.began = self.now()

    def entered(self, step: Step) -> None:
        self.rows += step.num_rows
        self._counters.entered(step)

    def take(self, result: Update, timestep: int) -> Verdict:
        assert result.verdict is not None
        self._counters.accepted(timestep)
        self.events.append((self.now(), len(result.verdict.tokens)))
        if result.verdict.finished and self.drafter is not None:
            self._drafted = self.drafter.proposed(result.number, self.answer)  # before the method closes it
        return result.verdict

    def scored(self, logprobs: TokenLogprobs) -> None:
        """Nothing was recorded of prompts."""

    def corrupted(self, stage: int) -> None:
        """Nothing is computed here."""

    def ended(self, reason: str, method: Method) -> None:
        self.finished = reason
        self._counters.ended(method)

    def closed(self) -> None:
        """Nothing is left to do."""

    def cost(self, passage: int) -> Replayed:
        """The cost of an answer that was alone in a pipeline of ``passage`` timesteps."""
        metrics, is_proposed = self.metrics, self.is_proposed
        if self._drafted:
            is_proposed = [one or other for one, other in zip(is_proposed, self._drafted, strict=True)]
        causes = losses(self.entries, is_proposed[:-1], passage)
        decode_ms = 1000 * metrics.decode_seconds
        return Replayed(len(self.answer) - 1, metrics.timesteps, metrics.hits, metrics.misses, decode_ms, causes)


class ReplayedPipeline:
    """Replays requests through the groups of ``topology``; they may come at any time.

    Args:
        drafter: None without a draft model.
        experience: what earlier answers have taught; it learns on.
        kv: the devices' KV memory; None for as much as anybody wants.

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
        timed = None if drafter is None else TimedDrafter(drafter, recorder.drafting)
        self._pool = Pool(Company(self._groups, timed, knee=emulation.knee, experience=experience, kv=kv))
        self._stages = _Stages(topology, self.clock, recorder)
        self._answers: dict[int, ReplayedAnswer] = {}

    def check(self, request: Request) -> None:
        """Raises UserError if the method does not accept ``request``, or the devices can never have memory for it."""
        self._pool.company.check(request, single_thread(len(request.prompt_token_ids), (), 1))

    @property
    def num_running(self) -> int:
        return self._pool.num_running

    def begin(self, request: Request, answer: tuple[int, ...]) -> ReplayedAnswer:
        """Let ``request`` enter, to which the target generates ``answer``.

        Raises:
            UserError: as ``check``.
        """
        self.check(request)
        replayed = ReplayedAnswer(request, answer, self.clock.seconds, self._drafter)
        self._stages.expect(request.number, answer, replayed.entries)
        self._pool.open(request, partial(single_thread, len(request.prompt_token_ids), (), len(answer)), replayed)
        self._answers[request.number] = replayed
        return replayed

    def run(self, admit: Callable[[], None] = lambda: None) -> Iterator[ReplayedAnswer]:
        """Decode until no request is running; yields each whose tokens were accepted, after every verdict.

        Args:
            admit: called before every timestep; may ``begin`` requests, and let time pass while none is running.
        """
        for number, verdict in decode(self._pool, self._stages, admit, (self._note,)):
            replayed = self._answers[number]
            replayed.is_proposed += self._experience.take_proposed(len(verdict.tokens))
            yield replayed

    def run_alone(self, request: Request, answer: tuple[int, ...]) -> Replayed:
        """The cost of ``request`` alone in the pipeline. Raises UserError as ``check``."""
        replayed = self.begin(request, answer)
        for _ in self.run():
            pass
        return replayed.cost(self._groups)

    def _note(self, timestep: Timestep) -> None:
        assert timestep.load is not None
        self.timesteps += 1
        self.own_seconds += timestep.load.deciding_seconds + timestep.load.beside_seconds
        self.fill.append(self._stages.fill)
        if self._kv is not None:
            self.kv_slots.append(self._kv.used_slots)


class _Lane:
    """The rows of one request that are in flight, by the timestep in which they entered.

    A row is computed once it has passed the last group; the known answer then gives the next token.

    Args:
        entries: receives the timesteps after prefill in which the rows of accepted tokens entered.
    """

    def __init__(self, groups: int, answer: tuple[int, ...], entries: list[int]) -> None:
        self._groups = groups
        self._answer = answer
        self._entries = entries
        self._prefilled: int | None = None  # timestep of the first verdict since it was opened first
        self._num_accepted = 0  # tokens of the answer

    def open(self, opening: Opening) -> None:
        """Begin, or go on after a pause."""
        self._prompt_left = opening.prompt_length + len(opening.said) - opening.cached
        self._chunks: list[tuple[int, int]] = []  # of the prompt and what was said before: timestep and rows
        self._num_accepted = len(opening.said)
        self._is_prefilled = False
        self._num_committed = opening.cached  # rows that are no longer in the tree
        self._tree = PredictionTree()
        self._entered = torch.zeros(0, dtype=torch.int64)  # [N], timesteps
        self._closed: int | None = None  # the timestep in which the stages are told

    @property
    def is_complete(self) -> bool:
        """Whether the last stage has said the whole answer: it computes no more rows of it."""
        return self._num_accepted == len(self._answer)

    def leaves(self, timestep: int) -> bool:
        """Whether the closing has reached the last group; all rows before it were computed."""
        return self._closed is not None and timestep - self._closed >= self._groups - 1

    def enter(self, step: Step, timestep: int) -> None:
        """A chunk of the prompt, or rows of the tree, enter the first group."""
        if self._prompt_left:
            self._prompt_left -= step.num_rows
            self._chunks.append((timestep, step.num_rows))
            return
        self._tree.append(step.token_ids, step.parents)
        self._entered = torch.nn.functional.pad(self._entered, (0, step.num_rows), value=timestep)

    def sync(self, verdict: Verdict, timestep: int) -> None:
        """Prune rows that can no longer be accepted; those of an answer that has ended pass on before its closing."""
        advance = self._tree.advance(verdict.tokens)
        self._entries += [entered - (self._prefilled or 0) for entered in self._entered[advance.committed].tolist()]
        if verdict.finished is not None:
            self._closed = timestep
            return
        self._num_committed += len(advance.committed)
        self._entered = self._entered[advance.kept]

    def rows(self, timestep: int) -> list[int]:
        """The rows at each group in ``timestep``, and behind the last one."""
        ages = (timestep - self._entered).clamp(max=self._groups)
        counts: list[int] = torch.bincount(ages, minlength=self._groups + 1).tolist()
        for entered, rows in self._chunks:
            counts[min(timestep - entered, self._groups)] += rows
        return counts

    def loads(self, rows: list[int]) -> list[Load]:
        """The work at each group that has ``rows``, as ``rows`` returns them: what is further on is in the group's caches."""
        cached = list(accumulate(reversed(rows), initial=self._num_committed))[::-1]
        return [Load(here, past) if here else Load() for here, past in zip(rows[:-1], cached[1:], strict=False)]

    def verify(self, timestep: int) -> Verdict | None:
        """Accept tokens of the answer along rows computed until ``timestep``; None if the root is not computed."""
        if self._closed is not None:
            return None
        if not self._is_prefilled:
            return self._verify_prompt(timestep)
        row, tokens = 0 if self._tree.num_rows else None, 0
        while row is not None and self._is_computed(row, timestep) and self._num_accepted + tokens < len(self._answer):
            row = self._tree.child(row, self._answer[self._num_accepted + tokens])
            tokens += 1
        return self._verdict(tokens) if tokens else None

    def _verify_prompt(self, timestep: int) -> Verdict | None:
        if self._prompt_left or timestep - self._chunks[-1][0] < self._groups - 1:
            return None
        self._prefilled = self._prefilled or timestep
        self._is_prefilled = True
        return self._verdict(1)

    def _is_computed(self, row: int, timestep: int) -> bool:
        return timestep - int(self._entered[row]) >= self._groups - 1

    def _verdict(self, tokens: int) -> Verdict:
        """The next ``tokens`` of the answer. The finish reason makes no difference to methods."""
        first, self._num_accepted = self._num_accepted, self._num_accepted + tokens
        finished = "length" if self._num_accepted == len(self._answer) else None
        return Verdict.of(*self._answer[first : self._num_accepted], finished=finished)


class _Stages:
    """The ``Pipeline`` of the decode loop without stages. Every stage learns at once of a verdict by which an answer goes on.

    Attributes:
        fill: of the last timestep, for each group the requests and their numbers of rows there.
    """

    def __init__(self, topology: Topology, clock: EmulatedClock, recorder: Recorder) -> None:
        self.fill: list[dict[int, int]] = []
        self._topology = topology
        self._clock = clock
        self._recorder = recorder
        self._expected: dict[int, _Lane] = {}  # all requests
        self._lanes: dict[int, _Lane] = {}  # those that are open on a group
        self._closing: dict[int, str] = {}  # why, of lanes whose closing is on its way
        self._timestep = 0  # over all sessions of the loop
        self._idle_timesteps = 0

    def expect(self, number: int, answer: tuple[int, ...], entries: list[int]) -> None:
        """A request will be opened. ``entries``: see ``ReplayedAnswer``."""
        self._expected[number] = _Lane(self._topology.num_groups, answer, entries)

    def advance(self, number: int, entering: Envelope, meanwhile: Callable[[], None]) -> Timestep:
        load = TimestepLoad(deciding_seconds=self._recorder.cpu_seconds if number > 1 else 0.0)
        self._timestep += 1
        self._take(entering.updates)
        with self._recorder.beside(load):
            meanwhile()
        at_end = self._compute(load)
        results = [Update(one, verdict=verdict) for one in at_end if (verdict := self._lanes[one].verify(self._timestep))]
        results += [Update(one, verdict=Verdict((), reason)) for one, reason in self._leaving()]
        timing = self._clock.add(load)
        self._recorder.restart()
        return Timestep(number, entering, tuple(results), timing if number >= self._topology.num_groups else None, load)

    def close(self, last: Envelope) -> None:
        self._take(last.updates)
        self._timestep += self._topology.num_groups
        self._leaving()

    def _take(self, updates: Iterable[Update]) -> None:
        for update in updates:
            lane = self._expected[update.number]
            if update.opening is not None:
                self._lanes[update.number] = lane
                lane.open(update.opening)
            if update.verdict is not None:
                lane.sync(update.verdict, self._timestep)
                if update.verdict.finished is not None:
                    self._closing[update.number] = update.verdict.finished
            if update.step is not None:
                lane.enter(update.step, self._timestep)

    def _leaving(self) -> list[tuple[int, str]]:
        """The lanes that the last group closes, and why."""
        leaving = [number for number in self._closing if self._lanes[number].leaves(self._timestep)]
        for number in leaving:
            del self._lanes[number]
        reasons = [(number, self._closing.pop(number)) for number in leaving]
        for number, reason in reasons:
            if reason != "paused":
                del self._expected[number]
        return reasons

    def _compute(self, load: TimestepLoad) -> list[int]:
        """Every group computes the rows that are there. Returns the requests with rows at the last group."""
        rows = {number: lane.rows(self._timestep) for number, lane in self._lanes.items()}
        loads = {number: lane.loads(rows[number]) for number, lane in self._lanes.items()}
        self.fill = [
            {number: count for number, counts in rows.items() if (count := counts[index])}
            for index in range(self._topology.num_groups)
        ]
        self._check_idle()
        for index, (sender, group) in enumerate(zip((0, *self._topology.exit_ranks), self._topology.groups, strict=False)):
            total = _total(one[index] for one in loads.values())
            if total.rows:
                load.computed.update(dict.fromkeys(group, total))
                load.sent.update(dict.fromkeys((sender, *group[:-1]), total.rows))
        if self._topology.final_rank in load.computed:
            said = (one[-1] for number, one in loads.items() if not self._lanes[number].is_complete)
            load.computed[self._topology.final_rank] = _total(said)
        return list(self.fill[-1])

    def _check_idle(self) -> None:
        self._idle_timesteps = 0 if any(self.fill) else self._idle_timesteps + 1
        if self._idle_timesteps == _IDLE_TIMESTEPS:
            raise RuntimeError(f"no row has entered the pipeline for {_IDLE_TIMESTEPS} timesteps, and no answer has ended")


def _total(loads: Iterable[Load]) -> Load:
    several = list(loads)
    return Load(sum(load.rows for load in several), sum(load.past for load in several))
