"""Where load is offered: the policy replay, an emulated pipeline in real processes, or a cluster that runs."""

from __future__ import annotations

import gc
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import TracebackType

import torch
from msgspec import structs

from pipedec.bench.load import clusters, replayed
from pipedec.bench.load.arrivals import Arrivals
from pipedec.bench.load.questions import RANDOM, Conversation, continued, random_tokens
from pipedec.bench.load.served import KVUse, Outcome
from pipedec.bench.policy.drafter import RecordedDrafter
from pipedec.bench.policy.memo import DraftMemo
from pipedec.bench.policy.recording import Recording
from pipedec.bench.policy.replay import ReplayedPipeline, WatchedExperience
from pipedec.bench.policy.study import Policy
from pipedec.bench.prompts import AskedPrompts, DrawnPrompt, Tokenizes
from pipedec.bench.record import Row, plain
from pipedec.bench.sweep.pipelines import RunningShape, Shape, pair_digest
from pipedec.client.running import Running
from pipedec.cluster.local import LocalCluster
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


class Place(ABC):
    """A pipeline to which load is offered. What it has started ends with the context.

    Attributes:
        clock: ``measured`` or ``computed``.
    """

    clock = "measured"

    @property
    @abstractmethod
    def prompter(self) -> Tokenizes:
        """Says whether a prompt fits."""

    @property
    @abstractmethod
    def cluster(self) -> Row:
        """The fields of a row about it."""

    @abstractmethod
    def offer(
        self,
        policy: Policy,
        conversations: Sequence[Conversation],
        arrivals: Arrivals,
        max_num_seqs: int,
        on_end: Callable[[], None],
    ) -> Outcome:
        """Offer ``conversations``, decoded by ``policy``. Their turns follow one another as soon as they are answered.

        Raises:
            UserError: the pipeline cannot decode by it.
            RankLost, SchedulerLost: the cluster died.
        """

    def __enter__(self) -> Place:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        return  # a subclass that starts something ends it


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
            self._recording = Recording(recording, pair_digest(self._spec), plain(asked.sampling))
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

    def offer(
        self,
        policy: Policy,
        conversations: Sequence[Conversation],
        arrivals: Arrivals,
        max_num_seqs: int,
        on_end: Callable[[], None],
    ) -> Outcome:
        emulation = self._spec.emulation
        assert emulation is not None
        jobs = self._jobs(conversations, policy)
        memos: dict[int, DraftMemo] = {}
        kv, draft_kv = self._kv_manager(), self._kv_manager()
        drafter, experience = self._drafter(policy, memos, draft_kv), WatchedExperience(self._spec.topology.num_groups)
        pipeline = ReplayedPipeline(emulation, self._spec.topology, drafter, experience, kv)

        def on_submit(number: int, job: replayed.Job) -> None:
            memos[number] = self._memo(job.prompt)

        gc.collect()
        gc.freeze()  # rank 0 of a cluster has no recordings: to look for garbage among them is no work of its own
        outcome = replayed.offer(pipeline, jobs, arrivals, max_num_seqs, on_submit, on_end)
        self._keep_memos()
        return replace(outcome, kv=KVUse.of(pipeline.kv_slots, kv.capacity, emulation.kv_token_bytes))

    def _kv_manager(self) -> KVManager:
        """Of the memory of the emulated devices."""
        assert self._spec.emulation is not None
        return KVManager(self._spec.emulation.kv_tokens or UNLIMITED, self._spec.kv_block, self._spec.shares_prefixes)

    def _drafter(self, policy: Policy, memos: Mapping[int, DraftMemo], kv: KVManager) -> RecordedDrafter | None:
        max_children = max(CHILDREN[-1], policy.limits.get("children") or 0)
        return RecordedDrafter(memos.__getitem__, lambda: self._draft, max_children, kv) if self._spec.draft else None

    def _jobs(self, conversations: Sequence[Conversation], policy: Policy) -> list[replayed.Job]:
        """The first turns, each with those that follow it. Answers that are not known are recorded, turn by turn; what is
        recorded of the draft model is read."""
        said: list[list[tuple[DrawnPrompt, tuple[int, ...]]]] = [[] for _ in conversations]
        for turn in range(max(map(len, conversations), default=0)):
            prompts = [self._prompt(before, says[turn]) for before, says in zip(said, conversations, strict=True)]
            self._record(prompts)
            for before, prompt in zip(said, prompts, strict=True):
                before.append((prompt, self._answer(prompt)))
                self._memo(prompt)
        return [self._job(turns, policy) for turns in said]

    def _prompt(self, before: Sequence[tuple[DrawnPrompt, tuple[int, ...]]], says: DrawnPrompt) -> DrawnPrompt:
        if not before:
            return says
        bos = None if says.prompt_set == RANDOM else self.prompter.tokenizer.bos_token_id
        return continued(*before[-1], says, bos)

    def _job(self, turns: Sequence[tuple[DrawnPrompt, tuple[int, ...]]], policy: Policy) -> replayed.Job:
        following: replayed.Job | None = None
        for turn, (prompt, answer) in reversed(list(enumerate(turns, start=1))):
            request = Request(0, prompt.token_ids, prompt.request.sampling, policy.method, policy.options)
            following = replayed.Job(prompt, request, answer, turn, following)
        assert following is not None
        return following

    def _answer(self, prompt: DrawnPrompt) -> tuple[int, ...]:
        if prompt.prompt_set == RANDOM:
            source = random.Random(f"answer {prompt.index}")
            return random_tokens(source, prompt.request.sampling.max_tokens, self.vocabulary)
        assert self._recording is not None
        return self._recording.known(prompt)

    def _memo(self, prompt: DrawnPrompt) -> DraftMemo:
        """What the draft model has proposed for a prompt. The file is read before the load begins, since what rank 0 does in the
        meantime counts as its own work."""
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


class OnRunning(Place):
    """A cluster that runs; its own limits count."""

    def __init__(self, running: Running, prompts: Path) -> None:
        self._running = running
        self._shape = RunningShape(running)
        self._prompter = AskedPrompts(running.check_accepts, prompts, self._shape.scope)

    @property
    def prompter(self) -> AskedPrompts:
        return self._prompter

    @property
    def cluster(self) -> Row:
        return {"preset": None, "run": self._running.run_id, **self._shape.cluster}

    def offer(
        self,
        policy: Policy,
        conversations: Sequence[Conversation],
        arrivals: Arrivals,
        max_num_seqs: int,
        on_end: Callable[[], None],
    ) -> Outcome:
        self._running.check_method(policy.method)
        return _offer_to(self._running, policy, conversations, arrivals, 1.0, on_end)


class OnProcesses(Place):
    """An emulated pipeline in real processes, which are started for the first load and whenever their limit changes."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self._started: tuple[int, LocalCluster, Running] | None = None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop()

    @property
    def cluster(self) -> Row:
        return {"preset": self._shape.preset, **self._shape.cluster}

    @cached_property
    def prompter(self) -> Prompter:
        return load_prompter(self._shape.spec)

    def offer(
        self,
        policy: Policy,
        conversations: Sequence[Conversation],
        arrivals: Arrivals,
        max_num_seqs: int,
        on_end: Callable[[], None],
    ) -> Outcome:
        assert self._shape.spec.emulation is not None
        running = self._with(max_num_seqs)
        running.check_method(policy.method)
        return _offer_to(running, policy, conversations, arrivals, self._shape.spec.emulation.slow_motion, on_end)

    def _with(self, max_num_seqs: int) -> Running:
        if self._started is None or self._started[0] != max_num_seqs:
            self._stop()
            cluster = LocalCluster(self._shape.spec.replaced(max_num_seqs=max_num_seqs))
            cluster.start()
            assert cluster.scheduler is not None
            running = Running.of(cluster.scheduler, cluster.run_id, cluster.check)
            self._started = max_num_seqs, cluster, running
        return self._started[2]

    def _stop(self) -> None:
        if self._started is not None:
            self._started[1].stop()
            self._started = None


def _offer_to(
    running: Running,
    policy: Policy,
    conversations: Sequence[Conversation],
    arrivals: Arrivals,
    slow_motion: float,
    on_end: Callable[[], None],
) -> Outcome:
    if any(prompt.prompt_set == RANDOM for prompt, *_ in conversations):
        raise UserError("random tokens have no text: use --replay")
    given = {name: value for name, value in policy.limits.items() if value is not None}
    asked = [
        tuple(replace(says, request=structs.replace(says.request, method=policy.method, options=given)) for says in one)
        for one in conversations
    ]
    return clusters.offer(running.client, asked, arrivals, slow_motion, on_end)
