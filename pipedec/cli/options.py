"""Flags of requests that several commands share.

The flags of the methods' options come from the table in ``pipedec.methods``.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import click
from msgspec import structs

from pipedec.client.resumption import Resumption
from pipedec.core import DEFAULT_METHOD, SamplingParams, StructuredOutputs, UserError
from pipedec.data.prompts import PromptSource
from pipedec.grammar import check
from pipedec.messages import PromptRequest
from pipedec.methods import METHOD_NAMES, METHODS, make_options, option_rules
from pipedec.threads import load_dialect

OPTION_NAMES = tuple(dict.fromkeys(name for entry in METHODS.values() for name in entry.option_names))
Command = TypeVar("Command", bound=Callable[..., Any])


@dataclass(frozen=True)
class StructureFlags:
    """What form an answer must have: one of them, or none."""

    json_schema: str | None
    regex: str | None
    choice: tuple[str, ...]
    grammar: Path | None

    def structure(self) -> StructuredOutputs | None:
        """Raises UserError for more than one, for a file that cannot be read, or a structure that no text can have."""
        kinds: dict[str, Any] = {
            "json": None if self.json_schema is None else _json_text(self.json_schema), "regex": self.regex,
            "choice": self.choice or None, "grammar": None if self.grammar is None else _file_text(self.grammar),
        }  # fmt: skip
        given = {name: value for name, value in kinds.items() if value is not None}
        if not given:
            return None
        outputs = StructuredOutputs(**given)
        check(outputs)
        return outputs


@dataclass(frozen=True)
class RequestFlags(StructureFlags):
    """The flags of a request, and how its answer is shown. ``options`` holds those of the method that were given, by name."""

    prompt: tuple[str, ...]
    prompt_file: Path | None
    prompts: tuple[str, ...]
    field: str | None
    priority: int
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
    options: dict[str, Any]
    threads: str | None
    show_threads: bool
    resume: Path | None
    json: bool
    trace: Path | None

    @cached_property
    def resumption(self) -> Resumption | None:
        """The answer to go on with. Raises UserError if its file cannot be read or has none."""
        return None if self.resume is None else Resumption.from_json(_file_text(self.resume), f"--resume {self.resume}")

    def requests(self) -> list[PromptRequest]:
        """A request for each prompt. Raises UserError for flags that cannot work, before anything is started."""
        self._check_trace()
        texts = self._prompt_texts()
        if len(texts) > 1 and (self.show_threads or self.trace is not None):
            raise UserError(f"{len(texts)} prompts: --trace and --show-threads go with one")
        if len(texts) > 1 and self.resume is not None:
            raise UserError(f"{len(texts)} prompts: --resume goes with one, the one that was answered")
        request = self._request() if self.resumption is None else self.resumption.resumed(self._request())
        return [structs.replace(request, prompt=text) for text in texts]

    def _request(self) -> PromptRequest:
        make_options(self.method or DEFAULT_METHOD, self.options)
        if self.show_threads and (self.threads is None or self.json):
            raise UserError("--show-threads goes with --threads, and without --json")
        sampling = self._sampling()
        if self.threads is not None and sampling.structured_outputs is not None:
            raise UserError("--threads goes without --json-schema, --regex, --choice and --grammar")
        return PromptRequest(
            prompt="",
            raw=self.raw_prompt,
            method=self.method,
            sampling=sampling,
            options=self.options,
            trace=self.trace is not None,
            threads=None if self.threads is None else load_dialect(self.threads).to_json(),
            show_threads=self.show_threads,
            priority=self.priority,
        )

    def _sampling(self) -> SamplingParams:
        values = {field.name: getattr(self, field.name) for field in structs.fields(SamplingParams) if hasattr(self, field.name)}
        bias = dict(map(_token_bias, self.logit_bias)) or None
        return SamplingParams(**values | {"logit_bias": bias, "structured_outputs": self.structure()})

    def _check_trace(self) -> None:
        if self.trace is None:
            return
        if not self.trace.parent.is_dir():
            raise UserError(f"--trace {self.trace}: there is no directory {self.trace.parent}")
        written = self.trace if self.trace.exists() else self.trace.parent
        if self.trace.is_dir() or not os.access(written, os.W_OK):
            raise UserError(f"--trace {self.trace}: cannot write there")

    def _prompt_texts(self) -> list[str]:
        if self.prompt and self.prompt_file is not None:
            raise UserError("give --prompt or --prompt-file, not both")
        if self.field is not None and not self.prompts:
            raise UserError("--field names the field of the prompts in --prompts FILE: give that, too")
        texts = list(self.prompt)
        if self.prompt_file is not None:
            texts.append(_file_text(self.prompt_file))
        for source in self.prompts:
            texts += PromptSource.parse(source).read(self.field).prompts
        if not texts:
            texts.append(_piped_text())
        if not all(text.strip() for text in texts):
            raise UserError("the prompt is empty: give --prompt TEXT, --prompt-file FILE, or text on standard input")
        return texts


def _token_bias(text: str) -> tuple[int, float]:
    token, _, value = text.partition("=")
    try:
        return int(token), float(value)
    except ValueError:
        raise UserError(f"--logit-bias {text}: write TOKEN_ID=VALUE, like 42=-5") from None


def _json_text(given: str) -> str:
    """A JSON schema as text: what is given itself, or what stands in a file of this name."""
    return given if given.lstrip().startswith(("{", "[")) or given.strip() in ("true", "false") else _file_text(Path(given))


def _piped_text() -> str:
    if sys.stdin.isatty():
        raise UserError("no prompt: give --prompt TEXT, --prompt-file FILE, or text on standard input")
    return _decoded(sys.stdin.buffer.read(), "standard input")


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


def request_options(command: Command) -> Command:
    """Adds the request's flags; the command gets them as ``asked``."""
    path = click.Path(path_type=Path)
    summaries = " ".join(f"{entry.name}: {entry.help}" for entry in METHODS.values())
    options = [
        _flag(
            "--prompt", multiple=True, metavar="TEXT",
            help="The prompt (default: --prompt-file, or standard input). May be repeated: all are answered together.",
        ),
        _flag("--prompt-file", type=path, metavar="FILE", help="Read the prompt from a file."),
        _flag(
            "--prompts", multiple=True, metavar="FILE",
            help="Many prompts: [NAME=]FILE[#KEY=VALUE,…], a JSONL, JSONL.gz or CSV file or some of its records; repeatable.",
        ),
        _flag("--field", metavar="NAME", help="With --prompts: the field that holds the prompt."),
        _flag("--priority", type=int, default=0, help="Where requests wait or compete, a lower one is served first."),
        _flag("--raw-prompt", is_flag=True, help="Do not apply the model's chat template."),
        _flag("--method", type=click.Choice(METHOD_NAMES), help=f"Decoding method (default: {DEFAULT_METHOD}). {summaries}"),
        _flag("--temperature", type=float, default=0.0, help="Sampling temperature; 0 is greedy."),
        _flag("--top-k", type=int, default=0, help="Number of most probable tokens to sample from; 0 for all."),
        _flag("--top-p", type=float, default=1.0, help="Cumulative probability of the tokens to sample from."),
        _flag("--min-p", type=float, default=0.0, help="Minimum probability relative to the most probable token."),
        _flag("--seed", type=int, help="Random seed of the answer (default: random, and reported)."),
        _flag("--max-tokens", type=int, default=128, help="Maximum number of output tokens."),
        _flag("--stop", multiple=True, metavar="TEXT", help="Stop string, excluded from the output; may be repeated."),
        _flag("--repetition-penalty", type=float, default=1.0, help="Penalizes tokens of prompt and answer; 1 for none."),
        _flag("--presence-penalty", type=float, default=0.0, help="Penalizes tokens that the answer contains."),
        _flag("--frequency-penalty", type=float, default=0.0, help="Penalizes tokens by their count in the answer."),
        _flag("--logit-bias", multiple=True, metavar="ID=VALUE", help="Added to a token's logit; may be repeated."),
        _flag("--logprobs", type=int, help="With --json: number of top log probabilities per token."),
        _flag("--ignore-eos", is_flag=True, help="Continue after the model's end token."),
        *structure_flags(),
        *map(_option_flag, OPTION_NAMES),
        _flag(
            "--threads", metavar="NAME|FILE", help="Let answers open decode threads: apar, pasta, parallel, or a dialect file.",
        ),
        _flag("--show-threads", is_flag=True, help="Show the threads side by side as they grow."),
        _flag("--resume", type=path, metavar="FILE", help="Go on with an answer: a completion that --json has printed."),
        _flag("--json", is_flag=True, help="Print one JSON document instead of text."),
        _flag("--trace", type=path, metavar="FILE", help="Write a Chrome/Perfetto trace of every task."),
    ]  # fmt: skip
    return _with_given_options(gathered(command, options, RequestFlags, "asked"))


def structure_flags() -> list[Callable[[Any], Any]]:
    """The flags of ``StructureFlags``."""
    return [
        _flag("--json-schema", metavar="FILE|TEXT", help="The answer is JSON of this JSON schema."),
        _flag("--regex", metavar="TEXT", help="The answer matches this regular expression, all of it."),
        _flag("--choice", multiple=True, metavar="TEXT", help="The answer is one of these; give each with a flag of its own."),
        _flag(
            "--grammar", type=click.Path(path_type=Path), metavar="FILE", help="The answer follows a grammar, in Lark's notation."
        ),
    ]


def _flag(name: str, **settings: Any) -> Callable[[Any], Any]:
    """A click option that shows its default and calls a number N."""
    if settings.get("type") in (int, float):
        settings.setdefault("metavar", "N" if settings["type"] is int else "X")
    return click.option(name, show_default=settings.get("default") is not None, **settings)


def _option_flag(name: str) -> Callable[[Any], Any]:
    """The flag of an option of the methods. Its help says which methods take it, and their defaults."""
    meanings: dict[str, list[str]] = {}
    for entry in METHODS.values():
        if name in entry.option_names:
            option, default = option_rules(entry.options)[name], getattr(entry.options(), name)
            shown = option.default or (",".join(default) if isinstance(default, tuple) else default)
            meanings.setdefault(option.help, []).append(f"{entry.name}: {shown}")
    text = " ".join(f"{meaning} ({', '.join(methods)})." for meaning, methods in meanings.items())
    if isinstance(default, tuple):
        choices = ",".join(option.choices)
        return click.option(f"--{name}", metavar=choices, callback=lambda *call: call[2] and call[2].split(","), help=text)
    if option.choices:
        return click.option(f"--{name}", type=click.Choice(option.choices), help=text)
    return click.option(f"--{name}", type=int, metavar="N", help=text)


def _with_given_options(command: Command) -> Command:
    """Gathers the methods' options that were given into ``options``."""

    @functools.wraps(command)
    def gathering(**flags: Any) -> Any:
        given = {name: flags.pop(name) for name in OPTION_NAMES}
        return command(options={name: value for name, value in given.items() if value is not None}, **flags)

    wrapped: Any = gathering
    return wrapped


def cluster_options(command: Command) -> Command:
    """Adds the flags that name a running cluster: ``redis`` and ``run``."""
    command = click.option("--run", metavar="NAME", help="Name of the run, if several share a Redis.")(command)
    redis_help = "Redis server, like redis://:password@host:port/0 (default: the one that pipedec up starts)."
    return click.option("--redis", metavar="URL", help=redis_help)(command)


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
