"""``pipedec bench load``: the grid, one row for each method, load and limit, and the pipelines to which loads are offered.

A pipeline is emulated in real processes, which may run in slow motion, or is a cluster that runs.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Annotated

from msgspec import structs

from pipedec.bench.load.offered import Conversation, OfferedLoad, Pattern, Policy, continued_text
from pipedec.bench.load.results import Goals, LoadOutcome, ServedRequest
from pipedec.bench.options import AskedPrompts, Counts, DrawnPrompt, Positive, Tokenizes
from pipedec.bench.record import Row, SweepProgress, header, plain
from pipedec.bench.sweep.pipelines import Shape, running_shape
from pipedec.bench.sweep.runners import started
from pipedec.client.client import Client
from pipedec.client.reply import Reply
from pipedec.client.running import Running
from pipedec.cluster.local import LocalCluster
from pipedec.core.errors import UserError
from pipedec.core.limits import MAX_NUM_SEQS
from pipedec.core.sampling import SamplingParams
from pipedec.engine.build import load_prompter
from pipedec.flags import Help, check_fields
from pipedec.messages.request import PromptRequest

SCHEMA = "pipedec.load/1"
_LONGEST_WAIT = 0.25


@dataclass(frozen=True)
class LoadConfig:
    """The grid of a load benchmark: all methods get the same prompts in the same order, with every load and limit.

    Raises UserError if there is no load, or a number is below 1.
    """

    policies: tuple[Policy, ...]
    patterns: tuple[Pattern, ...]
    requests: Annotated[Positive | None, Help("Requests of each load (default: 4 × concurrency, or 64).")] = None
    max_num_seqs: Annotated[
        Counts, Help("Maximum number of requests in the pipeline at the same time; with 1, one is answered after the other.")
    ] = (MAX_NUM_SEQS,)
    goals: Goals = Goals()
    seed: int = 0
    sampling: SamplingParams = SamplingParams(max_tokens=64)
    turns: Annotated[
        Positive,
        Help("Turns of each conversation: the next prompt of the set follows the whole conversation once it is answered."),
    ] = 1

    def __post_init__(self) -> None:
        if not self.patterns:
            raise UserError("no load: give --concurrency N or --rate R")
        check_fields(self)

    def count(self, pattern: Pattern) -> int:
        """Conversations of a load."""
        return self.requests or 4 * (pattern.concurrency or 16)

    def request(self, raw: bool) -> PromptRequest:
        """A request without a prompt; ``raw`` for prompts without the chat template."""
        sampling = structs.replace(self.sampling, seed=self.seed) if self.sampling.is_stochastic else self.sampling
        return PromptRequest("", raw, "pp", sampling)

    @property
    def most(self) -> int:
        return max(map(self.count, self.patterns))

    @property
    def runs(self) -> int:
        """Answers of all loads."""
        return sum(map(self.count, self.patterns)) * self.turns * len(self.policies) * len(self.max_num_seqs)


@dataclass(frozen=True)
class MeasuredLoad:
    """One load by one method, with its outcome and its row."""

    load: OfferedLoad
    outcome: LoadOutcome
    row: Row


def bench_load(
    config: LoadConfig, place: Place, conversations: Sequence[Conversation], progress: SweepProgress
) -> Iterator[MeasuredLoad]:
    """Offer every load to ``place``, by every method. Shorter loads take the first of ``conversations``."""
    progress.start(config.runs)
    first = {"schema": SCHEMA, **header("load", {**plain(config), "clock": place.clock})}
    for limit, pattern, policy in product(config.max_num_seqs, config.patterns, config.policies):
        progress.busy(f"{policy.name}, {pattern.label}")
        count = config.count(pattern)
        load = OfferedLoad(policy, conversations[:count], pattern.arrivals(count, config.seed), limit, progress.row)
        outcome = place.offer(load)
        row: Row = {
            **first, "policy": policy.name, "method": policy.method, "options": policy.limits,
            "pattern": asdict(pattern), "max_num_seqs": limit, "clock": place.clock, "cluster": place.cluster,
            **outcome.figures(pattern.concurrency, config.goals),
            "served": [asdict(one) for one in outcome.served],
        }  # fmt: skip
        yield MeasuredLoad(load, outcome, row)


class Place(ABC):
    """A pipeline to which load is offered, with ``measured`` or ``computed`` times."""

    clock = "measured"
    prompter: Tokenizes  # decides whether a prompt fits
    cluster: Row  # a row's fields about the pipeline

    @abstractmethod
    def offer(self, load: OfferedLoad) -> LoadOutcome:
        """Offer a load. The turns of a conversation follow one another as soon as they are answered.

        Raises UserError if the pipeline cannot decode by the load's policy, RankLost or SchedulerLost if the cluster died.
        """


class OnRunning(Place):
    """A cluster that runs, with its own limits."""

    def __init__(self, running: Running, prompts: Path) -> None:
        shape = running_shape(running)
        self._running = running
        self.prompter = AskedPrompts(running.check_accepts, prompts, shape.scope)
        self.cluster = {"preset": None, "run": running.run_id, **shape.cluster}

    def offer(self, load: OfferedLoad) -> LoadOutcome:
        return offer_to(self._running, load)


class OnProcesses(Place):
    """An emulated pipeline in real processes, which are started for the first load and whenever their limit changes.

    They end with ``clusters``.
    """

    def __init__(self, shape: Shape, clusters: ExitStack) -> None:
        self._shape = shape
        self._stack = clusters
        self._started: tuple[int, Running] | None = None  # with its max_num_seqs
        self.prompter = load_prompter(shape.spec)
        self.cluster = {"preset": shape.preset, **shape.cluster}

    def offer(self, load: OfferedLoad) -> LoadOutcome:
        assert self._shape.spec.emulation is not None
        if self._started is None or self._started[0] != load.max_num_seqs:
            self._stack.close()
            cluster = LocalCluster(self._shape.spec.replaced(max_num_seqs=load.max_num_seqs))
            self._started = load.max_num_seqs, started(cluster, self._stack)
        return offer_to(self._started[1], load, self._shape.spec.emulation.slow_motion)


@dataclass(frozen=True)
class _Turn:
    """One turn of a conversation: the whole prompt, and the user's texts of the turns after it."""

    prompt: DrawnPrompt
    turn: int
    left: Conversation


@dataclass
class _Crowd:
    """The requests of a load: those the cluster has, and the outcomes of the others. Times are divided by ``slow_motion``."""

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
            self._refuse(order, asked, self.now(), (), error)

    def end(self, reply: Reply) -> None:
        """An answer is complete, or was refused; then the next turn of its conversation is submitted."""
        order, asked = self.replies.pop(reply.number)
        prompt, completion = asked.prompt, reply.completion
        submitted = (reply.arrivals.submitted - self.began) / self.slow_motion
        events = tuple((submitted + at / self.slow_motion, tokens) for at, tokens in reply.arrivals.events)
        if completion is None:
            self._refuse(order, asked, submitted, events, reply.error)
            return
        metrics = completion.metrics
        self.overran += len(reply.overran)
        self.timesteps += metrics.timesteps
        self.served[order] = ServedRequest(
            prompt.prompt_set, prompt.index, completion.prompt_tokens, submitted, events,
            submitted + (metrics.e2e_seconds or 0.0) / self.slow_motion, (metrics.queue_seconds or 0.0) / self.slow_motion,
            metrics.timesteps, metrics.hits, metrics.misses, metrics.draft_tokens, turn=asked.turn,
            cached_tokens=metrics.cached_tokens, pauses=metrics.pauses,
        )  # fmt: skip
        if asked.left:
            following = continued_text(prompt, completion.text, asked.left[0])
            self.submit(_Turn(following, asked.turn + 1, asked.left[1:]))

    def _refuse(self, order: int, asked: _Turn, submitted: float, events: tuple[tuple[float, int], ...], reason: object) -> None:
        prompt, now = asked.prompt, self.now()
        self.served[order] = ServedRequest(
            prompt.prompt_set, prompt.index, 0, submitted, events, now, turn=asked.turn, refused=str(reason)
        )


def offer_to(running: Running, load: OfferedLoad, slow_motion: float = 1.0) -> LoadOutcome:
    """``Place.offer`` on a running cluster. Requests that are refused are counted, and the others go on."""
    policy, arrivals = load.policy, load.arrivals
    running.check_method(policy.method)
    options = {name: value for name, value in policy.limits.items() if value is not None}
    left = deque[_Turn]()
    for conversation in load.conversations:
        first, *others = (
            replace(prompt, request=structs.replace(prompt.request, method=policy.method, options=options))
            for prompt in conversation
        )
        left.append(_Turn(first, 1, tuple(others)))
    with running.client.cancelling():
        crowd = _Crowd(running.client, slow_motion)
        while left or crowd.replies:
            for _ in arrivals.due(crowd.now(), len(crowd.replies)):
                crowd.submit(left.popleft())
            due = arrivals.next_seconds()
            patience = _LONGEST_WAIT if due is None else max(0.001, (due - crowd.now()) * slow_motion)
            for reply in running.client.read(min(_LONGEST_WAIT, patience)):
                crowd.end(reply)
                load.on_end()
    served = tuple(crowd.served[order] for order in range(crowd.submitted))
    return LoadOutcome(served, overran=crowd.overran / max(1, crowd.timesteps))
