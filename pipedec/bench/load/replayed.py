"""Load on the policy replay: recorded answers through an emulated pipeline that computes nothing, in computed time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from pipedec.bench.load.arrivals import Arrivals
from pipedec.bench.load.served import Outcome, Served
from pipedec.bench.policy.replay import ReplayedAnswer, ReplayedPipeline
from pipedec.bench.prompts import DrawnPrompt
from pipedec.core import Request, UserError


@dataclass(frozen=True)
class Job:
    """A request to offer, and the answer that the target gives.

    Attributes:
        request: its number is replaced by that of its submission.
        turn: of the conversation, from 1.
        following: the next turn, which is submitted when this one is answered.
    """

    prompt: DrawnPrompt
    request: Request
    answer: tuple[int, ...]
    turn: int = 1
    following: Job | None = None


@dataclass
class _Submitted:
    """A request between the client and the end of its answer: when it came, in seconds and in timesteps of the pipeline."""

    job: Job
    request: Request
    seconds: float
    timestep: int
    ttft_timesteps: int | None = None


@dataclass
class _Line:
    """Requests between the client and the pipeline: those that arrive wait until there is a place for them.

    Attributes:
        max_num_seqs: places. Those that have one may still wait for memory.
        on_submit: told the number of each request.
    """

    pipeline: ReplayedPipeline
    arrivals: Arrivals
    jobs: deque[Job]
    max_num_seqs: int
    on_submit: Callable[[int, Job], None]
    submitted: dict[int, _Submitted] = field(default_factory=dict)
    served: dict[int, Served] = field(default_factory=dict)
    rows: int = 0
    _waiting: deque[_Submitted] = field(default_factory=deque)
    _following: deque[Job] = field(default_factory=deque)

    @property
    def unfinished(self) -> int:
        return len(self.submitted) - len(self.served)

    def admit(self) -> None:
        """Before a timestep: what is due is submitted, and what finds a place begins. An idle pipeline lets time pass."""
        self._submit_due()
        if not self.unfinished and self.arrivals.left:
            due = self.arrivals.next_seconds()
            assert due is not None, "requests are left, and none is unfinished"
            self.pipeline.clock.total_ms = max(self.pipeline.clock.total_ms, 1000 * due)
            self._submit_due()
        while self._waiting and self.pipeline.num_running < self.max_num_seqs:
            self._begin(self._waiting.popleft())

    def take(self, answer: ReplayedAnswer) -> bool:
        """Tokens were accepted. Returns whether the answer is complete."""
        submitted = self.submitted[answer.request.number]
        if submitted.ttft_timesteps is None:
            submitted.ttft_timesteps = self.pipeline.timesteps - submitted.timestep
        if answer.finished is None:
            return False
        self._end(answer, submitted)
        return True

    def _end(self, answer: ReplayedAnswer, submitted: _Submitted) -> None:
        number, metrics, job = answer.request.number, answer.metrics, submitted.job
        self.rows += answer.rows
        self.served[number] = Served(
            job.prompt.prompt_set, job.prompt.index, len(job.prompt.token_ids), submitted.seconds, tuple(answer.events),
            self.pipeline.clock.seconds(), answer.began - submitted.seconds, metrics.timesteps, metrics.hits, metrics.misses,
            metrics.draft_tokens, turn=job.turn, cached_tokens=metrics.cached_tokens, pauses=metrics.pauses,
            ttft_timesteps=submitted.ttft_timesteps,
        )  # fmt: skip
        if job.following is not None:
            self._following.append(job.following)

    def _submit_due(self) -> None:
        """The next turns of answered conversations, then new ones."""
        now = self.pipeline.clock.seconds()
        while self._following:
            self._submit(self._following.popleft(), now)
        for due in self.arrivals.due(now, self.unfinished):
            self._submit(self.jobs.popleft(), due)

    def _submit(self, job: Job, seconds: float) -> None:
        number = len(self.submitted)
        submitted = _Submitted(job, replace(job.request, number=number), seconds, self.pipeline.timesteps)
        self.submitted[number] = submitted
        self._waiting.append(submitted)
        self.on_submit(number, job)

    def _begin(self, submitted: _Submitted) -> None:
        try:
            self.pipeline.begin(submitted.request, submitted.job.answer)
        except UserError as error:
            now, prompt = self.pipeline.clock.seconds(), submitted.job.prompt
            self.served[submitted.request.number] = Served(
                prompt.prompt_set, prompt.index, len(prompt.token_ids), submitted.seconds, (), now, turn=submitted.job.turn,
                refused=str(error),
            )  # fmt: skip


def offer(
    pipeline: ReplayedPipeline,
    jobs: list[Job],
    arrivals: Arrivals,
    max_num_seqs: int,
    on_submit: Callable[[int, Job], None] = lambda number, job: None,
    on_end: Callable[[], None] = lambda: None,
) -> Outcome:
    """Offer ``jobs``, in their order, as ``arrivals`` says, and the turns that follow them. Numbers count submissions.

    Args:
        on_submit: called with the number of each request before it begins.
        on_end: called after each answer.
    """
    line = _Line(pipeline, arrivals, deque(jobs), max_num_seqs, on_submit)
    while arrivals.left or line.unfinished:
        for answer in pipeline.run(line.admit):
            if line.take(answer):
                on_end()
    served = tuple(line.served[number] for number in sorted(line.served))
    return Outcome(served, pipeline.timesteps, line.rows, pipeline.own_seconds, pipeline.fill)
