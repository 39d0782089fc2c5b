"""Speculation policies compared offline: recorded answers replayed through the real methods, timestep by timestep.

Owns the policies and the order of work. Answers are recorded once (``policy_recording``), the draft is asked only for contexts
that no earlier policy met (``policy_drafter``), and no stage computes anything (``policy_replay``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from pipedec.bench.policy_drafter import RecordedDrafter
from pipedec.bench.policy_memo import DraftMemo
from pipedec.bench.policy_recording import Recording
from pipedec.bench.policy_replay import Replayed, ReplayedPipeline, WatchedExperience
from pipedec.bench.progress import SweepProgress
from pipedec.bench.prompts import DrawnPrompt, draw
from pipedec.bench.record import Row, plain
from pipedec.bench.sweep.pipelines import Pair, Shape, emulated, pair_digest
from pipedec.bench.sweep.runners import OneProcess
from pipedec.config import ClusterConfig
from pipedec.core import Request, SamplingParams, TreeParams, UserError
from pipedec.data.prompts import PromptSet
from pipedec.decoding import DEFAULT_METHOD, Drafter, create_method
from pipedec.decoding.controller import CHILDREN
from pipedec.engine.spec import PipelineSpec
from pipedec.messages import PromptRequest
from pipedec.model import ModelConfig
from pipedec.text.prompt import Prompter

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
        if method not in LIMITS:  # what BiTA's masks would say is not recorded
            raise UserError(f"--policy {text}: unknown method {method!r}; choose one of {', '.join(LIMITS)}")
        try:
            return cls(text, method, TreeParams(**dict(_limit(method, each) for each in settings.split(",") if each)))
        except UserError as error:
            raise UserError(f"--policy {text}: {error}") from None

    @property
    def limits(self) -> Row:
        """Those that the method heeds, the paper's where it takes those."""
        limits = self.tree if self.method == DEFAULT_METHOD else self.tree.with_defaults()
        return {name: value for name, value in plain(limits).items() if name in LIMITS[self.method]}


def _limit(method: str, setting: str) -> tuple[str, Any]:
    name, _, value = setting.partition("=")
    if name not in LIMITS[method]:
        raise UserError(f"{method} has no limit {name!r}; it has {', '.join(LIMITS[method]) or 'none'}")
    if name == "proposers":
        return name, tuple(value.split("+"))
    try:
        return name, int(value)
    except ValueError:
        raise UserError(f"{name} must be a whole number, not {value!r}") from None


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
    pair: Pair = Pair()

    def __post_init__(self) -> None:
        self.cluster.find_partition(self.preset)
        for flag, value in (("--samples", self.samples), ("--stages", self.stages)):
            if value is not None and value < 1:
                raise UserError(f"{flag} must be at least 1")
        for number, policy in enumerate(self.policies):
            if any((one.method, one.limits) == (policy.method, policy.limits) for one in self.policies[:number]):
                raise UserError(f"--policy {policy.name} was given twice: leave one of them out")

    @cached_property
    def shape(self) -> Shape:
        """The pipeline. Raises UserError if the pair has too few layers."""
        return emulated(self.cluster, self.preset, self.stages, self.pair, slow_motion=1.0)

    @property
    def asked(self) -> PromptRequest:
        """How the target is asked for its own answer."""
        seeded = replace(self.sampling, seed=self.seed) if self.sampling.is_stochastic else self.sampling
        return PromptRequest("", self.raw_prompts, "pp", seeded)

    @property
    def origin(self) -> Row:
        """What the answers depend on besides the prompt, as a recording and a sweep's rows have it."""
        return {"pair": pair_digest(self.shape.spec), "sampling": plain(self.asked.sampling)}


@dataclass(frozen=True)
class PolicyAnswer:
    """What the answer to one prompt, ``token_ids``, costs under one policy."""

    policy: Policy
    prompt: DrawnPrompt
    token_ids: tuple[int, ...]
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
        self._experiences = {policy: WatchedExperience(self._spec.topology.num_groups) for policy in config.policies}
        self._recording = Recording(directory, **config.origin)
        for policy in config.policies:  # one that cannot work is found before anything is recorded
            create_method(self._request(policy, (0,)), self._drafter(DraftMemo()), self._experiences[policy])
        prompter = Prompter(self._spec.target, ModelConfig.from_directory(self._spec.target).max_positions)
        self._prompts = draw(prompter, prompt_sets, config.asked, config.samples, config.seed)

    def run(self, progress: SweepProgress) -> Iterator[PolicyAnswer]:
        """Replay every answer under every policy; what the directory lacks is recorded first."""
        progress.start(len(self._prompts) * len(self._config.policies))
        progress.busy(self._config.shape.label)
        for prompt in self._prompts:
            token_ids = self._recording.answer(prompt, lambda asked: self._target.answer(asked).token_ids)
            memo = self._recording.memo(prompt)
            for policy, experience in self._experiences.items():
                request = self._request(policy, prompt.token_ids)
                replayed = self._pipeline.run(request, token_ids, self._drafter(memo), experience)
                progress.row()
                yield PolicyAnswer(policy, prompt, token_ids, replayed)
            self._recording.keep(prompt, memo)

    @cached_property
    def _target(self) -> OneProcess:
        return OneProcess(PipelineSpec.create(self._spec.target, "none", stages=1))

    @cached_property
    def _draft(self) -> Drafter:
        drafter = self._spec.load_drafter(torch.device("cpu"))
        assert drafter is not None
        return drafter

    def _drafter(self, memo: DraftMemo) -> RecordedDrafter | None:
        most = max(CHILDREN[-1], *(policy.tree.children or 0 for policy in self._config.policies))
        return RecordedDrafter(memo, lambda: self._draft, most) if self._spec.draft else None

    def _request(self, policy: Policy, prompt: tuple[int, ...]) -> Request:
        return Request(0, prompt, self._config.asked.sampling, policy.method, policy.tree)
