"""Speculation policies compared offline: recorded answers replayed through the real methods, timestep by timestep.

Owns the policies and the order of work. Answers are recorded once (``policy_recording``), the draft is asked only for contexts
that no earlier policy met (``policy_drafter``), and no stage computes anything (``policy_replay``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch

from pipedec.bench.policy_drafter import RecordedDrafter
from pipedec.bench.policy_memo import DraftMemo
from pipedec.bench.policy_recording import DrawnPrompt, Origin, RecordedAnswer, Recording, draw
from pipedec.bench.policy_replay import Replayed, ReplayedPipeline, WatchedExperience
from pipedec.bench.sweep import SweepProgress
from pipedec.bench.sweep_runners import OneProcess
from pipedec.bench.sweep_shapes import Pair, Shape, digest, emulated
from pipedec.config import ClusterConfig
from pipedec.core import Request, SamplingParams, TreeParams, UserError
from pipedec.decoding import DEFAULT_METHOD, METHODS, Drafter, create_method
from pipedec.decoding.controller import CHILDREN
from pipedec.engine.messages import PromptRequest
from pipedec.engine.prompt import Prompter
from pipedec.engine.prompt_set import PromptSet
from pipedec.engine.spec import PipelineSpec
from pipedec.model import ModelConfig

# The limits of the tree that each method heeds.
LIMITS: dict[str, tuple[str, ...]] = {
    "pp": (),
    "stpp": ("width", "children", "depth", "rows"),
    "pipedec": ("width", "children"),
    DEFAULT_METHOD: ("width", "children", "forwards", "proposers"),
}


@dataclass(frozen=True)
class Policy:
    """A method with limits of its tree; ``name`` is what the user wrote."""

    name: str
    method: str
    tree: TreeParams

    @classmethod
    def parse(cls, text: str) -> Policy:
        """``METHOD[:KEY=VALUE,…]``, like ``pipedec-bestfirst:width=64,proposers=draft+ngrams``.

        Raises:
            UserError: it is not of this form, or the method has no such limit.
        """
        method, _, settings = text.partition(":")
        if method not in METHODS:
            raise UserError(f"--policy {text}: unknown method {method!r}; choose one of {', '.join(METHODS)}")
        limits = dict(_limit(text, method, setting) for setting in settings.split(",") if settings)
        return cls(text, method, TreeParams(**limits))

    @property
    def effective(self) -> dict[str, Any]:
        """The limits that the method heeds, the paper's where it takes those."""
        limits = self.tree if self.method == DEFAULT_METHOD else self.tree.with_defaults()
        return {name: getattr(limits, name) for name in LIMITS[self.method]}


def _limit(policy: str, method: str, setting: str) -> tuple[str, Any]:
    name, _, value = setting.partition("=")
    if name not in LIMITS[method]:
        known = ", ".join(LIMITS[method]) or "none"
        raise UserError(f"--policy {policy}: {method} has no limit {name!r}; it has {known}")
    if name == "proposers":
        return name, tuple(value.split("+"))
    try:
        return name, int(value)
    except ValueError:
        raise UserError(f"--policy {policy}: {name} must be a whole number, not {value!r}") from None


@dataclass(frozen=True)
class PolicyConfig:
    """What is compared.

    Attributes:
        preset: a partition of ``cluster``, whose devices the emulated times are of.
        stages: cut it into so many stages; None for its own.
        samples: prompts of each set, drawn by ``seed`` as a sweep draws them.
        sampling: how the target decodes; with a temperature, tokens are drawn by ``seed``.

    Raises:
        UserError: a number below 1, two policies that are the same, or no such preset.
    """

    cluster: ClusterConfig
    preset: str
    policies: tuple[Policy, ...]
    stages: int | None = None
    samples: int = 10
    seed: int = 0
    sampling: SamplingParams = SamplingParams(max_tokens=64)
    raw_prompts: bool = False
    pair: Pair = field(default_factory=Pair)

    def __post_init__(self) -> None:
        self.cluster.find_partition(self.preset)
        for flag, value in (("--samples", self.samples), ("--stages", self.stages)):
            if value is not None and value < 1:
                raise UserError(f"{flag} must be at least 1")
        names = [policy.name for policy in self.policies]
        if len(set(names)) < len(names):
            raise UserError(f"--policy {max(names, key=names.count)} was given twice")

    @cached_property
    def shape(self) -> Shape:
        """The pipeline. Raises UserError if the pair has too few layers."""
        return emulated(self.cluster, self.preset, self.stages, self.pair, slow_motion=1.0)

    @property
    def request(self) -> PromptRequest:
        """How the target is asked for its own answer."""
        seeded = replace(self.sampling, seed=self.seed) if self.sampling.is_stochastic else self.sampling
        return PromptRequest("", self.raw_prompts, "pp", seeded)

    @property
    def origin(self) -> Origin:
        spec = self.shape.spec
        pair = digest(spec.target) + (digest(spec.draft) if spec.draft else "")
        return Origin.create(pair, self.request.sampling)


@dataclass(frozen=True)
class PolicyAnswer:
    """What one answer costs under one policy."""

    policy: Policy
    answer: RecordedAnswer
    replayed: Replayed


class Study:
    """All policies on one pipeline. What verdicts teach a policy it keeps from prompt to prompt, as in a sweep.

    Raises:
        UserError: no prompt of a set fits, a policy cannot work with this pair, or ``directory`` holds another recording.
    """

    def __init__(self, config: PolicyConfig, prompt_sets: Iterable[PromptSet], directory: Path) -> None:
        self._config = config
        self._spec = config.shape.spec
        assert self._spec.emulation is not None
        self._pipeline = ReplayedPipeline(self._spec.emulation, self._spec.topology)
        passage = self._spec.topology.num_groups
        self._experiences = {policy: WatchedExperience(passage) for policy in config.policies}
        self._load_draft = cache(lambda: _loaded_draft(self._spec))
        self._load_target = cache(lambda: OneProcess(PipelineSpec.create(self._spec.target, "none", stages=1)))
        self._recording = Recording(directory, config.origin)
        self._check_policies()
        self._prompts = [prompt for one in prompt_sets for prompt in self._drawn(one)]

    def run(self, progress: SweepProgress) -> Iterator[PolicyAnswer]:
        """Record what the directory lacks, then replay every answer under every policy."""
        progress.start(len(self._prompts) * (1 + len(self._config.policies)))
        progress.busy("recording the target")
        answers = []
        for prompt in self._prompts:
            answers.append(self._recording.answer(prompt, lambda asked: self._load_target().answer(asked).token_ids))
            progress.row()
        progress.busy(self._config.shape.label)
        for answer in answers:
            for replayed in self._replay(answer):
                progress.row()
                yield replayed

    def _drawn(self, prompt_set: PromptSet) -> Iterator[DrawnPrompt]:
        config = ModelConfig.from_directory(self._spec.target)
        prompter = Prompter(self._spec.target, config.max_positions)
        return draw(prompter, prompt_set, self._config.samples, self._config.seed, self._config.request)

    def _check_policies(self) -> None:
        """A policy that cannot work is found before anything is recorded."""
        nothing = RecordedAnswer("", 0, (0,), (0,))
        for policy in self._config.policies:
            create_method(self._request(policy, nothing), self._drafter(DraftMemo()), self._experiences[policy])

    def _replay(self, answer: RecordedAnswer) -> Iterator[PolicyAnswer]:
        memo = self._recording.memo(answer)
        for policy in self._config.policies:
            request = self._request(policy, answer)
            replayed = self._pipeline.run(request, answer.token_ids, self._drafter(memo), self._experiences[policy])
            yield PolicyAnswer(policy, answer, replayed)
        self._recording.keep(answer, memo)

    def _drafter(self, memo: DraftMemo) -> RecordedDrafter | None:
        most = max(CHILDREN[-1], *(policy.tree.children or 0 for policy in self._config.policies))
        return RecordedDrafter(memo, self._load_draft, most) if self._spec.draft else None

    def _request(self, policy: Policy, answer: RecordedAnswer) -> Request:
        return Request(0, answer.prompt_token_ids, self._config.request.sampling, policy.method, policy.tree)


def _loaded_draft(spec: PipelineSpec) -> Drafter:
    drafter = spec.load_drafter(torch.device("cpu"))
    assert drafter is not None
    return drafter
