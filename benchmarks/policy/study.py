"""Speculation policies compared offline: recorded answers replayed through the real methods, timestep by timestep.

Answers are recorded once, the draft model runs only for contexts that no earlier policy needed (``recording``), and no stage
computes anything (``replay``). A figure of a prompt set is a ratio of totals; over prompt sets it is the mean: geometric for
times and speed-ups, arithmetic for the others.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from msgspec import Meta
from msgspec.structs import replace
from pandas import Categorical, DataFrame

from benchmarks.methods import applicable_options
from benchmarks.output import Preset, StageCount
from benchmarks.policy.opponents import FREE_DRAFTS
from benchmarks.policy.recording import AnswerRecording, DraftMemo, RecordedDrafter
from benchmarks.policy.replay import Replayed, ReplayedPipeline, TimestepLosses, WatchedExperience
from pipedec.bench.options import Drawing, DrawnPrompt, draw
from pipedec.bench.policy import Policy
from pipedec.bench.record import Row, SweepProgress, header, plain
from pipedec.bench.report.frames import SUMS, totals
from pipedec.bench.sweep.pipelines import ModelPair, Shape, emulated, pair_digest
from pipedec.bench.sweep.runners import OneProcess
from pipedec.config import ClusterConfig, Settings
from pipedec.core.errors import UserError
from pipedec.core.request import TokenizedRequest
from pipedec.core.sampling import SamplingParams
from pipedec.core.values import check_fields
from pipedec.data import PromptSet
from pipedec.decoding import Drafter
from pipedec.decoding.controller import CHILDREN
from pipedec.decoding.learned import NOTHING_LEARNED
from pipedec.engine.build import load_drafter, resolve
from pipedec.engine.experience_files import shipped_acceptance
from pipedec.families import model_config
from pipedec.flags import ON_OFF, Help
from pipedec.messages.request import LOCAL_TENANT, PromptRequest
from pipedec.methods import METHODS
from pipedec.plan.roofline import ROW_OVERLAP
from pipedec.text.prompt import Prompter


@dataclass(frozen=True)
class PolicyConfig(Drawing):
    """The policies to compare, and the answers on which. With a temperature, ``seed`` also seeds the target's tokens.

    Raises UserError for a number below 1, two equal policies, or an unknown preset.
    """

    cluster: ClusterConfig
    preset: Preset  # emulated times are those of its devices
    policies: tuple[Policy, ...]
    stages: StageCount = None
    sampling: SamplingParams = SamplingParams(max_tokens=64)
    pair: ModelPair = ModelPair()
    priors: Annotated[bool, Help("Begin with what ships beside the draft.")] = False
    shared_suffixes: Annotated[bool, Help("Draft also from earlier answers, of all prompt sets.", ON_OFF)] = False
    expert_overlap: Annotated[
        float, Meta(ge=0, lt=1),
        Help("Share of a mixture's experts that rows have in common; 0: rows are routed independently (default: as measured)."),
    ] = ROW_OVERLAP  # fmt: skip

    def __post_init__(self) -> None:
        self.cluster.find_partition(self.preset)
        check_fields(self)
        for number, policy in enumerate(self.policies):
            if any((one.method, one.limits) == (policy.method, policy.limits) for one in self.policies[:number]):
                raise UserError(f"--policy {policy.name} was given twice: leave one of them out")

    @cached_property
    def shape(self) -> Shape:
        """The emulated pipeline. Raises UserError if the target has too few layers."""
        return emulated(
            self.cluster, self.preset, self.stages, self.pair, own_work=self.own_work, priors=self.priors,
            row_overlap=self.expert_overlap,
        )  # fmt: skip

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

    Raises UserError if no prompt of a set fits into the context, a policy cannot run with this pair of models, or ``directory``
    contains another recording.
    """

    def __init__(self, config: PolicyConfig, prompt_sets: Iterable[PromptSet], directory: Path) -> None:
        self._config, self._spec = config, config.shape.spec
        self._memos: list[DraftMemo] = []  # by request number
        self._pipelines = {policy: self._pipeline(policy) for policy in config.policies}
        self._recording = AnswerRecording(directory, **config.origin)
        for policy in config.policies:  # raises for a policy that cannot run, before anything is recorded
            self._pipelines[policy].check(self._request(policy, 0, (0,)))
        prompter = Prompter(self._spec.target, model_config(self._spec.target).max_position_embeddings)
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
        emulation = self._spec.emulation
        assert emulation is not None
        if policy.method in FREE_DRAFTS and emulation.draft is not None:
            free = dataclasses.replace(emulation.draft, compute=emulation.draft.compute.slowed(0.0))
            emulation = dataclasses.replace(emulation, draft=free)
        prior = shipped_acceptance(self._spec.draft) if self._config.priors else NOTHING_LEARNED
        experience = WatchedExperience(self._spec.settings.passage, prior, self._spec.expected_ms)
        return ReplayedPipeline(emulation, self._spec.topology, drafter, experience)

    def _request(self, policy: Policy, number: int, prompt: tuple[int, ...]) -> TokenizedRequest:
        tenant = LOCAL_TENANT if self._config.shared_suffixes else None
        return TokenizedRequest(number, prompt, self._config.request.sampling, policy.method, policy.options, tenant=tenant)


SCHEMA = "pipedec.policy/1"
_SETS = ["policy", "prompt_set"]
_CAUSES = [field.name for field in fields(TimestepLosses)]


@dataclass(frozen=True)
class PolicyFigures:
    """Data frames of all policies, in the order of the answers.

    ``means`` are by policy, over prompt sets: ms_per_token, timesteps_per_token, hit_rate and speedup over the first policy. So
    are ``causes_per_token``: timesteps per decoded token by cause, which add up to timesteps_per_token; ``together`` is a share
    of tokens and not part of the sum.
    """

    totals: DataFrame  # by policy and prompt set, as ``report.statistics.totals``; times are emulated
    causes: DataFrame  # by policy and prompt set, the fields of ``TimestepLosses``
    means: DataFrame
    causes_per_token: DataFrame

    @classmethod
    def of(cls, answers: Iterable[PolicyAnswer]) -> PolicyFigures:
        """The figures of ``answers``; those of a single token are left out, since nothing is decoded.

        Raises UserError if no answer has more than one token.
        """
        decoded = [one for one in answers if one.replayed.tokens]
        if not decoded:
            raise UserError("every answer has a single token, so nothing is decoded: use other prompts or more --max-tokens")
        sums = _frame(decoded, lambda replayed: {name: getattr(replayed, name) for name in SUMS})
        losses = _frame(decoded, lambda replayed: asdict(replayed.losses))
        table, causes = totals(sums, _SETS), losses.groupby(_SETS, observed=True)[_CAUSES].sum()
        means = (
            table[["timesteps_per_token"]].assign(hit_rate=table["hit_rate"].fillna(0.0)).groupby("policy", observed=True).mean()
        )
        means["ms_per_token"] = np.exp(np.log(table["tpot_ms"]).groupby("policy", observed=True).mean())
        means["speedup"] = means["ms_per_token"].iloc[0] / means["ms_per_token"]
        return cls(table, causes, means, causes.div(table["tokens"], axis=0).groupby("policy", observed=True).mean())


def _frame(answers: list[PolicyAnswer], record: Callable[[Replayed], Row]) -> DataFrame:
    """One row per answer; policies and prompt sets in the order of the answers."""
    frame = DataFrame({"policy": one.policy.name, "prompt_set": one.prompt.prompt_set, **record(one.replayed)} for one in answers)
    for key in _SETS:
        frame[key] = Categorical(frame[key], frame[key].unique(), ordered=True)
    return frame


def document(config: PolicyConfig, figures: PolicyFigures, comparisons: DataFrame) -> Row:
    """Everything as one JSON document."""
    pipeline = {"preset": config.preset, "cluster": config.shape.cluster}
    described = {**pipeline, **config.origin, "samples": config.samples, "seed": config.seed}
    described |= {"shared_suffixes": config.shared_suffixes, "expert_overlap": config.expert_overlap}
    policies = []
    for policy in config.policies:
        means, causes_per_token = (frame.loc[policy.name].to_dict() for frame in (figures.means, figures.causes_per_token))
        frames = (frame.loc[[policy.name]].droplevel("policy") for frame in (figures.totals[SUMS], figures.causes))
        totals, causes = (frame.to_dict("index") for frame in frames)
        policies.append({
            "policy": policy.name, "method": policy.method, "limits": policy.limits,
            **{name: means[name] for name in ("ms_per_token", "timesteps_per_token", "hit_rate")},
            "timesteps_per_token_by_cause": causes_per_token,
            "sets": {name: {**totals[name], "timesteps_by_cause": causes[name]} for name in totals},
        })  # fmt: skip
    return {"schema": SCHEMA, **header("policy", described), "policies": policies, "check": comparisons.to_dict("records")}


def compare(config: PolicyConfig, answers: Iterable[PolicyAnswer], rows: Iterable[Row]) -> DataFrame:
    """Compare with ``rows`` of a sweep under single tasks, whose stages prune at once like those of the replay: answers of equal
    pipeline, models, sampling, policy and prompt.

    One row per policy and the sweep's clock and slow_motion. Columns: answers, their number; predicted and found, milliseconds
    per token of the replay and the sweep; ratio, predicted / found.
    """
    pipeline = config.preset, config.shape.dispatched("tasks").cluster, *config.origin.values()
    known = {_case(one, *pipeline): one for one in answers if one.replayed.tokens}
    pairs = [(known[case], row) for row in rows if (case := _case_of_row(row)) in known]
    names = ["policy", "clock", "slow_motion"]
    found = DataFrame(
        [
            (config.policies.index(one.policy), row["clock"], row["slow_motion"], one.replayed.tokens, one.replayed.decode_ms,
             row["decode_ms"])
            for one, row in pairs
        ],
        columns=[*names, "tokens", "predicted", "found"],
    )  # fmt: skip
    sums = found.assign(answers=1).groupby(names, as_index=False).sum()
    return DataFrame({
        "policy": [config.policies[number].name for number in sums["policy"]],
        **sums[["clock", "slow_motion", "answers"]],
        "predicted": sums["predicted"] / sums["tokens"],
        "found": sums["found"] / sums["tokens"],
        "ratio": sums["predicted"] / sums["found"],
    })  # fmt: skip


def _case(one: PolicyAnswer, *pipeline: Any) -> str:
    """Everything that must be equal in a sweep's row of the same answer."""
    policy, prompt = one.policy, one.prompt
    lengths = len(prompt.token_ids), len(one.token_ids)
    return json.dumps([*pipeline, policy.method, policy.limits, prompt.prompt_set, prompt.index, *lengths], sort_keys=True)


def _case_of_row(row: Row) -> str:
    method = row["method"]
    tree = plain(applicable_options(method, row["tree"] or {})) if method in METHODS else {}
    sampling = {**plain(SamplingParams()), **row["sampling"]}  # rows of earlier versions have fewer parameters
    pipeline = row["preset"], row["cluster"], row["pair"].get("digest"), sampling
    question = row["prompt_set"], row["prompt_index"], row.get("prompt_tokens"), row["output_tokens"]
    return json.dumps([*pipeline, method, tree, *question], sort_keys=True)
