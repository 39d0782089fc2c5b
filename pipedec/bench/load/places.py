"""Where load is offered: an emulated pipeline in real processes, which may run in slow motion, or a cluster that runs."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import TracebackType

from msgspec import structs

from pipedec.bench.load.arrivals import Arrivals
from pipedec.bench.load.policy import Policy
from pipedec.bench.load.questions import Conversation, continued_text
from pipedec.bench.load.served import LoadOutcome, ServedRequest
from pipedec.bench.prompts import AskedPrompts, DrawnPrompt, Tokenizes
from pipedec.bench.record import Row
from pipedec.bench.sweep.pipelines import RunningShape, Shape
from pipedec.client.client import Client
from pipedec.client.reply import Reply
from pipedec.client.running import Running
from pipedec.cluster.local import LocalCluster
from pipedec.core import UserError
from pipedec.engine.build import load_prompter
from pipedec.text.prompt import Prompter

_LONGEST_WAIT = 0.25


@dataclass(frozen=True)
class OfferedLoad:
    """One load by one method.

    Attributes:
        max_num_seqs: requests in the pipeline at the same time.
        on_end: called after each answer.
    """

    policy: Policy
    conversations: Sequence[Conversation]
    arrivals: Arrivals
    max_num_seqs: int
    on_end: Callable[[], None]


class Place(ABC):
    """A pipeline to which load is offered. What it has started ends with the context.

    Attributes:
        clock: ``measured`` or ``computed``.
    """

    clock = "measured"

    @property
    @abstractmethod
    def prompter(self) -> Tokenizes:
        """Says whether a prompt fits."""

    @property
    @abstractmethod
    def cluster(self) -> Row:
        """The fields of a row about it."""

    @abstractmethod
    def offer(self, load: OfferedLoad) -> LoadOutcome:
        """Offer a load. The turns of a conversation follow one another as soon as they are answered.

        Raises:
            UserError: the pipeline cannot decode by its policy.
            RankLost, SchedulerLost: the cluster died.
        """

    def __enter__(self) -> Place:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        return  # a subclass that starts something ends it


class OnRunning(Place):
    """A cluster that runs; its own limits count."""

    def __init__(self, running: Running, prompts: Path) -> None:
        self._running = running
        self._shape = RunningShape(running)
        self._prompter = AskedPrompts(running.check_accepts, prompts, self._shape.scope)

    @property
    def prompter(self) -> AskedPrompts:
        return self._prompter

    @property
    def cluster(self) -> Row:
        return {"preset": None, "run": self._running.run_id, **self._shape.cluster}

    def offer(self, load: OfferedLoad) -> LoadOutcome:
        self._running.check_method(load.policy.method)
        return offer_to(self._running, load)


class OnProcesses(Place):
    """An emulated pipeline in real processes, which are started for the first load and whenever their limit changes."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self._started: tuple[int, LocalCluster, Running] | None = None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop()

    @property
    def cluster(self) -> Row:
        return {"preset": self._shape.preset, **self._shape.cluster}

    @cached_property
    def prompter(self) -> Prompter:
        return load_prompter(self._shape.spec)

    def offer(self, load: OfferedLoad) -> LoadOutcome:
        assert self._shape.spec.emulation is not None
        running = self._with(load.max_num_seqs)
        running.check_method(load.policy.method)
        return offer_to(running, load, self._shape.spec.emulation.slow_motion)

    def _with(self, max_num_seqs: int) -> Running:
        if self._started is None or self._started[0] != max_num_seqs:
            self._stop()
            cluster = LocalCluster(self._shape.spec.replaced(max_num_seqs=max_num_seqs))
            cluster.start()
            assert cluster.scheduler is not None
            running = Running.of(cluster.scheduler, cluster.run_id, cluster.check)
            self._started = max_num_seqs, cluster, running
        return self._started[2]

    def _stop(self) -> None:
        if self._started is not None:
            self._started[1].stop()
            self._started = None


@dataclass(frozen=True)
class _Turn:
    """One turn of a conversation: the whole prompt, and what the user says in the turns behind it."""

    prompt: DrawnPrompt
    turn: int
    left: Conversation

    def following(self, answer: str) -> _Turn | None:
        if not self.left:
            return None
        return _Turn(continued_text(self.prompt, answer, self.left[0]), self.turn + 1, self.left[1:])


@dataclass
class _Crowd:
    """Requests at the cluster, and what became of those that have ended. Times are divided by ``slow_motion``."""

    client: Client
    slow_motion: float
    began: float = field(default_factory=time.perf_counter)
    submitted: int = 0
    replies: dict[int, tuple[int, _Turn]] = field(default_factory=dict)  # open, by number: order of submission
    served: dict[int, ServedRequest] = field(default_factory=dict)
    overran: int = 0
    timesteps: int = 0

    def now(self) -> float:
        return (time.perf_counter() - self.began) / self.slow_motion

    def submit(self, asked: _Turn) -> None:
        order, prompt = self.submitted, asked.prompt
        self.submitted += 1
        try:
            self.replies[self.client.submit(prompt.request).number] = order, asked
        except UserError as error:  # the queue is full
            now = self.now()
            self.served[order] = ServedRequest(
                prompt.prompt_set, prompt.index, 0, now, (), now, turn=asked.turn, refused=str(error)
            )

    def end(self, reply: Reply) -> None:
        """An answer is complete, or was refused; then the next turn of its conversation is submitted."""
        order, asked = self.replies.pop(reply.number)
        prompt = asked.prompt
        submitted = (reply.arrivals.submitted - self.began) / self.slow_motion
        events = tuple((submitted + at / self.slow_motion, tokens) for at, tokens in reply.arrivals.events)
        if reply.completion is None:
            self.served[order] = ServedRequest(
                prompt.prompt_set, prompt.index, 0, submitted, events, self.now(), turn=asked.turn, refused=str(reply.error)
            )
            return
        metrics = reply.completion.metrics
        self.overran += len(reply.overran)
        self.timesteps += metrics.timesteps
        self.served[order] = ServedRequest(
            prompt.prompt_set, prompt.index, reply.completion.prompt_tokens, submitted, events,
            submitted + (metrics.e2e_seconds or 0.0) / self.slow_motion, (metrics.queue_seconds or 0.0) / self.slow_motion,
            metrics.timesteps, metrics.hits, metrics.misses, metrics.draft_tokens, turn=asked.turn,
            cached_tokens=metrics.cached_tokens, pauses=metrics.pauses,
        )  # fmt: skip
        following = asked.following(reply.completion.text)
        if following is not None:
            self.submit(following)


def offer_to(running: Running, load: OfferedLoad, slow_motion: float = 1.0) -> LoadOutcome:
    """Offer a load to a cluster. What is refused is counted, and the others go on.

    Raises:
        RankLost, SchedulerLost: the cluster died or stopped answering.
    """
    policy, arrivals = load.policy, load.arrivals
    given = {name: value for name, value in policy.limits.items() if value is not None}
    asked = (
        [replace(says, request=structs.replace(says.request, method=policy.method, options=given)) for says in one]
        for one in load.conversations
    )
    left = deque(_Turn(first, 1, tuple(others)) for first, *others in asked)
    with running.client.cancelling():
        crowd = _Crowd(running.client, slow_motion)
        while left or crowd.replies:
            for _ in arrivals.due(crowd.now(), len(crowd.replies)):
                crowd.submit(left.popleft())
            for reply in running.client.read(_patience(arrivals, crowd)):
                crowd.end(reply)
                load.on_end()
    served = tuple(crowd.served[order] for order in range(crowd.submitted))
    return LoadOutcome(served, overran=crowd.overran / max(1, crowd.timesteps))


def _patience(arrivals: Arrivals, crowd: _Crowd) -> float:
    """Seconds to wait for events before the next request is due."""
    due = arrivals.next_seconds()
    if due is None:
        return _LONGEST_WAIT
    return min(_LONGEST_WAIT, max(0.001, (due - crowd.now()) * crowd.slow_motion))
