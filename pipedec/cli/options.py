"""Flags that several commands share, gathered into one dataclass for the pipeline and one for the request."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import click

from pipedec.core import SamplingParams, TreeParams, UserError
from pipedec.messages import PromptRequest
from pipedec.threads import load_dialect

METHOD_NAMES = ("pp", "stpp", "pipedec", "pipedec-bestfirst", "bita")
NEED_DRAFT = ("stpp", "pipedec")
Command = TypeVar("Command", bound=Callable[..., Any])


@dataclass(frozen=True)
class PipelineFlags:
    """What the pipeline is made of (see ``PipelineSpec.create``)."""

    target: Path | None
    draft: str | None
    stages: int
    groups: int | None
    layers: str | None
    dtype: str
    device: str
    transport: str
    dispatch: str
    bita: str | None

    def for_threads(self) -> PipelineFlags:
        """With the shipped pair that opens threads, where no other target is named."""
        from pipedec.engine.spec import REFERENCE_THREADS

        if self.target is not None:
            return self
        draft = str(REFERENCE_THREADS / "draft") if self.draft is None else self.draft
        return replace(self, target=REFERENCE_THREADS / "target", draft=draft)

    @property
    def layer_counts(self) -> list[int] | None:
        if self.layers is None:
            return None
        try:
            return [int(count) for count in self.layers.split(",")]
        except ValueError:
            raise UserError(f"--layers {self.layers}: write numbers with commas between them, like 6,6,6,6") from None


@dataclass(frozen=True)
class RequestFlags:
    """What is asked, and how the answer is shown."""

    prompt: str | None
    prompt_file: Path | None
    raw_prompt: bool
    method: str | None
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int | None
    max_tokens: int
    stop: tuple[str, ...]
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: tuple[str, ...]
    logprobs: int | None
    ignore_eos: bool
    width: int | None
    children: int | None
    depth: int | None
    rows: int | None
    forwards: int | None
    proposers: str
    shape: str
    threads: str | None
    show_threads: bool
    json: bool
    trace: Path | None

    def request(self) -> PromptRequest:
        """The request, its prompt read from where the flags say. Raises UserError before anything is started."""
        self._check_trace()
        if self.show_threads and (self.threads is None or self.json):
            raise UserError("--show-threads goes with --threads, and without --json")
        return PromptRequest(
            prompt=self._prompt_text(),
            raw=self.raw_prompt,
            method=self.method,
            sampling=self._sampling(),
            tree=self._tree(),
            trace=self.trace is not None,
            threads=None if self.threads is None else load_dialect(self.threads).to_json(),
            show_threads=self.show_threads,
        )

    def _tree(self) -> TreeParams:
        proposers = tuple(self.proposers.split(","))
        return TreeParams(self.width, self.children, self.depth, self.rows, self.forwards, proposers, self.shape)

    def _sampling(self) -> SamplingParams:
        values = {field.name: getattr(self, field.name) for field in fields(SamplingParams) if field.name != "stop_token_ids"}
        return SamplingParams(**values | {"logit_bias": dict(map(_token_bias, self.logit_bias)) or None})

    def _check_trace(self) -> None:
        if self.trace is None:
            return
        if not self.trace.parent.is_dir():
            raise UserError(f"--trace {self.trace}: there is no directory {self.trace.parent}")
        place = self.trace if self.trace.exists() else self.trace.parent
        if self.trace.is_dir() or not os.access(place, os.W_OK):
            raise UserError(f"--trace {self.trace}: cannot write there")

    def _prompt_text(self) -> str:
        if self.prompt is not None and self.prompt_file is not None:
            raise UserError("give --prompt or --prompt-file, not both")
        if self.prompt is not None:
            text = self.prompt
        elif self.prompt_file is not None:
            text = _file_text(self.prompt_file)
        elif sys.stdin.isatty():
            raise UserError("no prompt: give --prompt TEXT, --prompt-file FILE, or text on standard input")
        else:
            text = _decoded(sys.stdin.buffer.read(), "standard input")
        if not text.strip():
            raise UserError("the prompt is empty: give --prompt TEXT, --prompt-file FILE, or text on standard input")
        return text


def _token_bias(text: str) -> tuple[int, float]:
    token, _, value = text.partition("=")
    try:
        return int(token), float(value)
    except ValueError:
        raise UserError(f"--logit-bias {text}: write TOKEN_ID=VALUE, like 42=-5") from None


def _file_text(path: Path) -> str:
    try:
        return _decoded(path.read_bytes(), str(path))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None


def _decoded(text: bytes, source: str) -> str:
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError:
        raise UserError(f"{source} is not UTF-8 text") from None


def pipeline_options(command: Command) -> Command:
    """Adds the pipeline's flags; the command gets them as ``pipeline``."""
    options = [
        click.option(
            "--target", type=click.Path(path_type=Path), help="Target checkpoint directory (default: the shipped pair)."
        ),
        click.option("--draft", help="Draft checkpoint directory, or none."),
        click.option("--stages", type=int, default=4, show_default=True, help="Pipeline stages, one process each."),
        click.option("--groups", type=int, help="Groups of stages that share a timestep (default: one per stage)."),
        click.option("--layers", help="Layers of each stage, like 6,6,6,6 (default: even)."),
        click.option("--dtype", default="float32", show_default=True, help="float32, float64, bfloat16 or float16."),
        click.option("--device", default="auto", show_default=True, help="auto, cpu or cuda."),
        click.option("--transport", default="auto", show_default=True, help="auto, gloo or nccl."),
        click.option(
            "--dispatch", default="windows", show_default=True, help="What Redis grants: windows of timesteps, or tasks."
        ),
        click.option(
            "--bita", help="What pipedec train bita has learned: a directory, or none (default: the shipped target's own)."
        ),
    ]
    return gathered(command, options, PipelineFlags, "pipeline")


def request_options(command: Command) -> Command:
    """Adds the request's flags; the command gets them as ``asked``."""
    methods = click.Choice(METHOD_NAMES)
    path = click.Path(path_type=Path)
    options = [
        click.option("--prompt", help="The prompt (else --prompt-file, else standard input)."),
        click.option("--prompt-file", type=path, help="Read the prompt from a file."),
        click.option("--raw-prompt", is_flag=True, help="Do not apply the model's chat template."),
        click.option("--method", type=methods, help="How to decode (default: pipedec-bestfirst)."),
        click.option("--temperature", type=float, default=0.0, show_default=True, help="0: the likeliest token; above: drawn."),
        click.option("--top-k", type=int, default=0, show_default=True, help="Draw from so many likeliest tokens; 0 for all."),
        click.option(
            "--top-p", type=float, default=1.0, show_default=True, help="Draw from the likeliest with this probability."
        ),
        click.option("--min-p", type=float, default=0.0, show_default=True, help="Draw from tokens so likely beside the first."),
        click.option("--seed", type=int, help="The same seed gives the same tokens (default: drawn, and reported)."),
        click.option("--max-tokens", type=int, default=128, show_default=True, help="Output tokens at most."),
        click.option("--stop", multiple=True, help="A text that ends the answer before it; may be given several times."),
        click.option("--repetition-penalty", type=float, default=1.0, show_default=True, help="Of tokens in prompt and answer."),
        click.option("--presence-penalty", type=float, default=0.0, show_default=True, help="Of tokens in the answer."),
        click.option(
            "--frequency-penalty", type=float, default=0.0, show_default=True, help="Of tokens, each time in the answer."
        ),
        click.option("--logit-bias", multiple=True, metavar="ID=VALUE", help="Added to a token's logit; may be repeated."),
        click.option("--logprobs", type=int, help="With --json: so many top log-probabilities per token."),
        click.option("--ignore-eos", is_flag=True, help="Go on after the model's end token."),
        click.option("--width", type=int, help="Rows per timestep, w (default: pipedec-bestfirst finds it, others 32)."),
        click.option(
            "--children", type=int, help="Children per row, c (default: pipedec-bestfirst finds it, bita by shape, others 16)."
        ),
        click.option("--forwards", type=int, help="pipedec-bestfirst: draft forwards per timestep (default: what fits)."),
        click.option("--proposers", default="draft,ngrams", show_default=True, help="pipedec-bestfirst: who may name tokens."),
        click.option("--depth", type=int, help="stpp, bita: layers of the tree below its root (default: 4; one per mask)."),
        click.option(
            "--shape", default="likeliest", show_default=True, help="bita: likeliest, efficient, straightforward, full."
        ),
        click.option("--rows", type=int, help="Of the tree at most, the likeliest (default: stpp all; bita's likeliest 64)."),
        click.option(
            "--threads",
            metavar="NAME|FILE",
            help="Let answers open decode threads: apar, pasta, parallel, or a dialect's file.",
        ),
        click.option("--show-threads", is_flag=True, help="Show the threads side by side as they grow."),
        click.option("--json", is_flag=True, help="Print one JSON document instead of text."),
        click.option("--trace", type=path, help="Write a Chrome/Perfetto trace of every task to this file."),
    ]
    return gathered(command, options, RequestFlags, "asked")


def place_options(command: Command) -> Command:
    """Adds the flags that name a running cluster: ``redis`` and ``run``."""
    command = click.option("--run", help="Name of the run (default: the cluster started here by pipedec up).")(command)
    return click.option("--redis", help="redis://:password@host:port/0 of a cluster elsewhere.")(command)


def gathered(command: Command, options: list[Callable[[Any], Any]], kind: type, name: str) -> Command:
    """Adds ``options``; the command gets their values as one ``kind``, in the parameter ``name``."""
    names = [field.name for field in fields(kind)]

    @functools.wraps(command)
    def gathering(**flags: Any) -> Any:
        return command(**{name: kind(**{key: flags.pop(key) for key in names}), **flags})

    wrapped: Any = gathering
    for option in reversed(options):
        wrapped = option(wrapped)
    return wrapped
