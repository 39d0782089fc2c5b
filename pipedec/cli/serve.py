"""``pipedec serve``: the OpenAI HTTP API, in front of a cluster of its own or of one that is running."""

from __future__ import annotations

import json
import shlex
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import click
import uvloop
from msgspec import Meta

from pipedec.checkpoints.download import pinned
from pipedec.cli.options import RunningFlags, refuse_flags, running_options
from pipedec.cli.show import console, show_sentence
from pipedec.client.run_handle import RunHandle
from pipedec.cluster.place import RunAddress
from pipedec.config import Settings, settings_options
from pipedec.config.environment import optional_secret
from pipedec.config.settings import OPTIONS, Models
from pipedec.core.errors import UserError
from pipedec.directories import shipped_name
from pipedec.flags import Help, options_of
from pipedec.server.app import create_app
from pipedec.server.defaults import sampling_defaults
from pipedec.server.front import AUTO, NONE, Front, ServerSettings
from pipedec.server.logs import LogFormat, RequestLog, log, written_log
from pipedec.server.metrics import ServerMetrics
from pipedec.server.run import ClusterEnded, ClusterProcess, RunOptions, ServerProcess
from pipedec.text.parsers import REASONING_PARSERS, TOOL_PARSERS

_KEY_VARIABLE = "PIPEDEC_API_KEY"
_EVERY = '["*"]'


@dataclass(frozen=True)
class HttpFlags(RunOptions):
    """The flags of the server itself, named as vLLM's where it has them."""

    allowed_origins: Annotated[str, Help("CORS: allowed origins.", "JSON")] = _EVERY
    allowed_methods: Annotated[str, Help("CORS: allowed methods.", "JSON")] = _EVERY
    allowed_headers: Annotated[str, Help("CORS: allowed headers.", "JSON")] = _EVERY
    allow_credentials: Annotated[bool, Help("CORS: allow credentials, such as cookies.")] = False
    api_key: Annotated[tuple[str, ...], Help("Deprecated.", "KEY", repeated=True, hidden=True)] = ()
    api_key_file: Annotated[
        Path | None,
        Help(f"File with API keys, one per line: requests need one of them (default: ${_KEY_VARIABLE}).", "FILE"),
    ] = None
    served_model_name: Annotated[
        tuple[str, ...],
        Help("Name of the model in the API; may be repeated (default: the target as given).", "NAME", repeated=True),
    ] = ()
    generation_config: Annotated[
        str, Help("Default sampling parameters: the target's generation_config.json, neutral ones, or DIR's.", "auto|vllm|DIR")
    ] = "auto"
    reasoning_parser: Annotated[
        str, Help("Parser of the model's thoughts; auto: as its chat template has them; none: they are text.", "auto|NAME|none")
    ] = AUTO
    tool_call_parser: Annotated[
        str, Help("Parser of calls of tools; auto: as the chat template asks for them.", "auto|NAME|none")
    ] = AUTO
    max_stored_responses: Annotated[
        int, Meta(ge=0), Help("Responses that /v1/responses keeps in memory for clients that go on with them; 0: none.", "N")
    ] = ServerSettings.max_stored_responses
    log_format: Annotated[LogFormat, Help("Format of the log; auto: text on a terminal, else JSON.")] = "auto"
    enable_log_requests: Annotated[bool, Help("Log prompts and parameters of requests.")] = False
    max_log_len: Annotated[Annotated[int, Meta(ge=0)] | None, Help("Characters of a prompt in the log.")] = None

    def keys(self) -> tuple[str, ...]:
        """Those of the file, else of the environment. Raises UserError for a file that has none, or for an empty key."""
        keys = list(self.api_key)
        if (path := self.api_key_file) is not None:
            try:
                lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
            except (OSError, UnicodeDecodeError) as error:
                raise UserError(f"--api-key-file {path}: {getattr(error, 'strerror', None) or 'not UTF-8 text'}") from None
            in_file = [line for line in lines if line and not line.startswith("#")]
            if not in_file:
                raise UserError(f"--api-key-file {path}: holds no key: write one on each line")
            keys += in_file
        if not keys and (secret := optional_secret(_KEY_VARIABLE)):
            keys = [secret]
        if not all(key.strip() and key.isascii() and key.isprintable() for key in keys):
            raise UserError("an API key is empty, or has characters that no HTTP header can carry: use letters and digits")
        if self.api_key:
            warning = "--api-key is deprecated: every user of this machine can read it. Use --api-key-file, or"
            console.print(f"{warning} ${_KEY_VARIABLE}.", soft_wrap=True)
        return tuple(keys)

    def settings(self, keys: tuple[str, ...], target: str) -> ServerSettings:
        """Raises UserError for values that are not allowed."""
        for flag, name, parsers in (
            ("--reasoning-parser", self.reasoning_parser, REASONING_PARSERS),
            ("--tool-call-parser", self.tool_call_parser, TOOL_PARSERS),
        ):
            if name not in (AUTO, NONE, *parsers):
                raise UserError(f"{flag} {name}: give {AUTO}, {NONE} or one of {', '.join(parsers)}")
        origins = names(self.allowed_origins, "--allowed-origins")
        if self.allow_credentials and "*" in origins:
            raise UserError("--allow-credentials: every page could ask as its visitor: name the pages in --allowed-origins")
        return ServerSettings(
            served_model_names=self.served_model_name or (shipped_name(target) or target,),
            api_keys=keys,
            allowed_origins=origins,
            allowed_methods=names(self.allowed_methods, "--allowed-methods"),
            allowed_headers=names(self.allowed_headers, "--allowed-headers"),
            allow_credentials=self.allow_credentials,
            reasoning_parser=self.reasoning_parser,
            tool_call_parser=self.tool_call_parser,
            max_stored_responses=self.max_stored_responses,
        )


def names(text: str, flag: str) -> tuple[str, ...]:
    """The strings of a JSON list, as vLLM takes them. Raises UserError for anything else."""
    try:
        values = json.loads(text)
    except ValueError:
        values = None
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise UserError(f"{flag} {text}: write a JSON list of strings, like '[\"https://example.org\"]'")
    return tuple(values)


@click.command()
@settings_options
@running_options
@options_of(HttpFlags, "http")
def serve(settings: Settings, place: RunningFlags, http: HttpFlags) -> None:
    """Serve the OpenAI HTTP API.

    Starts a cluster on this machine as `pipedec up` does; or, with --redis, --run or --running, serves one that is running. Any
    number of servers may serve the same cluster. SIGTERM or Ctrl-C lets running answers finish; a second one ends them.
    """
    if place.are_given:
        refuse_flags(OPTIONS, "a running cluster is served as it is: leave this out, or leave out --redis, --run and --running")
    http.check_certificate()
    keys = http.keys()
    backend: ClusterProcess | RunAddress
    sentence = None
    if place.are_given:
        found = place.find()
        backend = RunAddress(found.redis_url, found.run_id)
        scheduler = found.connect()
        with scheduler.client:
            target = RunHandle.of(scheduler, found.run_id).description.target
        named = pinned(Models(target=target))
    else:
        settings, sentence = settings.for_answers()
        target = str(settings.models.target)
        named = pinned(settings.models)
        backend = ClusterProcess(settings.replaced(**named))
    served = http.settings(keys, target)
    defaults = sampling_defaults(http.generation_config, named.get("target", target))
    with http.listening() as listener, written_log(sys.stdout.fileno(), keys, http.log_format):
        url = http.url(listener)
        through = "" if http.uds is None else f" through the Unix socket {http.uds}"
        where = f"API  {url}/v1   chat  {url}/   live page  {url}/live{through}   loading {served.model_name}"
        show_sentence(sentence)
        log("listening", text=where, url=url, model=served.model_name)
        log("sampling_defaults", source=defaults.source, **defaults.values, max_tokens=defaults.max_tokens)
        metrics = ServerMetrics(served.model_name)
        front = Front(served, [metrics, RequestLog(http.enable_log_requests, http.max_log_len)], int(time.time()))
        app = create_app(front, metrics)
        process = ServerProcess(app, front, metrics, listener, backend, http, defaults, lambda: _announce(served, http, url))
        try:
            uvloop.run(process.run())
        except ClusterEnded as end:  # its own process has printed the reason
            raise click.exceptions.Exit(end.status) from None


def _announce(settings: ServerSettings, http: HttpFlags, url: str) -> None:
    log("ready", url=url, model=settings.model_name)
    key = ["-H", "Authorization: Bearer YOUR_KEY"] if settings.api_keys else []
    through = [] if http.uds is None else ["--unix-socket", str(http.uds)]
    body = json.dumps({"model": settings.model_name, "prompt": "Two and two is", "max_tokens": 16})
    curl = ["curl", *through, f"{url}/v1/completions", "-H", "Content-Type: application/json", *key, "-d", body]
    console.print(f"Serving {settings.model_name} at {url}/v1. Try: {shlex.join(curl)}", soft_wrap=True, markup=False)
