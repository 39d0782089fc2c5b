"""Options of commands that offer load: which emulated pipeline, which load, by which methods, and what is counted."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from pipedec.bench.load.arrivals import Pattern
from pipedec.bench.load.policy import Policy, parse_policies
from pipedec.bench.load.served import Goals
from pipedec.bench.options import Preset, StageCount
from pipedec.bench.sweep.pipelines import ModelPair, Shape, emulated
from pipedec.config import ClusterConfig
from pipedec.core import UserError
from pipedec.flags import Help


@dataclass(frozen=True)
class LoadPipelineFlags:
    """An emulated pipeline and its KV memory."""

    preset: Preset | None = None
    stages: StageCount = None
    kv_tokens: Annotated[int | None, Help("Tokens for which there is KV memory (default: the preset's).")] = None
    prefix_cache: Annotated[
        bool,
        Help("Let requests with equal beginnings share their keys and values.", flag="--prefix-cache/--no-prefix-cache"),
    ] = True

    def shape(self, config: ClusterConfig, pair: ModelPair, slow_motion: float = 1.0, own_work: bool = True) -> Shape:
        """The pipeline. Raises UserError for an unknown preset, or less memory than a block of the cache."""
        assert self.preset is not None
        shape = emulated(config, self.preset, self.stages, pair, slow_motion, own_work)
        emulation = shape.spec.emulation
        assert emulation is not None
        if self.kv_tokens is not None:
            if self.kv_tokens < shape.spec.kv_block:
                raise UserError(f"--kv-tokens must be at least {shape.spec.kv_block}, one block, not {self.kv_tokens}")
            emulation = replace(emulation, kv_tokens=self.kv_tokens)
        return replace(shape, spec=replace(shape.spec.replaced(prefix_cache=self.prefix_cache), emulation=emulation))


@dataclass(frozen=True)
class LoadFlags:
    """Which load is offered, and what is counted."""

    methods: Annotated[
        tuple[str, ...],
        Help("Methods, or one with options like pipedec:width=8; may be repeated.", "NAME,…|NAME:KEY=VALUE,…", "--method",
             repeated=True),
    ] = ("pp,pipedec-bestfirst",)  # fmt: skip
    concurrency: Annotated[tuple[int, ...], Help("Numbers of requests that are unfinished at any time, like 1,4,16.")] = ()
    rate: Annotated[tuple[float, ...], Help("Or mean numbers of requests per second, like 0.5,1,2 (a Poisson process).")] = ()
    goodput: Annotated[tuple[str, ...], Help("Count the requests that meet these times.", "ttft:MS,tpot:MS", repeated=True)] = ()
    system_prompt: Annotated[Path | None, Help("Put this text before the first prompt of each.", "FILE")] = None

    def patterns(self) -> tuple[Pattern, ...]:
        """Raises UserError for a number that is out of range."""
        return (*(Pattern(concurrency=each) for each in self.concurrency), *(Pattern(rate=each) for each in self.rate))

    def policies(self) -> tuple[Policy, ...]:
        """Raises UserError for an unknown method or option."""
        return parse_policies(self.methods, "--method")

    def goals(self) -> Goals:
        """Raises UserError for a text of another form."""
        found: dict[str, float] = {}
        for part in (part for text in self.goodput for part in text.split(",")):
            name, _, value = part.partition(":")
            try:
                found[{"ttft": "ttft_ms", "tpot": "tpot_ms"}[name]] = float(value)
            except (KeyError, ValueError):
                raise UserError(f"--goodput {part}: write ttft:MS or tpot:MS, like ttft:500,tpot:60") from None
        return Goals(**found)

    def system_text(self) -> str:
        """The text before the first prompt; empty if there is none. Raises UserError if the file cannot be read."""
        if self.system_prompt is None:
            return ""
        try:
            return self.system_prompt.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"--system-prompt {self.system_prompt}: cannot be read as UTF-8 text ({error})") from None
