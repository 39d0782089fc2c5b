"""Options of ``python -m benchmarks.load``: the pipeline, and the load that it is offered."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from benchmarks.load.offered import Pattern
from benchmarks.load.results import Goals
from benchmarks.output import Preset, StageCount
from pipedec.bench.policy import parse_policies
from pipedec.bench.sweep.pipelines import ModelPair, Shape, emulated
from pipedec.config import ClusterConfig
from pipedec.core.errors import UserError
from pipedec.flags import Help
from pipedec.plan.spec import PipelineSpec


@dataclass(frozen=True)
class ReplayFlags:
    """An emulated pipeline and its KV memory, through which recorded answers pass."""

    preset: Preset
    stages: StageCount = None
    kv_tokens: Annotated[int | None, Help("Tokens for which there is KV memory (default: the preset's).")] = None
    recording: Annotated[Path | None, Help("Directory of recorded answers; missing ones are recorded.", "DIR")] = None
    random_tokens: Annotated[int | None, Help("Prompts of N random tokens.", flag="--random")] = None
    prefix_cache: Annotated[
        bool, Help("Let requests with equal beginnings share their keys and values.", flag="--prefix-cache/--no-prefix-cache")
    ] = True

    dispatch: Annotated[
        Literal["tasks", "windows"],
        Help("When stages prune by a verdict: all at once, as with single tasks, or as it travels with the rows (windows)."),
    ] = "tasks"

    def shape(self, config: ClusterConfig, pair: ModelPair, own_work: bool) -> Shape:
        """The pipeline. Raises UserError for an unknown preset, or less memory than a block of the cache."""
        shape = emulated(config, self.preset, self.stages, pair, own_work=own_work)
        return replace(shape, spec=with_memory(shape.spec.replaced(prefix_cache=self.prefix_cache), self.kv_tokens))


def with_memory(spec: PipelineSpec, kv_tokens: int | None) -> PipelineSpec:
    """An emulated pipeline with KV memory for so many tokens; None: as it is. Raises UserError for less than a block."""
    if kv_tokens is None:
        return spec
    if kv_tokens < spec.kv_block:
        raise UserError(f"--kv-tokens must be at least {spec.kv_block}, one block, not {kv_tokens}")
    assert spec.emulation is not None
    return replace(spec, emulation=replace(spec.emulation, kv_tokens=kv_tokens))


@dataclass(frozen=True)
class LoadFlags:
    """Which load is offered, and which requests are counted."""

    methods: Annotated[
        tuple[str, ...],
        Help("Methods, or one with options like pipedec:width=8; may be repeated.", "NAME,…|NAME:KEY=VALUE,…", "--method",
             repeated=True),
    ] = ("pp,pipedec-bestfirst",)  # fmt: skip
    concurrency: Annotated[tuple[int, ...], Help("Numbers of requests that are unfinished at any time, like 1,4,16.")] = ()
    rate: Annotated[tuple[float, ...], Help("Or mean numbers of requests per second, like 0.5,1,2 (a Poisson process).")] = ()
    goodput: Annotated[tuple[str, ...], Help("Count the requests that meet these times.", "ttft:MS,tpot:MS", repeated=True)] = ()
    system_prompt: Annotated[Path | None, Help("Put this text before the first prompt of each.", "FILE")] = None

    def settings(self) -> dict[str, Any]:
        """Fields of a load's configuration. Raises UserError for an unknown method, option or goal, or a wrong number."""
        patterns = (*(Pattern(concurrency=each) for each in self.concurrency), *(Pattern(rate=each) for each in self.rate))
        goals: dict[str, float] = {}
        for part in (part for text in self.goodput for part in text.split(",")):
            name, _, value = part.partition(":")
            try:
                goals[{"ttft": "ttft_ms", "tpot": "tpot_ms"}[name]] = float(value)
            except (KeyError, ValueError):
                raise UserError(f"--goodput {part}: write ttft:MS or tpot:MS, like ttft:500,tpot:60") from None
        return {"policies": parse_policies(self.methods, "--method"), "patterns": patterns, "goals": Goals(**goals)}

    def system_text(self) -> str:
        """The text before the first prompt; empty if there is none. Raises UserError if the file cannot be read."""
        if self.system_prompt is None:
            return ""
        try:
            return self.system_prompt.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"--system-prompt {self.system_prompt}: cannot be read as UTF-8 text ({error})") from None
