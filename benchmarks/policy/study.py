"""Speculation policies compared offline: recorded answers replayed through the real methods, timestep by timestep.

Owns the order of work. Answers are recorded once (``recording``), the draft model runs only for contexts that no
earlier policy needed (``drafter``), and no stage computes anything (``replay``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from msgspec.structs import replace

from benchmarks.policy.drafter import RecordedDrafter
from benchmarks.policy.recording import AnswerRecording, DraftMemo
from benchmarks.policy.replay import Replayed, ReplayedPipeline, WatchedExperience
from pipedec.bench.grid import SweepProgress
from pipedec.bench.load.offered import Policy
from pipedec.bench.options import Drawing, Preset, StageCount
from pipedec.bench.prompts import DrawnPrompt, draw
from pipedec.bench.record import Row, plain
from pipedec.bench.sweep.pipelines import ModelPair, Shape, emulated, pair_digest
from pipedec.bench.sweep.runners import OneProcess
from pipedec.config import ClusterConfig, Settings
from pipedec.core import Request, SamplingParams, UserError
from pipedec.data import PromptSet
from pipedec.decoding import Drafter
from pipedec.decoding.controller import CHILDREN
from pipedec.engine.build import load_drafter, resolve
from pipedec.flags import check_fields
from pipedec.messages import PromptRequest
from pipedec.model import ModelConfig
from pipedec.text.prompt import Prompter


@dataclass(frozen=True)
class PolicyConfig(Drawing):
    """The policies to compare, and the answers on which.

    Attributes:
        preset: emulated times are those of its devices.
        sampling: how the target decodes; with a temperature, ``seed`` also seeds the tokens.

    Raises:
        UserError: a number below 1, two equal policies, or no such preset.
    """

    cluster: ClusterConfig
    preset: Preset
    policies: tuple[Policy, ...]
    stages: StageCount = None
    sampling: SamplingParams = SamplingParams(max_tokens=64)
    pair: ModelPair = ModelPair()

    def __post_init__(self) -> None:
        self.cluster.find_partition(self.preset)
        check_fields(self)
        for number, policy in enumerate(self.policies):
            if any((one.method, one.limits) == (policy.method, policy.limits) for one in self.policies[:number]):
                raise UserError(f"--policy {policy.name} was given twice: leave one of them out")

    @cached_property
    def shape(self) -> Shape:
        """The emulated pipeline. Raises UserError if the target has too few layers."""
        return emulated(self.cluster, self.preset, self.stages, self.pair, own_work=self.own_work)

    @property
    def request(self) -> PromptRequest:
        """The request for the target's own answer, without a prompt."""
        seeded = replace(self.sampling, seed=self.seed) if self.sampling.is_stochastic else self.sampling
        return PromptRequest("", self.raw_prompts, "pp", seeded)

    @property
    def origin(self) -> Row:
        """The settings that determine the answers besides the prompt, in the form of recordings and of a sweep's rows."""
        return {"pair": pair_digest(self.shape.spec), "sampling": plain(self.request.sampling)}


@dataclass(frozen=True)
class PolicyAnswer:
    """The cost of the answer ``token_ids`` to one prompt under one policy."""

    policy: Policy
    prompt: DrawnPrompt
    token_ids: tuple[int, ...]
    replayed: Replayed


class Study:
    """All policies on pipelines of one shape. A policy keeps what it learns from prompt to prompt, as in a sweep.

    Raises:
        UserError: no prompt of a set fits into the context, a policy cannot run with this pair of models, or ``directory``
            contains another recording.
    """

    def __init__(self, config: PolicyConfig, prompt_sets: Iterable[PromptSet], directory: Path) -> None:
        self._config = config
        self._spec = config.shape.spec
        self._memos: list[DraftMemo] = []  # by request number
        self._pipelines = {policy: self._pipeline(policy) for policy in config.policies}
        self._recording = AnswerRecording(directory, **config.origin)
        for policy in config.policies:  # raises for a policy that cannot run, before anything is recorded
            self._pipelines[policy].check(self._request(policy, 0, (0,)))
        prompter = Prompter(self._spec.target, ModelConfig.from_directory(self._spec.target).max_positions)
        self._prompts = draw(prompter, prompt_sets, config.request, config.samples, config.seed)

    def run(self, progress: SweepProgress) -> Iterator[PolicyAnswer]:
        """Replay every answer under every policy. Answers that the directory does not contain are recorded first."""
        progress.start(len(self._prompts) * len(self._config.policies))
        progress.busy(self._config.shape.label)
        for number, prompt in enumerate(self._prompts):
            token_ids = self._recording.answer(prompt, lambda request: self._target.answer(request).token_ids)
            self._memos.append(self._recording.memo(prompt))
            for policy, pipeline in self._pipelines.items():
                request = self._request(policy, number, prompt.token_ids)
                replayed = pipeline.run_alone(request, token_ids)
                progress.row()
                yield PolicyAnswer(policy, prompt, token_ids, replayed)
            self._recording.keep(prompt, self._memos[number])

    @cached_property
    def _target(self) -> OneProcess:
        return OneProcess(resolve(Settings.of(target=self._spec.target, draft="none", stages=1, dtype=self._spec.dtype)))

    @cached_property
    def _draft(self) -> Drafter:
        drafter = load_drafter(self._spec, torch.device("cpu"))
        assert drafter is not None
        return drafter

    def _pipeline(self, policy: Policy) -> ReplayedPipeline:
        max_children = max(CHILDREN[-1], *(policy.limits.get("children") or 0 for policy in self._config.policies))
        drafter = RecordedDrafter(self._memos.__getitem__, lambda: self._draft, max_children) if self._spec.draft else None
        assert self._spec.emulation is not None
        experience = WatchedExperience(self._spec.topology.num_groups)
        return ReplayedPipeline(self._spec.emulation, self._spec.topology, drafter, experience)

    def _request(self, policy: Policy, number: int, prompt: tuple[int, ...]) -> Request:
        return Request(number, prompt, self._config.request.sampling, policy.method, policy.options)
