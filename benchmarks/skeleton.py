"""``python -m benchmarks.skeleton``: Skeleton-of-Thought (SoT) beside answers in one thread and in decode threads.

"Skeleton-of-Thought: Prompting LLMs for Efficient Parallel Generation", Ning et al. 2023, §2: the model first lists the points of
its answer, then writes all points at the same time. Every point is a request of its own, which sees the skeleton, but no other.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from typing import Annotated

import click

from pipedec.bench.threads.benchmark import SEQUENTIAL, DecodedReply, DecodeRounds, Style, ThreadsConfig, WrittenAnswer
from pipedec.cli.benchmarks.shared import BenchPromptFlags, OutDirectory, question_options
from pipedec.cli.benchmarks.threads import measure_threads
from pipedec.core import UserError
from pipedec.flags import Help, own_options, partial_of, run_command
from pipedec.messages import PromptRequest
from pipedec.text.prompt import Prompter
from pipedec.threads import ThreadMetrics

SKELETON = "sot"  # its name among dialects
# The authors' prompts for open models: with two demonstrations, and answers that have begun.
SKELETON_PROMPT = """\
You're an organizer responsible for only giving the skeleton (not the full content) for answering the question. Provide the \
skeleton in a list of points (numbered 1., 2., 3., etc.) to answer the question. Instead of writing a full sentence, each \
skeleton point should be very short with only 3~5 words. Generally, the skeleton should have 3~10 points.

Question:
What are the typical types of Chinese dishes?
Skeleton:
1. Dumplings.
2. Noodles.
3. Dim Sum.
4. Hot Pot.
5. Wonton.
6. Ma Po Tofu.
7. Char Siu.
8. Fried Rice.

Question:
What are some practical tips for individuals to reduce their carbon emissions?
Skeleton:
1. Energy conservation.
2. Efficient transportation.
3. Home energy efficiency.
4. Reduce water consumption.
5. Sustainable diet.
6. Sustainable travel.

Now, please provide the skeleton for the following question.
{question}
Skeleton:"""
SKELETON_BEGUN = "1."
POINT_PROMPT = """\
You're responsible for continuing the writing of one and only one point in the overall answer to the following question.

{question}

The skeleton of the answer is

{skeleton}

Continue and only continue the writing of point {number}. Write it **very shortly** in 1~2 sentence and do not continue with \
other points!"""
POINT_BEGUN = "{number}. {outline}"

# Names of what may go wrong; each is counted and resolved by a fixed rule.
NO_POINTS = "skeleton_without_points"
NO_ROOM = "points_without_room"
REPEATED = "repeated_point"
TOO_MANY = "too_many_points"
CUT = "skeleton_cut"

_POINT = re.compile(r"^[ \t]*(\d+)\.[ \t]*(\S.*)$", re.MULTILINE)


@dataclass(frozen=True)
class Point:
    """One point of a skeleton: its number as it was written, and its few words."""

    number: str
    outline: str

    @property
    def begun(self) -> str:
        """The beginning of the point's text."""
        return POINT_BEGUN.format(number=self.number, outline=self.outline)


def read_skeleton(skeleton: str, max_points: int) -> tuple[tuple[Point, ...], Counter[str]]:
    """The points of a skeleton, and the anomalies of those that are left out.

    As in the authors' code, the first point of each number counts; here a point begins at the beginning of a line.
    """
    found = [Point(number, outline.rstrip()) for number, outline in _POINT.findall(skeleton)]
    first = {point.number: point for point in reversed(found)}
    points = [point for point in found if first[point.number] is point]
    counts = {REPEATED: len(found) - len(points), TOO_MANY: max(len(points) - max_points, 0)}
    return tuple(points[:max_points]), +Counter(counts)


@dataclass(frozen=True)
class SkeletonOfThought:
    """The style: a skeleton, then its points together. Without usable points the answer is an ordinary one, in one thread."""

    name: str = SKELETON
    max_points: int = 16  # further points are left out; as many as the dialects let a thread have children

    @property
    def settings(self) -> str | None:
        prompts = {"skeleton": (SKELETON_PROMPT, SKELETON_BEGUN), "point": (POINT_PROMPT, POINT_BEGUN), "pattern": _POINT.pattern}
        return json.dumps({**asdict(self), **prompts})

    def prompt(self, prompter: Prompter, request: PromptRequest) -> tuple[int, ...]:
        """The prompt that asks for the skeleton."""
        return self._tokenized(prompter, request, SKELETON_PROMPT.format(question=_question(request)), SKELETON_BEGUN)

    def answer(self, exchange: DecodeRounds) -> WrittenAnswer:
        """The answer's text is that of the points, each with its number and outline, in the skeleton's order."""
        prompter, request = exchange.prompter, exchange.request
        skeleton = exchange.begin(self.prompt(prompter, request))
        text = SKELETON_BEGUN + prompter.text(skeleton.token_ids)
        points, anomalies = read_skeleton(text, self.max_points)
        anomalies[CUT] += skeleton.finish_reason == "length"
        anomalies[NO_POINTS] += not points
        plain = prompter.token_ids(request.prompt, request.raw, request.sampling.max_tokens)
        question, prompts = _question(request), []
        try:
            for point in points:
                asked = POINT_PROMPT.format(question=question, skeleton=text.rstrip(), number=point.number)
                prompts.append(self._tokenized(prompter, request, asked, point.begun))
        except UserError:
            points, prompts = (), []
            anomalies[NO_ROOM] += 1
        replies = exchange.follow(prompts or [plain])
        begun = [len(prompter.tokenizer.encode(point.begun, add_special_tokens=False)) for point in points]
        written = _Parts(skeleton, prompts or [plain], replies, begun or [0], prompter.tokenizer.all_special_ids)
        given = len(prompter.tokenizer.encode(SKELETON_BEGUN, add_special_tokens=False)) + 1  # with the skeleton's first token
        reasons = [reply.finish_reason for reply in (skeleton, *replies) if reply.finish_reason != "stop"]
        metrics = written.metrics(len(plain))
        return WrittenAnswer(
            written.document, reasons[0] if reasons else "stop", metrics.text_tokens - min(given, sum(begun)), metrics, +anomalies
        )  # fmt: skip

    def _tokenized(self, prompter: Prompter, request: PromptRequest, prompt: str, begun: str) -> tuple[int, ...]:
        return prompter.token_ids(prompt, request.raw, request.sampling.max_tokens, begun=begun)


def _question(request: PromptRequest) -> str:
    """Raises UserError if the prompt is given as token ids."""
    if not isinstance(request.prompt, str):
        raise UserError("Skeleton-of-Thought needs the text of a question, not token ids")
    return request.prompt.strip()


@dataclass(frozen=True)
class _Parts:
    """A skeleton, and prompts and replies of the points, or of the one ordinary answer, that came after it."""

    skeleton: DecodedReply
    prompts: Sequence[tuple[int, ...]]
    replies: Sequence[DecodedReply]
    begun: Sequence[int]  # tokens with which the text of each begins: they were decoded in the skeleton
    special: frozenset[int]  # tokens that are no text

    @property
    def document(self) -> list[tuple[object, int]]:
        parts = enumerate((self.skeleton, *self.replies))
        return [(number, token) for number, part in parts for token in part.token_ids]

    def metrics(self, plain_tokens: int) -> ThreadMetrics:
        """The points are the threads, the skeleton is none. Its tokens count like those of a tag: they are decoded, but no text.

        The same text in one thread comes after the ordinary prompt, of ``plain_tokens``.
        """
        texts = [self._text_tokens(reply) for reply in self.replies]
        begun, count = sum(self.begun), sum(texts) + sum(self.begun)
        chain = len(self.skeleton.token_ids) + max(len(reply.token_ids) for reply in self.replies)
        attended = begun * (self.skeleton.prompt_tokens + (self._text_tokens(self.skeleton) - 1) / 2)
        attended += sum(text * (len(prompt) + (text - 1) / 2) for prompt, text in zip(self.prompts, texts, strict=True))
        return ThreadMetrics(
            threads=len(self.replies),
            tokens=len(self.document),
            text_tokens=count,
            longest_chain=chain,
            parallelism=count / chain if chain else 0.0,
            attended_tokens=attended / count if count else 0.0,
            attended_tokens_flat=plain_tokens + (count - 1) / 2 if count else 0.0,
            max_cached_tokens=max(self.skeleton.prompt_tokens + self._text_tokens(self.skeleton), self._most_cached(texts)),
            max_cached_tokens_flat=plain_tokens + count,
        )

    def _most_cached(self, texts: Sequence[int]) -> int:
        """The maximum, over the steps in which the points are decoded together; what their prompts share counts once."""
        shared = sum(1 for _ in takewhile(lambda tokens: len(set(tokens)) == 1, zip(*self.prompts, strict=False)))
        own = [(len(prompt) - shared, text) for prompt, text in zip(self.prompts, texts, strict=True)]
        return shared + max(sum(prompt + step for prompt, text in own if text >= step) for step in texts)

    def _text_tokens(self, reply: DecodedReply) -> int:
        return sum(token not in self.special for token in reply.token_ids)


ABOUT = (
    "sot is Skeleton-of-Thought: the skeleton's first token is the answer's, the points are the threads, and their prompts are "
    "part of the answer's time (later prompts: until every point has its first token; the points' tokens alone: what is left)."
)


@dataclass(frozen=True)
class SkeletonConfig(ThreadsConfig):
    """The configuration of ``pipedec bench threads``, with the style ``sot`` among the dialects."""

    dialects: Annotated[
        tuple[str, ...],
        Help(f"Dialects by name or file; {SEQUENTIAL}: one thread, the baseline; {SKELETON}: Skeleton-of-Thought, by prompts."),
    ] = (SEQUENTIAL, "apar", "pasta", SKELETON)

    def style(self, dialect: str) -> Style:
        """The style of one of ``dialects``. Raises UserError for an unknown one."""
        return SkeletonOfThought() if dialect == SKELETON else super().style(dialect)


@click.command()
@partial_of(SkeletonConfig, "measured")
@question_options
@own_options
def skeleton(measured: Callable[..., SkeletonConfig], asked: BenchPromptFlags, out: OutDirectory) -> None:
    """Answer every prompt in one thread, in several, and as Skeleton-of-Thought: one row per answer in OUT/rows.jsonl.

    Everything else is as `pipedec bench threads` does it.
    """
    measure_threads(measured, asked, out, ABOUT)


if __name__ == "__main__":
    run_command(skeleton)
