"""What is asked while faults happen, the answers of the undisturbed twin, and how an answer differs from them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipedec.bench.checks import check_known
from pipedec.bench.record import write_json
from pipedec.core import Completion, SamplingParams
from pipedec.messages import PromptRequest
from pipedec.threads import load_dialect

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

    Raises:
        UserError: there is no such kind of answer, or no such dialect.
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
    """What must be the same whatever happens.

    Attributes:
        logprobs: for each token, the log-probabilities of the chosen and of the most probable ones, descending, if asked for.
        streamed: the text as it arrived, of an answer in one thread.
        streamed_tokens: how many arrived.
    """

    token_ids: list[int]
    text: str
    finish_reason: str | None
    logprobs: list[list[float]] | None
    streamed: str
    streamed_tokens: int

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
    """Those of the same questions; None if the file has none."""
    if not path.is_file():
        return None
    document = json.loads(path.read_text(encoding="utf-8"))
    return [Answer(**fields) for fields in document["answers"]] if document["key"] == key else None


def _first_difference(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(one), len(other)))


def _close(one: list[list[float]] | None, other: list[list[float]] | None) -> bool:
    if one is None or other is None:
        return one == other
    if [len(row) for row in one] != [len(row) for row in other]:
        return False
    values = zip((v for row in one for v in row), (v for row in other for v in row), strict=True)
    return all(abs(a - b) <= _TOLERANCE for a, b in values)
