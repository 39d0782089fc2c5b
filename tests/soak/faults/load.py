"""One fault under load: the requests are asked, the fault comes when one of them has got far enough, all is compared.

The answers of a cluster that has seen no fault yet, the undisturbed twin, are what is expected.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from benchmarks.output import check_known, write_json
from pipedec.bench.record import Row
from pipedec.client.client import Client
from pipedec.client.reply import Reply
from pipedec.core.completion import Completion
from pipedec.core.errors import PipedecError
from pipedec.core.sampling import SamplingParams
from pipedec.messages.request import PromptRequest
from pipedec.messages.stats import Recovery
from pipedec.scheduler import ClientScheduler
from pipedec.scheduler.protocol import RunStatus
from pipedec.threads import load_dialect
from soak.faults.kinds import Fault

GREEDY, DRAWN, THREADS = ANSWERS = ("greedy", "drawn", "threads")
PROMPTS = (
    "What does shutil.copytree() do?",
    "Give me 5 methods of `pydoc.TextDoc`.",
    "Natalia sold clips to 48 of her friends in April, and then half as many in May. How many did she sell?",
    "A baker makes 24 rolls every morning and sells each for $2. How much does he earn in 5 days?",
    "Write a function that returns the sum of a list.",
    "Name three modules that read files, and what each is for.",
)
_DRAWN = {"temperature": 0.8, "top_p": 0.95}
_TOLERANCE = 1e-3  # of log-probabilities: rows that are computed again may be in other company


@dataclass(frozen=True)
class Question:
    """A request, and what is particular about it."""

    answer: str
    prompt: str
    request: PromptRequest


def make_questions(
    prompts: Sequence[str], answers: Sequence[str], methods: Sequence[str], max_tokens: int, dialect: str
) -> list[Question]:
    """Every prompt with every kind of answer; methods take turns, and every other answer in one thread has log-probabilities.

    Raises UserError if there is no such kind of answer, or no such dialect.
    """
    questions: list[Question] = []
    for answer in answers:
        check_known("kind of answer", answer, ANSWERS)
        for prompt in prompts:
            number = len(questions)
            in_threads = answer == THREADS
            drawn: dict[str, Any] = {**_DRAWN, "seed": number} if answer == DRAWN else {}
            sampling = SamplingParams(
                max_tokens=max_tokens, ignore_eos=not in_threads, logprobs=None if in_threads or number % 2 else 2, **drawn
            )
            threads = load_dialect(dialect).to_json() if in_threads else None
            request = PromptRequest(prompt, method=methods[number % len(methods)], sampling=sampling, threads=threads)
            questions.append(Question(answer, prompt, request))
    return questions


@dataclass(frozen=True)
class Answer:
    """The parts of an answer that no fault may change."""

    token_ids: list[int]
    text: str
    finish_reason: str | None
    logprobs: list[list[float]] | None  # for each token, of the chosen and of the most probable ones, descending
    streamed: str  # the text as it arrived, of an answer in one thread
    streamed_tokens: int  # how many arrived

    @classmethod
    def of(cls, completion: Completion, streamed: str, streamed_tokens: int) -> Answer:
        known = completion.logprobs
        logprobs = None if known is None else [sorted(row.values(), reverse=True) for row in known]
        in_threads = completion.threads is not None
        return cls(
            completion.token_ids, completion.text, completion.finish_reason, logprobs,
            "" if in_threads else streamed, 0 if in_threads else streamed_tokens,
        )  # fmt: skip

    def differences(self, other: Answer) -> list[str]:
        """Where ``other`` is not the same, a line for each."""
        found = []
        if self.token_ids != other.token_ids:
            found.append(f"tokens differ from number {_first_difference(self.token_ids, other.token_ids)} on")
        for name in ("text", "finish_reason", "streamed", "streamed_tokens"):
            mine, its = getattr(self, name), getattr(other, name)
            if mine != its:
                found.append(f"{name} is {str(its)[-60:]!r}, not {str(mine)[-60:]!r}")
        if not _close(self.logprobs, other.logprobs):
            found.append("log-probabilities differ")
        return found


def save_answers(path: Path, key: str, answers: Sequence[Answer]) -> None:
    write_json(path, {"key": key, "answers": [asdict(answer) for answer in answers]})


def load_answers(path: Path, key: str) -> list[Answer] | None:
    """The answers to the same questions; None if the file has none."""
    if not path.is_file():
        return None
    document = json.loads(path.read_text(encoding="utf-8"))
    return [Answer(**fields) for fields in document["answers"]] if document["key"] == key else None


def _first_difference(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(one), len(other)))


def _close(one: list[list[float]] | None, other: list[list[float]] | None) -> bool:
    if one is None or other is None or [len(row) for row in one] != [len(row) for row in other]:
        return one == other
    return all(abs(a - b) <= _TOLERANCE for a, b in zip(chain(*one), chain(*other), strict=True))


ANSWER_SECONDS = 60.0  # from a fault to the end of all answers; more is a hang
_READ_SECONDS = 0.02


@dataclass
class Asked:
    """A question under way, or answered."""

    question: Question
    expected: Answer
    reply: Reply
    pieces: list[str] = field(default_factory=list)
    said: int = 0  # tokens when the fault came

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
    """The requests of a fault, all submitted together."""

    client: Client
    asked: list[Asked]
    struck: float | None = None  # when the fault came, in seconds of ``time.perf_counter``; None before
    struck_at: float = 0.0  # the same since the epoch (of the calendar)
    failure: str | None = None  # what ended the reading; ``is_hanging``: nothing did
    is_hanging: bool = False

    @classmethod
    def submit(cls, client: Client, questions: Sequence[tuple[Question, Answer]]) -> Load:
        load = cls(client, [])
        for question, expected in questions:
            pieces: list[str] = []
            load.asked.append(Asked(question, expected, client.submit(question.request, pieces.append), pieces))
        return load

    def run(self, fault: Fault, strike: Callable[[], None]) -> None:
        """Read all answers to their ends, and strike on the way. ``failure`` holds the error, if there is one."""
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
        """The fault, and how far the answers were then and at the end."""
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


def wait_until_idle(scheduler: ClientScheduler, is_done: Callable[[RunStatus], bool], seconds: float) -> RunStatus | None:
    """The state of a run in which nothing runs or waits, and of which ``is_done`` is true; None if it does not come to that."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        status = scheduler.status()
        if status.state == "up" and not (status.is_recovering or status.running or status.waiting) and is_done(status):
            return status
        time.sleep(0.05)
    return None
