"""One fault under load: the requests are asked, the fault comes when one of them has got far enough, all is compared."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pipedec.bench.faults.kinds import Fault
from pipedec.bench.faults.questions import Answer, Question
from pipedec.bench.record import Row
from pipedec.client.client import Client
from pipedec.client.reply import Reply
from pipedec.core import PipedecError
from pipedec.messages import Recovery
from pipedec.scheduler.protocol import ClientCalls, RunStatus

ANSWER_SECONDS = 60.0  # from a fault to the end of all answers; more is a hang
_READ_SECONDS = 0.02


@dataclass
class Asked:
    """A question under way, or answered.

    Attributes:
        said: tokens when the fault came.
    """

    question: Question
    expected: Answer
    reply: Reply
    pieces: list[str] = field(default_factory=list)
    said: int = 0

    @property
    def tokens(self) -> int:
        return sum(count for _, count in self.reply.arrivals.events)

    @property
    def arrivals(self) -> list[float]:
        """When tokens came, in seconds of ``time.perf_counter``."""
        return [self.reply.arrivals.submitted + at for at, _ in self.reply.arrivals.events]

    def row(self) -> Row:
        question = self.question
        return {
            "answer": question.answer, "prompt": question.prompt, "method": question.request.method,
            "said": self.said, "tokens": self.tokens,
        }  # fmt: skip

    def problems(self) -> list[str]:
        """How the answer differs from the expected one; nothing if it does not."""
        if self.reply.completion is None:
            return [f"refused: {self.reply.error}" if self.reply.error else "no answer"]
        return self.expected.differences(Answer.of(self.reply.completion, "".join(self.pieces), self.tokens))


@dataclass
class Load:
    """The requests of a fault, all submitted together.

    Attributes:
        struck: when the fault came, in seconds of ``time.perf_counter``; None before.
        struck_at: the same since the epoch (of the calendar).
        failure: what ended the reading; ``is_hanging``: nothing did.
    """

    client: Client
    asked: list[Asked]
    struck: float | None = None
    struck_at: float = 0.0
    failure: str | None = None
    is_hanging: bool = False

    @classmethod
    def submit(cls, client: Client, questions: Sequence[tuple[Question, Answer]]) -> Load:
        load = cls(client, [])
        for question, expected in questions:
            pieces: list[str] = []
            load.asked.append(Asked(question, expected, client.submit(question.request, pieces.append), pieces))
        return load

    def run(self, fault: Fault, strike: Callable[[], None]) -> None:
        """Read all answers to their ends, and strike on the way. What goes wrong is told by ``failure``."""
        watched = self.asked[fault.watched]
        enough = int(fault.progress * len(watched.expected.token_ids))
        deadline = time.perf_counter() + ANSWER_SECONDS
        try:
            while self.open or self.struck is None:
                if self.struck is None and (watched.tokens >= enough or watched.reply.has_ended):
                    self._strike(strike)
                    deadline = time.perf_counter() + ANSWER_SECONDS
                if time.perf_counter() > deadline:
                    self.is_hanging = True
                    self.failure = f"hang: {len(self.open)} answers have not ended after {ANSWER_SECONDS:.0f} s"
                    return
                self.client.read(_READ_SECONDS)
        except PipedecError as error:
            self.failure = f"{type(error).__name__}: {error}"

    @property
    def open(self) -> list[Asked]:
        return [one for one in self.asked if not one.reply.has_ended]

    def _strike(self, strike: Callable[[], None]) -> None:
        for one in self.asked:
            one.said = one.tokens
        self.struck, self.struck_at = time.perf_counter(), time.time()
        strike()

    def since(self) -> float:
        """Seconds from the fault until now."""
        assert self.struck is not None
        return round(time.perf_counter() - self.struck, 3)

    def row(self, fault: Fault) -> Row:
        """What was hit, and how far the answers were and came."""
        return {
            "kind": fault.kind.name, "rank": fault.rank, "watched": fault.watched, "progress": round(fault.progress, 4),
            "requests": [one.row() for one in self.asked],
        }  # fmt: skip

    def problems(self) -> list[str]:
        """All that must not be."""
        found = [] if self.failure is None else [self.failure]
        for number, one in enumerate(self.asked):
            found += [f"answer {number} ({one.question.answer}): {problem}" for problem in one.problems()]
        return found

    def waits(self, detection: float | None) -> list[float | None]:
        """For each answer the seconds from the fault to the first token of the next epoch; None if it had ended."""
        assert self.struck is not None
        since = self.struck + (detection or 0.0)
        firsts = (next((at for at in one.arrivals if at > since), None) for one in self.asked)
        return [None if first is None else round(first - self.struck, 4) for first in firsts]


def recovery_after(status: RunStatus, epoch: int) -> Recovery | None:
    """The one that ended ``epoch``; None if none has."""
    return next((one for one in status.recoveries if one.epoch > epoch), None)


def recovery_row(recovery: Recovery, struck_at: float) -> Row:
    return {
        "epoch": recovery.epoch, "lost": list(recovery.lost), "reason": recovery.reason,
        "detection_s": round(recovery.at_us / 1e6 - struck_at, 4),
        "served_s": None if recovery.served_us is None else round(recovery.served_us / 1e6 - struck_at, 4),
    }  # fmt: skip


def wait_until_idle(scheduler: ClientCalls, is_done: Callable[[RunStatus], bool], seconds: float) -> RunStatus | None:
    """The state of a run in which nothing runs or waits, and of which ``is_done`` is true; None if it does not come to that."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        status = scheduler.status()
        if status.state == "up" and not (status.is_recovering or status.running or status.waiting) and is_done(status):
            return status
        time.sleep(0.05)
    return None
