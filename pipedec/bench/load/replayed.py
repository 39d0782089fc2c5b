"""Load on the policy replay: recorded answers through an emulated pipeline without stages, in computed time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from pipedec.bench.load.arrivals import Arrivals
from pipedec.bench.load.served import Outcome, Served
from pipedec.bench.policy.replay import ReplayedAnswer, ReplayedPipeline
from pipedec.core import Request


@dataclass(frozen=True)
class Job:
    """A request to offer, and the answer that the target gives; ``index`` is its prompt's number in the set."""

    prompt_set: str
    index: int
    request: Request
    answer: tuple[int, ...]

    @property
    def kv_tokens(self) -> int:
        """Tokens in the KV caches when it ends."""
        return len(self.request.prompt_token_ids) + len(self.answer)


@dataclass
class _Line:
    """Requests between the client and the pipeline: those that arrive wait until there is a place for them.

    Attributes:
        max_num_seqs: places.
        kv_tokens: tokens for which there is memory; None: for all.
    """

    pipeline: ReplayedPipeline
    arrivals: Arrivals
    jobs: deque[Job]
    max_num_seqs: int
    kv_tokens: int | None
    submitted: dict[int, float] = field(default_factory=dict)
    running: dict[int, tuple[Job, ReplayedAnswer]] = field(default_factory=dict)
    served: dict[int, Served] = field(default_factory=dict)
    rows: int = 0
    _waiting: deque[Job] = field(default_factory=deque)

    def admit(self) -> None:
        """Before a timestep: what is due is submitted, and what finds a place begins. An idle pipeline lets time pass."""
        self._submit()
        if not self._waiting and not self.running and self.arrivals.left:
            due = self.arrivals.next_seconds()
            assert due is not None, "requests are left, and none is unfinished"
            self.pipeline.clock.total_ms = max(self.pipeline.clock.total_ms, 1000 * due)
            self._submit()
        while self._waiting and self._has_place(self._waiting[0]):
            job = self._waiting.popleft()
            self.running[job.request.number] = job, self.pipeline.begin(job.request, job.answer)

    def end(self, answer: ReplayedAnswer) -> None:
        """The answer is complete."""
        number, metrics = answer.request.number, answer.metrics
        job, _ = self.running.pop(number)
        submitted = self.submitted[number]
        self.rows += answer.rows
        self.served[number] = Served(
            job.prompt_set, job.index, len(answer.request.prompt_token_ids), submitted, tuple(answer.events),
            self.pipeline.clock.seconds(), answer.began - submitted, metrics.timesteps, metrics.hits, metrics.misses,
            metrics.draft_tokens,
        )  # fmt: skip

    def _submit(self) -> None:
        now = self.pipeline.clock.seconds()
        for due in self.arrivals.due(now, len(self.running) + len(self._waiting)):
            self._waiting.append(job := self.jobs.popleft())
            self.submitted[job.request.number] = due

    def _has_place(self, job: Job) -> bool:
        used = sum(other.kv_tokens for other, _ in self.running.values())
        has_memory = self.kv_tokens is None or not self.running or used + job.kv_tokens <= self.kv_tokens
        return len(self.running) < self.max_num_seqs and has_memory


def offer(
    pipeline: ReplayedPipeline,
    jobs: list[Job],
    arrivals: Arrivals,
    max_num_seqs: int,
    kv_tokens: int | None = None,
    on_end: Callable[[], None] = lambda: None,
) -> Outcome:
    """Offer ``jobs``, in their order, as ``arrivals`` says.

    Args:
        kv_tokens: tokens of all running requests together for which there is memory.
        on_end: called after each answer.
    """
    line = _Line(pipeline, arrivals, deque(jobs), max_num_seqs, kv_tokens)
    while len(line.served) < len(jobs):
        for answer in pipeline.run(line.admit):
            if answer.finished is not None:
                line.end(answer)
                on_end()
    served = tuple(line.served[job.request.number] for job in jobs)
    return Outcome(served, pipeline.timesteps, line.rows, pipeline.own_seconds, pipeline.fill)
