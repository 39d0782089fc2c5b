"""Where load is offered: the policy replay, an emulated pipeline in real processes, or a cluster that runs."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import TracebackType

import torch

from pipedec.bench.load import clusters, replayed
from pipedec.bench.load.arrivals import Arrivals
from pipedec.bench.load.questions import RANDOM, random_tokens
from pipedec.bench.load.served import Outcome
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
from pipedec.core import Request, UserError
from pipedec.decoding import Drafter
from pipedec.decoding.controller import CHILDREN
from pipedec.engine.local import LocalPipeline
from pipedec.engine.spec import Cut, Models, PipelineSpec
from pipedec.messages import PromptRequest
from pipedec.model import ModelConfig
from pipedec.text.prompt import Prompter

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
        self, policy: Policy, prompts: Sequence[DrawnPrompt], arrivals: Arrivals, max_num_seqs: int, on_end: Callable[[], None]
    ) -> Outcome:
        """Offer a request for each of ``prompts``, decoded by ``policy``.

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
        self._memos: dict[tuple[int, ...], DraftMemo] = {}

    @property
    def cluster(self) -> Row:
        return {"preset": self._shape.preset, **self._shape.cluster}

    @property
    def is_recording(self) -> bool:
        return self._recording is not None

    @cached_property
    def prompter(self) -> Prompter:
        return self._spec.load_prompter()

    @cached_property
    def vocabulary(self) -> int:
        return ModelConfig.from_directory(self._spec.target).vocab_size

    def offer(
        self, policy: Policy, prompts: Sequence[DrawnPrompt], arrivals: Arrivals, max_num_seqs: int, on_end: Callable[[], None]
    ) -> Outcome:
        assert self._spec.emulation is not None
        self._record(prompts)
        jobs = [self._job(number, prompt, policy) for number, prompt in enumerate(prompts)]
        memos = [self._memo(prompt) for prompt in prompts]
        drafter = self._drafter(policy, memos)
        experience = WatchedExperience(self._spec.topology.num_groups)
        pipeline = ReplayedPipeline(self._spec.emulation, self._spec.topology, drafter, experience)
        outcome = replayed.offer(pipeline, jobs, arrivals, max_num_seqs, self._spec.emulation.kv_tokens, on_end)
        for prompt, memo in zip(prompts, memos, strict=True):
            if self._recording is not None and prompt.prompt_set != RANDOM:
                self._recording.keep(prompt, memo)
        return outcome

    def _drafter(self, policy: Policy, memos: Sequence[DraftMemo]) -> RecordedDrafter | None:
        max_children = max(CHILDREN[-1], policy.limits.get("children") or 0)
        return RecordedDrafter(memos.__getitem__, lambda: self._draft, max_children) if self._spec.draft else None

    def _job(self, number: int, prompt: DrawnPrompt, policy: Policy) -> replayed.Job:
        sampling = prompt.request.sampling
        if prompt.prompt_set == RANDOM:
            answer = random_tokens(random.Random(f"answer {prompt.index}"), sampling.max_tokens, self.vocabulary)
        else:
            assert self._recording is not None
            answer = self._recording.known(prompt)
        request = Request(number, prompt.token_ids, sampling, policy.method, policy.options)
        return replayed.Job(prompt.prompt_set, prompt.index, request, answer)

    def _memo(self, prompt: DrawnPrompt) -> DraftMemo:
        if prompt.token_ids not in self._memos:
            is_kept = self._recording is not None and prompt.prompt_set != RANDOM
            self._memos[prompt.token_ids] = self._recording.memo(prompt) if self._recording and is_kept else DraftMemo()
        return self._memos[prompt.token_ids]

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
        return LocalPipeline.load(PipelineSpec.create(Models(self._spec.target, "none"), Cut(1)))

    @cached_property
    def _draft(self) -> Drafter:
        drafter = self._spec.load_drafter(torch.device("cpu"))
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
        self, policy: Policy, prompts: Sequence[DrawnPrompt], arrivals: Arrivals, max_num_seqs: int, on_end: Callable[[], None]
    ) -> Outcome:
        self._running.check_method(policy.method)
        return _offer_to(self._running, policy, prompts, arrivals, 1.0, on_end)


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
        return self._shape.spec.load_prompter()

    def offer(
        self, policy: Policy, prompts: Sequence[DrawnPrompt], arrivals: Arrivals, max_num_seqs: int, on_end: Callable[[], None]
    ) -> Outcome:
        assert self._shape.spec.emulation is not None
        running = self._with(max_num_seqs)
        running.check_method(policy.method)
        return _offer_to(running, policy, prompts, arrivals, self._shape.spec.emulation.slow_motion, on_end)

    def _with(self, max_num_seqs: int) -> Running:
        if self._started is None or self._started[0] != max_num_seqs:
            self._stop()
            cluster = LocalCluster(replace(self._shape.spec, max_num_seqs=max_num_seqs))
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
    prompts: Sequence[DrawnPrompt],
    arrivals: Arrivals,
    slow_motion: float,
    on_end: Callable[[], None],
) -> Outcome:
    if any(prompt.prompt_set == RANDOM for prompt in prompts):
        raise UserError("random tokens have no text: use --replay")
    given = {name: value for name, value in policy.limits.items() if value is not None}
    requests = [(prompt, replace(prompt.request, method=policy.method, options=given)) for prompt in prompts]
    return clusters.offer(running.client, requests, arrivals, slow_motion, on_end)
