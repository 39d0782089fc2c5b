"""Load on recorded answers: they pass through an emulated pipeline that computes nothing, in computed time.

``OnReplay`` makes requests of conversations, recording answers that are missing, and ``offer`` brings them to the replay as they
arrive. ``disturbed`` offers a load once more, with one long prompt.
"""

from __future__ import annotations

import gc
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean

import torch

from benchmarks.load.offered import Arrivals, AtTimes, Conversation, OfferedLoad
from benchmarks.load.results import LoadOutcome, ServedRequest
from benchmarks.policy.recording import AnswerRecording, DraftMemo, RecordedDrafter
from benchmarks.policy.replay import ReplayedAnswer, ReplayedPipeline, WatchedExperience
from pipedec.bench.options import DrawnPrompt
from pipedec.bench.policy import Policy
from pipedec.bench.record import Row, plain
from pipedec.bench.sweep.pipelines import Shape, pair_digest
from pipedec.config import Settings
from pipedec.core.errors import UserError
from pipedec.core.request import TokenizedRequest
from pipedec.decoding import Drafter
from pipedec.decoding.controller import CHILDREN
from pipedec.engine.build import load_drafter, load_prompter, resolve
from pipedec.engine.local import LocalPipeline
from pipedec.families import model_config
from pipedec.kv import KVManager
from pipedec.messages.request import PromptRequest
from pipedec.text.prompt import Prompter


def disturbed(load: OfferedLoad, alone: LoadOutcome, place: OnReplay, intruder: Conversation) -> Row:
    """Offer a load once more, with the intruder; ``alone`` is the outcome without it. Returns the row's field ``intruder``."""
    others = load.conversations
    begun = max(one.events[0][0] for one in alone.served)
    together = replace(load, conversations=[*others, intruder], arrivals=AtTimes([0.0] * len(others) + [begun]))
    return disturbance(alone, place.offer(together))


def disturbance(alone: LoadOutcome, disturbed: LoadOutcome) -> Row:
    """The time per token in ms of the other requests of ``disturbed`` while the last one is prefilled, and of those ``alone``."""
    *others, late = disturbed.served
    window = late.submitted, late.events[0][0]
    during, without = (fmean(_tpot_within(one.events, window) for one in several) for several in (others, alone.served))
    times_ms = {"ttft_ms": late.ttft, "tpot_ms": during, "tpot_without_ms": without}
    rounded = {name: round(1000 * seconds, 3) for name, seconds in times_ms.items()}
    return {"prompt_tokens": late.prompt_tokens, **rounded, "ratio": round(during / without, 4)}


def disturbance_text(late: Row) -> str:
    """The field ``intruder`` of a row as a sentence."""
    return (
        f"while {late['prompt_tokens']} prompt tokens are prefilled ({late['ttft_ms']:.0f} ms), the others take "
        f"{late['tpot_ms']:.1f} ms per token, {late['ratio']:.2f} × the {late['tpot_without_ms']:.1f} ms without it"
    )


def _tpot_within(events: Sequence[tuple[float, int]], window: tuple[float, float]) -> float:
    """Seconds per token from the last event before a window, or on its edge, to the first one after it."""
    first = max((at for at, _ in events if at <= window[0]), default=window[0])
    last = min((at for at, _ in events if at >= window[1]), default=window[1])
    return (last - first) / max(1, sum(tokens for at, tokens in events if first < at <= last))


RANDOM = "random"  # the name of their prompt set


def random_prompts(
    tokens: int, vocabulary: int, asked: PromptRequest, count: int, seed: int, turns: int = 1
) -> list[Conversation]:
    """``count`` conversations whose prompts are ``tokens`` random tokens each."""
    source = random.Random(seed)
    prompts = [DrawnPrompt(RANDOM, index, asked, random_tokens(source, tokens, vocabulary)) for index in range(count * turns)]
    return [tuple(prompts[first : first + turns]) for first in range(0, len(prompts), turns)]


def random_tokens(source: random.Random, tokens: int, vocabulary: int) -> tuple[int, ...]:
    return tuple(source.randrange(vocabulary) for _ in range(tokens))


def continued(before: DrawnPrompt, answer: tuple[int, ...], following: DrawnPrompt, bos_token_id: int | None) -> DrawnPrompt:
    """The prompt of the next turn: the whole conversation, token for token, and the user's next message."""
    message = following.token_ids[1:] if following.token_ids[:1] == (bos_token_id,) else following.token_ids
    return replace(following, token_ids=(*before.token_ids, *answer, *message))


UNLIMITED = 2**40  # slots, where the emulated devices are too small even for the weights
_RECORDED_AT_ONCE = 16


@dataclass(frozen=True)
class OfferedRequest:
    """A request to offer, and the answer that the target gives."""

    prompt: DrawnPrompt
    request: TokenizedRequest  # its number is replaced by that of its submission
    answer: tuple[int, ...]
    turn: int = 1  # of the conversation, from 1
    following: OfferedRequest | None = None  # the next turn, which is submitted when this one is answered


@dataclass
class _SubmittedRequest:
    """A request between the client and the end of its answer: when it came, in seconds and in timesteps of the pipeline."""

    job: OfferedRequest
    request: TokenizedRequest
    seconds: float
    timestep: int
    ttft_timesteps: int | None = None


@dataclass
class _WaitingLine:
    """Requests between the client and the pipeline: those that arrive wait until there is a place for them."""

    pipeline: ReplayedPipeline
    arrivals: Arrivals
    jobs: deque[OfferedRequest]
    max_num_seqs: int  # places. Those that have one may still wait for memory
    on_submit: Callable[[int, OfferedRequest], None]  # called with the number of each request
    submitted: dict[int, _SubmittedRequest] = field(default_factory=dict)
    served: dict[int, ServedRequest] = field(default_factory=dict)
    rows: int = 0
    _waiting: deque[_SubmittedRequest] = field(default_factory=deque)
    _following: deque[OfferedRequest] = field(default_factory=deque)

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
        metrics, job = answer.metrics, submitted.job
        self.rows += answer.rows
        self.served[answer.request.number] = ServedRequest(
            job.prompt.prompt_set, job.prompt.index, len(job.prompt.token_ids), submitted.seconds, tuple(answer.events),
            self.pipeline.clock.seconds(), answer.began - submitted.seconds, metrics.timesteps, metrics.hits, metrics.misses,
            metrics.draft_tokens, turn=job.turn, cached_tokens=metrics.cached_tokens, pauses=metrics.pauses,
            ttft_timesteps=submitted.ttft_timesteps,
        )  # fmt: skip
        if job.following is not None:
            self._following.append(job.following)
        return True

    def _submit_due(self) -> None:
        """The next turns of answered conversations, then new ones."""
        now = self.pipeline.clock.seconds()
        while self._following:
            self._submit(self._following.popleft(), now)
        for due in self.arrivals.due(now, self.unfinished):
            self._submit(self.jobs.popleft(), due)

    def _submit(self, job: OfferedRequest, seconds: float) -> None:
        number = len(self.submitted)
        submitted = _SubmittedRequest(job, replace(job.request, number=number), seconds, self.pipeline.timesteps)
        self.submitted[number] = submitted
        self._waiting.append(submitted)
        self.on_submit(number, job)

    def _begin(self, submitted: _SubmittedRequest) -> None:
        try:
            self.pipeline.begin(submitted.request, submitted.job.answer)
        except UserError as error:
            now, prompt = self.pipeline.clock.seconds(), submitted.job.prompt
            self.served[submitted.request.number] = ServedRequest(
                prompt.prompt_set, prompt.index, len(prompt.token_ids), submitted.seconds, (), now, turn=submitted.job.turn,
                refused=str(error),
            )  # fmt: skip


def offer(
    pipeline: ReplayedPipeline,
    jobs: list[OfferedRequest],
    arrivals: Arrivals,
    max_num_seqs: int,
    on_submit: Callable[[int, OfferedRequest], None] = lambda number, job: None,
    on_end: Callable[[], None] = lambda: None,
) -> LoadOutcome:
    """Offer ``jobs`` in their order, at the times of ``arrivals``, and the turns that follow them. Numbers count submissions.

    ``on_submit`` is called with the number of each request before it begins, ``on_end`` after each answer.
    """
    line = _WaitingLine(pipeline, arrivals, deque(jobs), max_num_seqs, on_submit)
    while arrivals.left or line.unfinished:
        for answer in pipeline.run(line.admit):
            if line.take(answer):
                on_end()
    served = tuple(line.served[number] for number in sorted(line.served))
    return LoadOutcome(served, pipeline.timesteps, line.rows, pipeline.own_seconds, pipeline.fill)


def kv_use(slots: Sequence[int], capacity: int, slot_bytes: int) -> Row:
    """A row's field ``kv``.

    Args:
        slots: by timestep those of running requests; shared ones count once.
        capacity: slots of every rank's pool.
        slot_bytes: of one slot on all ranks together.
    """
    peak = max(slots, default=0)
    return {
        "capacity_slots": capacity, "peak_slots": peak, "peak_bytes": peak * slot_bytes,
        "peak_utilisation": round(peak / capacity, 4),
        "mean_utilisation": round(sum(slots) / len(slots) / capacity if slots else 0.0, 4),
    }  # fmt: skip


class OnReplay:
    """Recorded answers through an emulated pipeline, in computed time. Missing answers are recorded by the target itself.

    ``recording`` keeps answers and the draft's candidates; None keeps nothing, for random prompts.
    """

    def __init__(self, shape: Shape, recording: Path | None, asked: PromptRequest, prunes_at_once: bool = True) -> None:
        self._spec, self._prunes_at_once = shape.spec, prunes_at_once
        self._recording = None
        if recording is not None:
            self._recording = AnswerRecording(recording, pair_digest(self._spec), plain(asked.sampling))
        self._memos: dict[tuple[int, ...], tuple[DrawnPrompt, DraftMemo]] = {}
        self.prompter: Prompter = load_prompter(shape.spec)
        self.cluster = {"preset": shape.preset, **shape.cluster} | ({} if prunes_at_once else {"dispatch": "windows"})

    @cached_property
    def vocabulary(self) -> int:
        return model_config(self._spec.target).vocab_size

    def offer(self, load: OfferedLoad) -> LoadOutcome:
        """Offer a load. The turns of a conversation follow one another as soon as they are answered.

        Raises UserError if the pipeline cannot decode by the load's policy.
        """
        emulation = self._spec.emulation
        assert emulation is not None
        jobs = self._jobs(load.conversations, load.policy)
        memos: dict[int, DraftMemo] = {}
        kv, draft_kv = (
            KVManager(emulation.kv_tokens or UNLIMITED, self._spec.kv_block, self._spec.shares_prefixes) for _ in range(2)
        )  # slots for the KV memory of the emulated devices
        most = max(CHILDREN[-1], load.policy.limits.get("children") or 0)
        drafter = RecordedDrafter(memos.__getitem__, lambda: self._draft, most, draft_kv) if self._spec.draft else None
        experience = WatchedExperience(self._spec.settings.passage, expected_ms=self._spec.expected_ms)
        pipeline = ReplayedPipeline(emulation, self._spec.topology, drafter, experience, kv, self._prunes_at_once)

        def on_submit(number: int, job: OfferedRequest) -> None:
            memos[number] = self._memo(job.prompt)

        gc.collect()
        gc.freeze()  # rank 0 of a cluster has no recordings: to look for garbage among them is no work of its own
        outcome = offer(pipeline, jobs, load.arrivals, load.max_num_seqs, on_submit, load.on_end)
        for prompt, memo in self._memos.values():
            if self._recording is not None and prompt.prompt_set != RANDOM:
                self._recording.keep(prompt, memo)
        return replace(outcome, kv=kv_use(pipeline.kv_slots, kv.capacity, emulation.kv_token_bytes))

    def _jobs(self, conversations: Sequence[Conversation], policy: Policy) -> list[OfferedRequest]:
        """The first turns, each with those that follow it. Answers that are not known are recorded, turn by turn; what is
        recorded of the draft model is read."""
        asked: list[list[tuple[DrawnPrompt, tuple[int, ...]]]] = [[] for _ in conversations]
        for turn in range(max(map(len, conversations), default=0)):
            prompts = [says[turn] for says in conversations]
            if turn > 0:
                tokenizer = self.prompter.tokenizer
                begins = tokenizer.special_tokens.get("bos_token", "")
                bos = None if prompts[0].prompt_set == RANDOM else tokenizer.token_id(begins)
                prompts = [continued(*before[-1], says, bos) for before, says in zip(asked, prompts, strict=True)]
            self._record(prompts)
            for before, prompt in zip(asked, prompts, strict=True):
                before.append((prompt, self._answer(prompt)))
                self._memo(prompt)
        jobs = []
        for turns in asked:
            following: OfferedRequest | None = None
            for turn, (prompt, answer) in reversed(list(enumerate(turns, start=1))):
                request = TokenizedRequest(0, prompt.token_ids, prompt.request.sampling, policy.method, policy.options)
                following = OfferedRequest(prompt, request, answer, turn, following)
            assert following is not None
            jobs.append(following)
        return jobs

    def _answer(self, prompt: DrawnPrompt) -> tuple[int, ...]:
        if prompt.prompt_set == RANDOM:
            source = random.Random(f"answer {prompt.index}")
            return random_tokens(source, prompt.request.sampling.max_tokens, self.vocabulary)
        assert self._recording is not None
        return self._recording.known(prompt)

    def _memo(self, prompt: DrawnPrompt) -> DraftMemo:
        """The recorded candidates of the draft model for a prompt.

        The file is read before the load begins, since what rank 0 does in the meantime counts as its own work.
        """
        if prompt.token_ids not in self._memos:
            recording = None if prompt.prompt_set == RANDOM else self._recording
            self._memos[prompt.token_ids] = prompt, recording.memo(prompt) if recording else DraftMemo()
        return self._memos[prompt.token_ids][1]

    def _record(self, prompts: Sequence[DrawnPrompt]) -> None:
        """Let the target answer the prompts whose answers are not recorded, several at once."""
        if self._recording is None:
            return
        missing = list({p.token_ids: p for p in prompts if p.prompt_set != RANDOM and not self._recording.knows(p)}.values())
        for first in range(0, len(missing), _RECORDED_AT_ONCE):
            some = missing[first : first + _RECORDED_AT_ONCE]
            requests = [TokenizedRequest(number, one.token_ids, one.request.sampling, "pp") for number, one in enumerate(some)]
            for _ in self._target.run_all({1: requests}):
                pass
            for number, one in enumerate(some):
                self._recording.add(one, tuple(self._target.answers[number].token_ids))

    @cached_property
    def _target(self) -> LocalPipeline:
        return LocalPipeline.load(resolve(Settings.of(target=self._spec.target, draft="none", stages=1, dtype=self._spec.dtype)))

    @cached_property
    def _draft(self) -> Drafter:
        drafter = load_drafter(self._spec, torch.device("cpu"))
        assert drafter is not None
        return drafter
