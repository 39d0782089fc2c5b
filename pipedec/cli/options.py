"""Options of requests and of running clusters, and annotated types of options that several commands share."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, Union

import click
from click.core import ParameterSource
from msgspec import structs

from pipedec.client.resumption import Resumption
from pipedec.client.run_handle import RunHandle
from pipedec.cluster.state import RunningCluster, find_run
from pipedec.core.errors import UserError
from pipedec.core.request import DEFAULT_METHOD
from pipedec.core.sampling import SamplingParams, StructuredOutputs
from pipedec.core.values import field_hints
from pipedec.data import PromptSource
from pipedec.flags import Command, Help, Option, option, option_fields, options_of, with_options
from pipedec.grammar.apart import check_apart
from pipedec.messages.request import LOCAL_TENANT, PromptRequest
from pipedec.methods import METHOD_NAMES, METHODS, PROPOSERS, make_options, shown_option
from pipedec.threads import load_dialect

OPTION_NAMES = tuple(dict.fromkeys(name for entry in METHODS.values() for name in entry.option_names))

Prompts = Annotated[
    tuple[str, ...],
    Help("Prompt files: JSONL, JSONL.gz or CSV, or some of their records; may be repeated.", "[NAME=]FILE[#KEY=VALUE,…]",
         "--prompts", repeated=True),
]  # fmt: skip
PromptField = Annotated[str | None, Help("Field of the prompt files that holds the prompt.", "NAME", "--field")]
RawPrompt = Annotated[bool, Help("Do not apply the model's chat template.", flag="--raw-prompt")]
Threads = Annotated[
    str | None, Help("Let answers open decode threads: apar, pasta, parallel, or a dialect file.", "NAME|FILE", "--threads")
]
Temperature = Annotated[float, Help("Sampling temperature; 0 is greedy.")]
TopK = Annotated[int, Help("Number of most probable tokens to sample from; 0 for all.")]
TopP = Annotated[float, Help("Cumulative probability of the tokens to sample from.")]
MinP = Annotated[float, Help("Minimum probability relative to the most probable token.")]
MaxTokens = Annotated[int, Help("Maximum number of output tokens.")]
Redis = Annotated[
    str | None,
    Help("Redis server (default: the one that pipedec up starts); its password is in $PIPEDEC_REDIS_PASSWORD.",
         "redis://HOST:PORT/0"),
]  # fmt: skip
MethodName = Literal[METHOD_NAMES]  # type: ignore[valid-type]
RunName = Annotated[str | None, Help("Name of the run, if several share a Redis.", "NAME", "--run")]
Json = Annotated[bool, Help("Print one JSON document instead of text.", flag="--json")]


@dataclass(frozen=True)
class ClusterFlags:
    """Which running cluster to use."""

    redis: Redis = None
    run: RunName = None

    def find(self) -> RunningCluster:
        """The cluster. Raises UserError if there is none."""
        return find_run(self.redis, self.run)


@dataclass(frozen=True)
class RunningFlags(ClusterFlags):
    """Which running cluster to use, if any."""

    running: Annotated[
        bool,
        Help("Use the running cluster that --redis and --run name, or the one that pipedec up started here; either implies it."),
    ] = False

    @property
    def are_given(self) -> bool:
        return self.running or self.redis is not None or self.run is not None

    def connect(self) -> RunHandle:
        """Raises UserError if no such cluster is running."""
        found = self.find()
        return RunHandle.of(found.connect(), found.run_id)


cluster_options = options_of(ClusterFlags, "place")
running_options = options_of(RunningFlags, "place")


def refuse_flags(names: Iterable[str], reason: str) -> None:
    """Raise UserError if the current command was called with one of these parameters; ``reason`` says why and what to do."""
    context, wanted = click.get_current_context(), set(names)
    given = [
        parameter.opts[0]
        for parameter in context.command.params
        if parameter.name in wanted and context.get_parameter_source(parameter.name) is not ParameterSource.DEFAULT
    ]
    if given:
        raise UserError(f"{', '.join(given)}: {reason}")


@dataclass(frozen=True)
class StructureFlags:
    """The required form of an answer: one of them, or none."""

    json_schema: Annotated[str | None, Help("The answer is JSON that follows this JSON schema.", "FILE|TEXT")] = None
    regex: Annotated[str | None, Help("The whole answer matches this regular expression.", "TEXT")] = None
    choice: Annotated[tuple[str, ...], Help("The answer is one of these; may be repeated.", "TEXT", repeated=True)] = ()
    grammar: Annotated[Path | None, Help("The answer follows a grammar, in Lark's notation.", "FILE")] = None

    def structure(self) -> StructuredOutputs | None:
        """Raises UserError for more than one, for a file that cannot be read, or a structure that no text can have."""
        schema = self.json_schema
        if schema is not None and not schema.lstrip().startswith(("{", "[")) and schema.strip() not in ("true", "false"):
            schema = _file_text(Path(schema))
        grammar = None if self.grammar is None else _file_text(self.grammar)
        kinds: dict[str, Any] = {"json": schema, "regex": self.regex, "choice": self.choice or None, "grammar": grammar}
        if all(value is None for value in kinds.values()):
            return None
        outputs = StructuredOutputs(**kinds)
        check_apart(outputs)
        return outputs


@dataclass(frozen=True)
class _QuestionFlags:
    """The prompt of a request, and how it is answered."""

    prompt: Annotated[
        tuple[str, ...],
        Help("The prompt (default: --prompt-file, or standard input). May be repeated: all are answered together.", "TEXT",
             repeated=True),
    ] = ()  # fmt: skip
    prompt_file: Annotated[Path | None, Help("Read the prompt from a file.", "FILE")] = None
    prompts: Prompts = ()
    field: PromptField = None
    priority: Annotated[int, Help("Requests with a lower value are served first.")] = 0
    raw_prompt: RawPrompt = False
    method: Annotated[
        MethodName | None,
        Help(
            f"Decoding method (default: {DEFAULT_METHOD}). "
            + " ".join(f"{entry.name}: {entry.help}" for entry in METHODS.values()),
        ),
    ] = None
    temperature: Temperature = 0.0
    top_k: TopK = 0
    top_p: TopP = 1.0
    min_p: MinP = 0.0
    seed: Annotated[int | None, Help("Random seed of the answer (default: random, and reported).")] = None
    max_tokens: MaxTokens = 128
    stop: Annotated[tuple[str, ...], Help("Stop string, excluded from the output; may be repeated.", "TEXT", repeated=True)] = ()
    repetition_penalty: Annotated[float, Help("Penalizes tokens of prompt and answer; 1 for none.")] = 1.0
    presence_penalty: Annotated[float, Help("Penalizes tokens that the answer contains.")] = 0.0
    frequency_penalty: Annotated[float, Help("Penalizes tokens by their count in the answer.")] = 0.0
    logit_bias: Annotated[tuple[str, ...], Help("Added to a token's logit; may be repeated.", "ID=VALUE", repeated=True)] = ()
    logprobs: Annotated[int | None, Help("With --json: number of top log probabilities per token.")] = None
    ignore_eos: Annotated[bool, Help("Continue after the model's end token.")] = False


@dataclass(frozen=True)
class RequestFlags(StructureFlags, _QuestionFlags):
    """The flags of a request, and how its answer is shown. ``options`` holds those of the method that were given, by name."""

    threads: Threads = None
    show_threads: Annotated[bool, Help("Show the threads side by side as they grow.")] = False
    resume: Annotated[Path | None, Help("Continue an answer: a completion that --json has printed.", "FILE")] = None
    compare: Annotated[MethodName | None, Help("Answer by this method, too, and compare their times per token.")] = None
    json: Json = False
    trace: Annotated[Path | None, Help("Write a Chrome/Perfetto trace of every task.", "FILE")] = None
    options: dict[str, Any] = dataclass_field(default_factory=dict)

    @property
    def tenant(self) -> str | None:
        """The tenant whose earlier answers may help; None to compare methods, where the second would draft from the first."""
        return LOCAL_TENANT if self.compare is None else None

    @cached_property
    def resumption(self) -> Resumption | None:
        """The answer to go on with. Raises UserError if its file cannot be read or has none."""
        return None if self.resume is None else Resumption.from_json(_file_text(self.resume), f"--resume {self.resume}")

    def requests(self) -> list[PromptRequest]:
        """A request for each prompt. Raises UserError for flags that cannot work, before anything is started."""
        if self.trace is not None:
            if not self.trace.parent.is_dir():
                raise UserError(f"--trace {self.trace}: there is no directory {self.trace.parent}")
            written = self.trace if self.trace.exists() else self.trace.parent
            if self.trace.is_dir() or not os.access(written, os.W_OK):
                raise UserError(f"--trace {self.trace}: cannot write there")
        texts = self._prompt_texts()
        if len(texts) > 1 and (self.show_threads or self.trace is not None):
            raise UserError(f"{len(texts)} prompts: --trace and --show-threads go with one")
        if self.compare is not None and (len(texts) > 1 or self.json or self.trace is not None or self.show_threads):
            raise UserError("--compare goes with one prompt, and without --json, --trace and --show-threads")
        if len(texts) > 1 and self.resume is not None:
            raise UserError(f"{len(texts)} prompts: --resume goes with one, the one that was answered")
        request = self._request() if self.resumption is None else self.resumption.resumed(self._request())
        return [structs.replace(request, prompt=text) for text in texts]

    def _request(self) -> PromptRequest:
        make_options(self.method or DEFAULT_METHOD, self.options)
        if self.show_threads and (self.threads is None or self.json):
            raise UserError("--show-threads goes with --threads, and without --json")
        structure = self.structure()
        if self.threads is not None and structure is not None:
            raise UserError("--threads goes without --json-schema, --regex, --choice and --grammar")
        values = {field.name: getattr(self, field.name) for field in structs.fields(SamplingParams) if hasattr(self, field.name)}
        bias: dict[int, float] = {}
        for text in self.logit_bias:
            token, _, value = text.partition("=")
            try:
                bias[int(token)] = float(value)
            except ValueError:
                raise UserError(f"--logit-bias {text}: write TOKEN_ID=VALUE, like 42=-5") from None
        return PromptRequest(
            prompt="", raw=self.raw_prompt, method=self.method, options=self.options, trace=self.trace is not None,
            sampling=SamplingParams(**values | {"logit_bias": bias or None, "structured_outputs": structure}),
            threads=None if self.threads is None else load_dialect(self.threads).to_json(), show_threads=self.show_threads,
            priority=self.priority, tenant=self.tenant,
        )  # fmt: skip

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
            if sys.stdin.isatty():
                raise UserError("no prompt: give --prompt TEXT, --prompt-file FILE, or text on standard input")
            texts.append(_decoded(sys.stdin.buffer.read(), "standard input"))
        if not all(text.strip() for text in texts):
            raise UserError("the prompt is empty: give --prompt TEXT, --prompt-file FILE, or text on standard input")
        return texts


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
    """Add the options of a request and those of the methods; the command gets them as ``asked``."""
    own: dict[str, Option] = {}
    for name in OPTION_NAMES:
        meanings: dict[str, list[str]] = {}  # what the option means, with the methods that take it so and their defaults
        hints: list[Any] = []  # the types that these methods take
        for entry in METHODS.values():
            if name in entry.option_names:
                hint, default = field_hints(entry.options)[name], getattr(entry.options(), name)
                note = shown_option(hint)
                shown = note.default or (",".join(default) if isinstance(default, tuple) else default)
                meanings.setdefault(note.help, []).append(f"{entry.name}: {shown}")
                hints.append(hint)
        text = " ".join(f"{meaning} ({', '.join(methods)})." for meaning, methods in meanings.items())
        metavar = ",".join(PROPOSERS) if isinstance(default, tuple) else None
        own[name] = option(name, Union[*hints], Help(text, metavar), None)

    def gather(values: dict[str, Any]) -> dict[str, Any]:
        given = {name: value for name in own if (value := values.pop(name)) is not None}
        return {"asked": RequestFlags(**values, options=given)}

    return with_options(command, option_fields(RequestFlags) | own, gather)
