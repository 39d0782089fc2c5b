"""``python -m benchmarks.skeleton``: Skeleton-of-Thought (SoT) beside answers in one thread and in decode threads.

"Skeleton-of-Thought: Prompting LLMs for Efficient Parallel Generation", Ning et al. 2023, §2: the model first lists the points of
its answer, then writes all points at the same time. Every point is a request of its own, which sees the skeleton, but no other.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Annotated

import click
from msgspec.structs import replace

from benchmarks.threads.__main__ import measure_threads
from benchmarks.threads.benchmark import SEQUENTIAL, Style, ThreadsConfig, written_fields
from pipedec.bench.record import Row
from pipedec.cli.benchmarks.shared import BenchPromptFlags, OutDirectory, question_options
from pipedec.core.errors import UserError
from pipedec.core.request import TokenizedRequest
from pipedec.engine.local import LocalPipeline
from pipedec.flags import Help, own_options, partial_of, run_command
from pipedec.messages.request import PromptRequest
from pipedec.methods import make_options
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


@dataclass
class Costs:
    """The costs of all requests of one answer together.

    Attributes:
        requests: their number.
        prompt_tokens: of all prompts.
        cached_tokens: those of them that were not computed, because a request before had them.
        timesteps: in which the answer was decoded: those of the first prompt are not counted.
        prefill_ms: until the first request had its first token.
        decode_ms: from then on, the prompts of further requests included.
        prompts_ms: the part of it in which they waited for their first tokens, until the last one of a round had it.
        fill: the number of rows of each group in each of the timesteps.
    """

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    timesteps: int = 0
    hits: int = 0
    misses: int = 0
    prefill_ms: float = 0.0
    decode_ms: float = 0.0
    prompts_ms: float = 0.0
    fill: list[list[int]] = field(default_factory=list)

    def to_row(self) -> Row:
        times = {name: round(getattr(self, name), 3) for name in ("prefill_ms", "decode_ms", "prompts_ms")}
        return {**vars(self), **times}


@dataclass(frozen=True)
class DecodedReply:
    """One request's tokens in the order of decoding, with the end token if there is one."""

    prompt_tokens: int
    token_ids: tuple[int, ...]
    finish_reason: str


class DecodeRounds:
    """One answer: a first request, and rounds of further ones, each round decoded together when what came before has ended.

    The requests share the keys and values of equal beginnings with each other, but with no answer before this one. ``max_tokens``
    holds for every request; each draws with a seed of its own. ``costs`` are those of all requests so far.
    """

    def __init__(self, pipeline: LocalPipeline, prompter: Prompter, request: PromptRequest) -> None:
        assert request.method is not None
        self.request = request
        self.prompter = prompter
        self._pipeline = pipeline
        self._options = make_options(request.method, request.options)
        self.costs = Costs()
        pipeline.forget_prefixes()

    def begin(self, prompt: tuple[int, ...]) -> DecodedReply:
        """The first request's reply."""
        (reply,), total_ms, prefill_ms = self._decode([prompt])
        self._count(self._pipeline.last.metrics.timesteps, total_ms - prefill_ms)
        self.costs.prefill_ms = prefill_ms
        return reply

    def follow(self, prompts: Sequence[tuple[int, ...]]) -> list[DecodedReply]:
        """The replies to further requests, decoded together. Their prompts' time counts."""
        replies, total_ms, prefill_ms = self._decode(prompts)
        self._count(len(self._pipeline.fill), total_ms)
        self.costs.prompts_ms += prefill_ms
        return replies

    def _decode(self, prompts: Sequence[tuple[int, ...]]) -> tuple[list[DecodedReply], float, float]:
        """The replies, the time until all are complete, and until all have begun, in ms."""
        method = self.request.method
        assert method is not None
        requests = []
        for number, prompt in enumerate(prompts):
            sampling = self.request.sampling
            if sampling.seed is not None:
                sampling = replace(sampling, seed=sampling.seed + self.costs.requests + number)
            requests.append(TokenizedRequest(number, prompt, sampling, method, self._options))
        for _ in self._pipeline.run_all({1: requests}):
            pass
        replies, began_ms, ended_ms = [], 0.0, 0.0
        for number, prompt in enumerate(prompts):
            answer = self._pipeline.answers[number]
            metrics = answer.metrics
            self.costs.requests += 1
            self.costs.prompt_tokens += len(prompt)
            self.costs.cached_tokens += metrics.cached_tokens
            self.costs.hits += metrics.hits
            self.costs.misses += metrics.misses
            began_ms = max(began_ms, 1000 * metrics.prefill_seconds)
            ended_ms = max(ended_ms, 1000 * metrics.prefill_seconds + 1000 * metrics.decode_seconds)
            replies.append(DecodedReply(len(prompt), tuple(answer.token_ids), str(answer.finished)))
        return replies, ended_ms, began_ms

    def _count(self, timesteps: int, decode_ms: float) -> None:
        """The last timesteps of a run."""
        self.costs.timesteps += timesteps
        self.costs.decode_ms += decode_ms
        self.costs.fill += self._pipeline.fill[len(self._pipeline.fill) - timesteps :]


@dataclass(frozen=True)
class WrittenAnswer:
    """An answer's tokens and their statistics, as ``written_fields`` describes them."""

    document: list[tuple[object, int]]
    finish_reason: str
    decoded_text: int
    metrics: ThreadMetrics
    anomalies: Mapping[str, int] = field(default_factory=dict)

    def to_row(self) -> Row:
        return written_fields(**vars(self))


@dataclass(frozen=True)
class SkeletonOfThought(Style):
    """The style: a skeleton, then its points together. Without usable points the answer is an ordinary one, in one thread."""

    name = SKELETON
    max_points: int = 16  # further points are left out; as many as the dialects let a thread have children

    @property
    def settings(self) -> str | None:
        prompts = {"skeleton": (SKELETON_PROMPT, SKELETON_BEGUN), "point": (POINT_PROMPT, POINT_BEGUN), "pattern": _POINT.pattern}
        return json.dumps({"name": self.name, "max_points": self.max_points, **prompts})

    def prompt(self, prompter: Prompter, request: PromptRequest) -> tuple[int, ...]:
        """The prompt that asks for the skeleton."""
        return begun_prompt(prompter, request, SKELETON_PROMPT.format(question=_question(request)), SKELETON_BEGUN)

    def answer(self, pipeline: LocalPipeline, prompter: Prompter, request: PromptRequest) -> Row:
        exchange = DecodeRounds(pipeline, prompter, request)
        written = self.write(exchange)
        return {**exchange.costs.to_row(), **written.to_row()}

    def write(self, exchange: DecodeRounds) -> WrittenAnswer:
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
                prompts.append(begun_prompt(prompter, request, asked, point.begun))
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


def begun_prompt(prompter: Prompter, request: PromptRequest, prompt: str, begun: str) -> tuple[int, ...]:
    """The token ids of a prompt and of the beginning of its answer: without a template a line of its own."""
    is_plain, said = request.raw or not prompter.tokenizer.has_chat_template, [{"role": "user", "content": prompt}]
    text = f"{prompt}\n{begun}" if is_plain else prompter.tokenizer.render_chat(said) + begun
    token_ids = tuple(prompter.tokenizer.encode(text, add_special_tokens=is_plain))
    return prompter.token_ids(token_ids, request.raw, request.sampling.max_tokens)


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


# "APAR: LLMs Can Do Auto-Parallel Auto-Regressive Decoding", Tables 1, 2, 7 and 8: APAR-7B. Cached and attended tokens are
# means over the categories that it accelerates.
PAPER_LINES = {"apar": (
    ["apar, the paper's 7B", "Vicuna bench", "", "", "5.1", "81%", "303 / 417", "27%", "166 / 256", "35%", "", "", "", ""],
    ["apar, the paper's 7B", "MT-bench", "", "", "2.7", "37%", "502 / 571", "12%", "418 / 497", "16%", "", "", "", ""],
)}  # fmt: skip
ABOUT = (
    "sot is Skeleton-of-Thought: the skeleton's first token is the answer's, the points are the threads, and their prompts are "
    "part of the answer's time (later prompts: until every point has its first token; the points' tokens alone: what is left). "
    "APAR's saved tokens are those of the categories that it accelerates."
)


@dataclass(frozen=True)
class SkeletonConfig(ThreadsConfig):
    """The configuration of ``python -m benchmarks.threads``, with the style ``sot`` among the dialects."""

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

    Everything else is as `python -m benchmarks.threads` does it.
    """
    measure_threads(measured, asked, out, ABOUT, PAPER_LINES)


if __name__ == "__main__":
    run_command(skeleton)
