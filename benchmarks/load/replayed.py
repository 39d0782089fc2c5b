"""Load on recorded answers: they pass through an emulated pipeline that computes nothing, in computed time.

``offer`` brings requests to the replay as they arrive. ``OnReplay`` makes these requests of conversations, and records answers
that are missing.
"""

from __future__ import annotations

import gc
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import torch

from benchmarks.load.random_prompts import RANDOM, continued, random_tokens
from benchmarks.policy.drafter import RecordedDrafter
from benchmarks.policy.recording import AnswerRecording, DraftMemo
from benchmarks.policy.replay import ReplayedAnswer, ReplayedPipeline, WatchedExperience
from pipedec.bench.load.benchmark import Place
from pipedec.bench.load.offered import Arrivals, Conversation, OfferedLoad, Policy
from pipedec.bench.load.results import LoadOutcome, ServedRequest
from pipedec.bench.prompts import DrawnPrompt
from pipedec.bench.record import Row, plain
from pipedec.bench.sweep.pipelines import Shape, pair_digest
from pipedec.config import Settings
from pipedec.core import Request, UserError
from pipedec.decoding import Drafter
from pipedec.decoding.controller import CHILDREN
from pipedec.engine.build import load_drafter, load_prompter, resolve
from pipedec.engine.local import LocalPipeline
from pipedec.kv import KVManager
from pipedec.messages import PromptRequest
from pipedec.model import ModelConfig
from pipedec.text.prompt import Prompter

UNLIMITED = 2**40  # slots, where the emulated devices are too small even for the weights
_RECORDED_AT_ONCE = 16


@dataclass(frozen=True)
class OfferedRequest:
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
    following: OfferedRequest | None = None


@dataclass
class _SubmittedRequest:
    """A request between the client and the end of its answer: when it came, in seconds and in timesteps of the pipeline."""

    job: OfferedRequest
    request: Request
    seconds: float
    timestep: int
    ttft_timesteps: int | None = None


@dataclass
class _WaitingLine:
    """Requests between the client and the pipeline: those that arrive wait until there is a place for them.

    Attributes:
        max_num_seqs: places. Those that have one may still wait for memory.
        on_submit: called with the number of each request.
    """

    pipeline: ReplayedPipeline
    arrivals: Arrivals
    jobs: deque[OfferedRequest]
    max_num_seqs: int
    on_submit: Callable[[int, OfferedRequest], None]
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
        self._end(answer, submitted)
        return True

    def _end(self, answer: ReplayedAnswer, submitted: _SubmittedRequest) -> None:
        number, metrics, job = answer.request.number, answer.metrics, submitted.job
        self.rows += answer.rows
        self.served[number] = ServedRequest(
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
    """Offer ``jobs``, in their order, as ``arrivals`` says, and the turns that follow them. Numbers count submissions.

    Args:
        on_submit: called with the number of each request before it begins.
        on_end: called after each answer.
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


class OnReplay(Place):
    """Recorded answers through an emulated pipeline, in computed time. Missing answers are recorded by the target itself.

    Args:
        shape: the emulated pipeline.
        recording: where answers and the draft's candidates are kept; None keeps nothing, for random prompts.
    """

    clock = "computed"

    def __init__(self, shape: Shape, recording: Path | None, asked: PromptRequest) -> None:
        self._shape = shape
        self._spec = shape.spec
        self._recording = None
        if recording is not None:
            self._recording = AnswerRecording(recording, pair_digest(self._spec), plain(asked.sampling))
        self._memos: dict[tuple[int, ...], tuple[DrawnPrompt, DraftMemo]] = {}

    @property
    def cluster(self) -> Row:
        return {"preset": self._shape.preset, **self._shape.cluster}

    @property
    def is_recording(self) -> bool:
        return self._recording is not None

    @cached_property
    def prompter(self) -> Prompter:
        return load_prompter(self._spec)

    @cached_property
    def vocabulary(self) -> int:
        return ModelConfig.from_directory(self._spec.target).vocab_size

    def offer(self, load: OfferedLoad) -> LoadOutcome:
        emulation = self._spec.emulation
        assert emulation is not None
        jobs = self._jobs(load.conversations, load.policy)
        memos: dict[int, DraftMemo] = {}
        kv, draft_kv = self._kv_manager(), self._kv_manager()
        drafter, experience = self._drafter(load.policy, memos, draft_kv), WatchedExperience(self._spec.topology.num_groups)
        pipeline = ReplayedPipeline(emulation, self._spec.topology, drafter, experience, kv)

        def on_submit(number: int, job: OfferedRequest) -> None:
            memos[number] = self._memo(job.prompt)

        gc.collect()
        gc.freeze()  # rank 0 of a cluster has no recordings: to look for garbage among them is no work of its own
        outcome = offer(pipeline, jobs, load.arrivals, load.max_num_seqs, on_submit, load.on_end)
        self._keep_memos()
        return replace(outcome, kv=kv_use(pipeline.kv_slots, kv.capacity, emulation.kv_token_bytes))

    def _kv_manager(self) -> KVManager:
        """Slots for the KV memory of the emulated devices."""
        assert self._spec.emulation is not None
        return KVManager(self._spec.emulation.kv_tokens or UNLIMITED, self._spec.kv_block, self._spec.shares_prefixes)

    def _drafter(self, policy: Policy, memos: Mapping[int, DraftMemo], kv: KVManager) -> RecordedDrafter | None:
        max_children = max(CHILDREN[-1], policy.limits.get("children") or 0)
        return RecordedDrafter(memos.__getitem__, lambda: self._draft, max_children, kv) if self._spec.draft else None

    def _jobs(self, conversations: Sequence[Conversation], policy: Policy) -> list[OfferedRequest]:
        """The first turns, each with those that follow it. Answers that are not known are recorded, turn by turn; what is
        recorded of the draft model is read."""
        asked: list[list[tuple[DrawnPrompt, tuple[int, ...]]]] = [[] for _ in conversations]
        for turn in range(max(map(len, conversations), default=0)):
            prompts = [self._prompt(before, says[turn]) for before, says in zip(asked, conversations, strict=True)]
            self._record(prompts)
            for before, prompt in zip(asked, prompts, strict=True):
                before.append((prompt, self._answer(prompt)))
                self._memo(prompt)
        return [self._job(turns, policy) for turns in asked]

    def _prompt(self, before: Sequence[tuple[DrawnPrompt, tuple[int, ...]]], says: DrawnPrompt) -> DrawnPrompt:
        if not before:
            return says
        bos = None if says.prompt_set == RANDOM else self.prompter.tokenizer.bos_token_id
        return continued(*before[-1], says, bos)

    def _job(self, turns: Sequence[tuple[DrawnPrompt, tuple[int, ...]]], policy: Policy) -> OfferedRequest:
        following: OfferedRequest | None = None
        for turn, (prompt, answer) in reversed(list(enumerate(turns, start=1))):
            request = Request(0, prompt.token_ids, prompt.request.sampling, policy.method, policy.options)
            following = OfferedRequest(prompt, request, answer, turn, following)
        assert following is not None
        return following

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

    def _keep_memos(self) -> None:
        for prompt, memo in self._memos.values():
            if self._recording is not None and prompt.prompt_set != RANDOM:
                self._recording.keep(prompt, memo)

    def _record(self, prompts: Sequence[DrawnPrompt]) -> None:
        """Let the target answer the prompts whose answers are not recorded, several at once."""
        if self._recording is None:
            return
        missing = list({p.token_ids: p for p in prompts if p.prompt_set != RANDOM and not self._recording.knows(p)}.values())
        for first in range(0, len(missing), _RECORDED_AT_ONCE):
            some = missing[first : first + _RECORDED_AT_ONCE]
            requests = [Request(number, one.token_ids, one.request.sampling, "pp") for number, one in enumerate(some)]
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
