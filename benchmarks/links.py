"""``PYTHONPATH=tests python -m benchmarks.links``: answers over slow links, by real processes on several hosts.

The hosts are network namespaces, and a switch in user space delays what they send (``tests/support``). On each point of a grid
(hosts, delay, rate, passage) all contenders are alive at once and take turns in both orders: methods, chains in flight, another
checkout, and llama.cpp over RPC. Stage i computes on host i, rank 0 beside stage 1, so n hosts are n slow hops around the ring.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from itertools import cycle, islice, product
from math import ceil, floor, isfinite, log2, nan
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import click
from msgspec import Meta
from rich.table import Table

from benchmarks.alternatives import PromptFlags
from benchmarks.output import console, draw, titled_table
from pipedec.bench.options import Counts, Draft, Positive
from pipedec.bench.policy import Policy, parse_policies
from pipedec.bench.record import ROWS_FILE, Grid, Row, SweepProgress, key_of
from pipedec.bench.report import style
from pipedec.cli.benchmarks.shared import OutDirectory, ProgressBar, make_directory, print_files, print_table
from pipedec.config import AUTO, NONE
from pipedec.config.cluster import cluster_from
from pipedec.core.errors import PipedecError, UserError
from pipedec.core.request import DEFAULT_METHOD
from pipedec.core.values import check_fields
from pipedec.directories import REFERENCE_PAIR, shipped_part
from pipedec.families import model_config
from pipedec.flags import Help, options_of, own_options, run_command
from pipedec.gguf import is_gguf, is_named, located
from pipedec.plan.partition import Measured as MeasuredTimes
from pipedec.plan.partition import plan
from pipedec.text.prompt import Prompter

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from support.hosts import Hosts

SCHEMA = "pipedec.links/1"
METHOD, CHAIN, BESIDE, LLAMA_CPP = "method", "chain", "beside", "llama.cpp"  # kinds of contenders
# One guess per position: a row at a time, and windows of rows of fixed and of tuned size, which a miss discards.
CHAINS = (
    "pipedec:width=1,children=1",
    f"{DEFAULT_METHOD}:children=1,width=4,forwards=4,proposers=draft",
    f"{DEFAULT_METHOD}:children=1,proposers=draft",
    f"{DEFAULT_METHOD}:children=1",
)
START_SECONDS, LISTEN_SECONDS = 600.0, 60.0
_CONTEXT, _SHOWN_CHARS = 1024, 200
_REDIS_PORT, _RPC_PORT, _HTTP_PORT = 7000, 50052, 8080
_CHECKOUT = Path(__file__).resolve().parent.parent
_PASSAGE = """
import sys
from msgspec.json import encode
from pipedec.cluster.state import find_run
print(encode(find_run(None, sys.argv[1]).connect().status().stats).decode())
"""
_LISTENING = """
import socket, sys, time
for host in sys.argv[3:]:
    deadline = time.monotonic() + float(sys.argv[1])
    while True:
        try:
            socket.create_connection((host, int(sys.argv[2])), 5).close()
            break
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)
"""
_POST = """
import sys, time, urllib.error, urllib.request
deadline, text = time.monotonic() + float(sys.argv[2]), sys.stdin.buffer.read()
while True:
    try:
        request = urllib.request.Request(sys.argv[1], text, {"Content-Type": "application/json"})
        print(urllib.request.urlopen(request).read().decode())
        break
    except urllib.error.HTTPError as error:
        if error.code != 503 or time.monotonic() > deadline:  # else it is loading
            raise
        time.sleep(0.2)
"""

Delay = Annotated[float, Meta(ge=0)]
Rate = Annotated[float, Meta(gt=0)]


@dataclass(frozen=True)
class Point:
    """Links between all hosts that are alike; ``delay_ms`` one way, ``rate_mbit`` of each direction."""

    hosts: int
    delay_ms: float
    rate_mbit: float
    passage: str | None  # as --passage has it; None: not given

    @property
    def ring_ms(self) -> float:
        return self.hosts * self.delay_ms


@dataclass(frozen=True)
class Contender:
    """One way to answer; all answers of one turn are asked for at once if ``requests`` is not 1."""

    kind: str
    policy: Policy
    requests: int = 1

    @property
    def name(self) -> str:
        return self.policy.name if self.kind in (METHOD, CHAIN) else self.kind


@dataclass(frozen=True)
class LinksConfig:
    """The grid, and who answers. Raises UserError for a number that is too small, or an unknown method."""

    hosts: Annotated[Counts, Help("Numbers of hosts, each with a stage.")] = (3,)
    delay_ms: Annotated[tuple[Delay, ...], Help("Delays of all links, one way; ratios need 0 among them.", "MS,…")] = (
        0.0, 2.0, 10.0, 40.0, 100.0,
    )  # fmt: skip
    rate_mbit: Annotated[tuple[Rate, ...], Help("Rates of all links, Mbit/s.")] = (100.0,)
    passage: Annotated[tuple[str, ...], Help("Timesteps from a row's entry to its verdict.", "auto|N,…")] = ()
    methods: Annotated[
        tuple[str, ...], Help("Methods, or one with options like pipedec:width=8; may be repeated.", "NAME,…|NAME:KEY=VALUE,…",
                              "--method", repeated=True),
    ] = ("pp", "stpp", "pipedec", DEFAULT_METHOD)  # fmt: skip
    chains: Annotated[
        tuple[str, ...], Help("Chains in flight: the fastest is compared with the default method; may be repeated.",
                              "NAME:KEY=VALUE,…", "--chain", repeated=True),
    ] = CHAINS  # fmt: skip
    beside: Annotated[Path | None, Help("Another checkout, whose default method answers beside this one's.", "DIR")] = None
    llama_cpp: Annotated[
        Path | None, Help("Directory of llama.cpp's llama-server and rpc-server, for a target that is a GGUF file.", "DIR")
    ] = None
    target: Annotated[str | None, Help("Target (default: reference-pair).", "DIR|FILE|NAME")] = None
    draft: Draft = None
    requests: Annotated[
        tuple[Positive, ...], Help("Numbers of requests that the default method answers at the same time, beside single ones.")
    ] = (8,)
    max_tokens: Annotated[Annotated[int, Meta(ge=2)], Help("Maximum number of output tokens.")] = 64
    repeats: Annotated[Positive, Help("Turns of each contender.")] = 3

    def __post_init__(self) -> None:
        check_fields(self)
        _ = self.contenders
        if self.beside is not None and not (self.beside / "pipedec").is_dir():
            raise UserError(f"--beside {self.beside}: no checkout of pipedec")
        if self.llama_cpp is not None:
            if not is_gguf(self.models["target"]):
                raise UserError("--llama-cpp needs a target that is a GGUF file: give --target smollm2")
            _programs(self.llama_cpp)

    @property
    def points(self) -> list[Point]:
        return [Point(*each) for each in product(self.hosts, self.delay_ms, self.rate_mbit, self.passage or (None,))]

    @property
    def contenders(self) -> list[Contender]:
        default = Policy.parse(DEFAULT_METHOD)
        found = [Contender(METHOD, policy) for policy in parse_policies(self.methods, "--method")]
        found += [Contender(CHAIN, policy) for policy in parse_policies(self.chains, "--chain")]
        found += [Contender(BESIDE, default)] * (self.beside is not None)
        found += [Contender(LLAMA_CPP, Policy.parse("pp"))] * (self.llama_cpp is not None)
        return found + [Contender(METHOD, default, requests) for requests in self.requests if requests > 1]

    @property
    def models(self) -> dict[str, str]:
        """Target and draft, as cluster.yaml has them. Raises UserError if the shipped models are not installed."""
        target = self.target or str(located(REFERENCE_PAIR))
        draft = self.draft or str(shipped_part(self.target or REFERENCE_PAIR, "draft") or NONE)
        return {
            "target": target if is_named(target) else str(Path(target).absolute()),
            "draft": draft if draft == NONE else str(Path(draft).absolute()),
        }


def _document(hosts: Sequence[str], models: Mapping[str, str]) -> Row:
    """A cluster.yaml: a stage on each host, and rank 0 on the first."""
    servers = [{"host": host, "devices": {"cpu": 1 + (index == 0)}} for index, host in enumerate(hosts)]
    partition = {"stages": len(hosts), "draft_device": {"host": hosts[0], "device": "cpu"}}
    return {**models, "servers": servers, "partitions": {"all": partition}, "max_model_len": _CONTEXT}


class Place(Protocol):
    """A server on the hosts of a point."""

    def ask(self, policy: Policy, prompts: Sequence[str], max_tokens: int) -> list[Row]:
        """The answers to prompts that are asked together. Raises PipedecError if there are none."""

    def passage(self) -> int | None:
        """In timesteps, as it is now; None if it is unknown."""


class Cluster:
    """A cluster of one checkout, launched over ssh from the first host. It ends with the hosts.

    Its ranks keep what they learn in directories of their own, so that every cluster begins with the shipped priors, and share
    neither prefixes nor suffixes of answers.
    """

    def __init__(self, hosts: Hosts, name: str, checkout: Path, port: int, config: LinksConfig, passage: str | None) -> None:
        self._hosts, self._name = hosts, name
        folder = hosts.directory(0) / name
        folder.mkdir()
        self._python = folder / "python"
        self._python.write_text(
            f'#!/bin/sh\ncd "{checkout}" && export PYTHONPATH="$PWD" OMP_NUM_THREADS=1\n'
            f'export PIPEDEC_STATE_DIR="{folder.parent.parent}/$(hostname)/{name}-state"\nexec "{sys.executable}" "$@"\n'
        )
        self._python.chmod(0o755)
        document = {
            **_document(hosts.names, config.models), "launch": {"python": str(self._python)},
            "redis": {"host": hosts.names[0], "port": port}, "prefix_cache": False,
        }  # fmt: skip
        file = folder / "cluster.yaml"
        file.write_text(json.dumps(document))
        self._run("launch", file, "--run", name, "--detach", *(() if passage is None else ("--passage", passage)))

    def ask(self, policy: Policy, prompts: Sequence[str], max_tokens: int) -> list[Row]:
        asked = [word for prompt in prompts for word in ("--prompt", prompt)]
        options = [word for name, value in policy.limits.items() if value is not None for word in _option(name, value)]
        printed = self._run(
            "submit", "--run", self._name, "--json", "--shared-suffixes", "off", "--max-tokens", str(max_tokens),
            "--method", policy.method, *options, *asked,
        )  # fmt: skip
        return [_answer(json.loads(line)) for line in printed.splitlines()]

    def passage(self) -> int | None:
        stats = json.loads(_checked(self._hosts.run(0, self._python, "-c", _PASSAGE, self._name), "status")) or {}
        found: int | None = stats.get("passage")
        return found

    def _run(self, command: str, *arguments: str | Path) -> str:
        ended = self._hosts.run(0, self._python, "-m", "pipedec.cli", command, *arguments, timeout=START_SECONDS)
        return _checked(ended, f"{self._name}: pipedec {command}")


class LlamaCppOverRpc:
    """llama.cpp with its last layers on the other hosts, as many on each as on the first. It ends with the hosts."""

    def __init__(self, hosts: Hosts, config: LinksConfig) -> None:
        assert config.llama_cpp is not None
        self._hosts = hosts
        target = Path(config.models["target"])
        layers, self._prompter = model_config(target).num_hidden_layers, Prompter(target, _CONTEXT)
        server, rpc_server = _programs(config.llama_cpp)
        others = [hosts.address(index) for index in range(1, len(hosts.names))]
        for index, address in enumerate(others, 1):
            self._start(index, rpc_server, "--host", address, "--port", str(_RPC_PORT), "--threads", "1")
        self._listening(_RPC_PORT, *others)
        rpc = ",".join(f"{address}:{_RPC_PORT}" for address in others)
        self._start(
            0, server, "--model", located(target), "--rpc", rpc, "--n-gpu-layers", str(layers - layers // len(hosts.names)),
            "--threads", "1", "--ctx-size", str(_CONTEXT), "--parallel", "1", "--host", "127.0.0.1", "--port", str(_HTTP_PORT),
        )  # fmt: skip
        self._listening(_HTTP_PORT, "127.0.0.1")

    def _start(self, index: int, *command: str | Path) -> None:
        with self._log(index).open("wb") as log:
            self._hosts.popen(index, *command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def _log(self, index: int) -> Path:
        return self._hosts.directory(index) / "llama.cpp.log"

    def _listening(self, port: int, *addresses: str) -> None:
        """Wait until programs listen. Raises PipedecError if they do not."""
        self._on_first(_LISTENING, str(LISTEN_SECONDS), str(port), *addresses)

    def _on_first(self, script: str, *arguments: str, **options: Any) -> str:
        """The output of a Python script on the first host. Raises PipedecError, with what llama.cpp has printed, if it fails."""
        ended = self._hosts.run(0, sys.executable, "-c", script, *arguments, timeout=2 * START_SECONDS, **options)
        if ended.returncode:
            logs = filter(Path.exists, map(self._log, range(len(self._hosts.names))))
            printed = "; ".join(" ".join(log.read_text()[-_SHOWN_CHARS:].split()) for log in logs)
            raise PipedecError(f"{LLAMA_CPP} does not answer, and has printed: {printed}")
        return ended.stdout

    def ask(self, policy: Policy, prompts: Sequence[str], max_tokens: int) -> list[Row]:
        return [self._ask(self._prompter.token_ids(prompt, False, max_tokens), max_tokens) for prompt in prompts]

    def _ask(self, token_ids: Sequence[int], max_tokens: int) -> Row:
        asked = {"prompt": token_ids, "n_predict": max_tokens, "temperature": 0, "cache_prompt": False, "return_tokens": True}
        url = f"http://127.0.0.1:{_HTTP_PORT}/completion"
        found = json.loads(self._on_first(_POST, url, str(START_SECONDS), input=json.dumps(asked)))
        timings = found["timings"]
        return {
            "tokens": timings["predicted_n"], "decode_ms": timings["predicted_ms"], "ttft_ms": timings["prompt_ms"],
            "e2e_ms": timings["prompt_ms"] + timings["predicted_ms"], "timesteps": 0, "hits": 0, "misses": 0,
            "recoveries": 0, "answer": key_of(found["tokens"]),
        }  # fmt: skip

    def passage(self) -> None:
        return None


def _programs(folder: Path) -> tuple[Path, Path]:
    """llama-server and rpc-server. Raises UserError if one is missing."""
    found = [next(iter(sorted(folder.glob(pattern))), None) for pattern in ("llama-server", "*rpc-server")]
    server, rpc_server = found
    if server is None or rpc_server is None:
        raise UserError(f"--llama-cpp {folder}: no llama-server and rpc-server: build llama.cpp with -DGGML_RPC=ON")
    return server.absolute(), rpc_server.absolute()


def _option(name: str, value: Any) -> tuple[str, str]:
    return f"--{name.replace('_', '-')}", ",".join(value) if isinstance(value, list) else str(value)


def _checked(ended: subprocess.CompletedProcess[str], what: str) -> str:
    """The output of a command on a host. Raises PipedecError if it failed."""
    if ended.returncode:
        lines = ended.stderr.strip().splitlines() or [f"exit status {ended.returncode}"]
        raise PipedecError(f"{what}: {lines[-1].removeprefix('pipedec: ')}")
    return ended.stdout


def _answer(completion: Mapping[str, Any]) -> Row:
    """A row's figures of one answer, of the document that ``submit --json`` prints."""
    if "error" in completion:
        raise PipedecError(completion["error"])
    times = {f"{name}_ms": round(1000 * completion[f"{name}_seconds"], 3) for name in ("decode", "ttft", "e2e")}
    counts = {name: completion[name] for name in ("timesteps", "hits", "misses", "recoveries")}
    return {"tokens": len(completion["token_ids"]), **times, **counts, "answer": key_of(completion["token_ids"])}


class Site:
    """The hosts of one point, and what answers there. Each is started when it is first asked, and then stays."""

    def __init__(self, config: LinksConfig, point: Point) -> None:
        self._config, self._point = config, point
        self._stack = ExitStack()
        self._hosts: Hosts | None = None
        self._places: dict[str, Place] = {}
        self._warm = set[Contender]()

    def __enter__(self) -> Site:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def turn(self, contender: Contender, prompts: Sequence[str]) -> Row:
        """The answers to all prompts, one after the other or all at once; the first answer of a contender is left out."""
        place, most = self._place(contender.kind), self._config.max_tokens
        if contender not in self._warm:
            place.ask(contender.policy, prompts[:1], most)
            self._warm.add(contender)
        at_once = [prompts] if contender.requests > 1 else [[prompt] for prompt in prompts]
        answers = [answer for some in at_once for answer in place.ask(contender.policy, some, most)]
        return {"answers": answers, "passage_at_end": place.passage()}

    def _place(self, kind: str) -> Place:
        from support.hosts import namespace_hosts
        from support.slow_links import Link

        if self._hosts is None:
            link = Link(delay_ms=self._point.delay_ms, rate_mbit=self._point.rate_mbit)
            self._hosts = self._stack.enter_context(namespace_hosts(self._point.hosts, link))
        if kind not in self._places:
            self._places[kind] = self._started(kind, self._hosts)
        return self._places[kind]

    def _started(self, kind: str, hosts: Hosts) -> Place:
        if kind == LLAMA_CPP:
            return LlamaCppOverRpc(hosts, self._config)
        if kind == BESIDE:
            assert self._config.beside is not None
            return Cluster(hosts, kind, self._config.beside.absolute(), _REDIS_PORT + 1, self._config, None)
        port = _REDIS_PORT + 2 * (kind == CHAIN)  # methods learn nothing from chains
        return Cluster(hosts, kind, _CHECKOUT, port, self._config, self._point.passage)


def measure_links(
    config: LinksConfig, prompts: Sequence[str], out: Path, progress: SweepProgress,
    site_of: Callable[[LinksConfig, Point], Site] = Site,
) -> list[Row]:  # fmt: skip
    """One row for each turn of a contender on a point; those that ``out`` has are not measured again.

    Raises UserError if ``out`` has rows of another schema; PipedecError if a cluster does not start or answer.
    """
    grid, contenders = Grid(SCHEMA, out, progress), config.contenders
    progress.start(len(config.points) * config.repeats * len(contenders))
    for point in config.points:
        with site_of(config, point) as site:
            for number in range(config.repeats):
                for contender in contenders[:: -1 if number % 2 else 1]:
                    progress.busy(f"{point.hosts} hosts, {point.delay_ms:g} ms, {contender.name}")
                    asked = prompts if contender.requests == 1 else list(islice(cycle(prompts), contender.requests))
                    identity = {
                        **asdict(point), "kind": contender.kind, "contender": contender.name, "requests": contender.requests,
                        "turn": number, "max_tokens": config.max_tokens, **config.models,
                    }  # fmt: skip
                    grid.row(identity, [*asked], partial(site.turn, contender, asked), lambda row: None)
    return grid.rows


@dataclass(frozen=True)
class Measured:
    """The figures of a contender on a point, over all of its turns.

    Attributes:
        tokens_per_s: of single requests after the first token, of each prompt the median turn; of several from asking for them
            to the last token, the median turn.
        timesteps: per token after the first, in the last turn, as ``hits`` and ``misses``.
        recoveries: from lost ranks, in all turns.
        passage: at the end of the last turn; None if it is unknown.
        equal: single answers that are those of the first contender on the first point, and all single answers.
    """

    kind: str
    name: str
    requests: int
    tokens_per_s: float
    ttft_ms: float
    timesteps: float
    hits: int
    misses: int
    recoveries: int
    passage: int | None
    equal: tuple[int, int]


def measured_points(rows: Sequence[Row]) -> dict[Point, list[Measured]]:
    """All figures by point, in the order of the rows."""
    turns: dict[Point, dict[tuple[str, str, int], list[Row]]] = {}
    for row in rows:
        point = Point(*(row[each.name] for each in fields(Point)))
        turns.setdefault(point, {}).setdefault((row["kind"], row["contender"], row["requests"]), []).append(row)
    expected = [answer["answer"] for answer in rows[0]["answers"]]
    return {point: [_measured(*who, some, expected) for who, some in found.items()] for point, found in turns.items()}


def _measured(kind: str, name: str, requests: int, turns: Sequence[Row], expected: Sequence[str]) -> Measured:
    by_prompt = list(zip(*(turn["answers"] for turn in turns), strict=True))
    last = turns[-1]["answers"]
    decoded = max(sum(answer["tokens"] - 1 for answer in last), 1)
    if requests == 1:
        seconds = sum(statistics.median(answer["decode_ms"] for answer in answers) for answers in by_prompt) / 1000
        tokens_per_s = decoded / max(seconds, 1e-9)
    else:
        tokens_per_s = statistics.median(
            1000 * sum(answer["tokens"] for answer in turn["answers"]) / max(answer["e2e_ms"] for answer in turn["answers"])
            for turn in turns
        )
    said = [[answer["answer"] == text for answer in answers] for answers, text in zip(by_prompt, expected, strict=False)]
    equal = [each for some in said for each in some] if requests == 1 else []
    return Measured(
        kind, name, requests, tokens_per_s, statistics.median(answer["ttft_ms"] for some in by_prompt for answer in some),
        sum(answer["timesteps"] for answer in last) / decoded, sum(answer["hits"] for answer in last),
        sum(answer["misses"] for answer in last), sum(answer["recoveries"] for some in by_prompt for answer in some),
        turns[-1]["passage_at_end"], (sum(equal), len(equal)),
    )  # fmt: skip


PP_OVER_RING = "pp: time / (ring + compute)"
Planned = Callable[[Point, MeasuredTimes], tuple[float, float]]  # see ``planned_ms``


def planned_ms(models: Mapping[str, str], point: Point, still: MeasuredTimes) -> tuple[float, float]:
    """Milliseconds per token of ``pp`` and of the default method, as planned for links like this from times without delay."""
    network = {"latency_us": 1000 * point.delay_ms, "bandwidth_gbps": point.rate_mbit / 1000}
    given = {} if point.passage in (None, AUTO) else {"passage": int(point.passage)}
    document = {**_document([f"host-{number}" for number in range(point.hosts)], models), **given, "network": network}
    made = plan(cluster_from(document), measured=still)
    drafted_ms = made.default_method_ms()
    return made.tpot_ms, nan if drafted_ms is None else drafted_ms


def ratios(points: Mapping[Point, Sequence[Measured]], planned: Planned | None = None) -> dict[Point, dict[str, float]]:
    """The comparisons of a point, without those for which something was not measured.

    Compute is what ``pp`` takes for a token without delay. Times are divided by those of plans; the others are ratios of speeds.
    """
    found = {}
    for point, here in points.items():
        still = points.get(replace(point, delay_ms=0.0), ())
        default, plain = _speed(here, METHOD, DEFAULT_METHOD), _speed(here, METHOD, "pp")
        pass_ms = 1000 / _speed(still, METHOD, "pp")
        alone = next((one for one in still if one.name == DEFAULT_METHOD and one.requests == 1), None)
        plans = (nan, nan)
        if planned is not None and alone is not None and isfinite(pass_ms):
            plans = planned(point, MeasuredTimes(pass_ms, 1000 / alone.tokens_per_s / alone.timesteps, alone.timesteps))
        found[point] = {
            PP_OVER_RING: 1000 / plain / (point.ring_ms + pass_ms),
            "pp: time / planned": 1000 / plain / plans[0],
            "default: time / planned": 1000 / default / plans[1],
            "default / pp": default / plain,
            **{f"default / {kind}": default / _speed(here, kind) for kind in (CHAIN, BESIDE, LLAMA_CPP)},
            **{
                f"{count} requests / without delay": _speed(here, METHOD, DEFAULT_METHOD, count)
                / _speed(still, METHOD, DEFAULT_METHOD, count)
                for count in sorted({one.requests for one in here} - {1})
            },
        }
    return {point: {name: ratio for name, ratio in some.items() if isfinite(ratio)} for point, some in found.items()}


def _speed(some: Iterable[Measured], kind: str, name: str | None = None, requests: int = 1) -> float:
    """Tokens per second of the fastest one of a kind; nan if there is none."""
    found = (one for one in some if one.kind == kind and one.requests == requests and name in (None, one.name))
    return max((one.tokens_per_s for one in found), default=nan)


def speeds_table(points: Mapping[Point, Sequence[Measured]]) -> Table:
    """A line for each contender on each point."""
    columns = (
        "hosts", "delay ms", "Mbit/s", "passage", "contender", "ms per token", "tokens/s", "TTFT ms", "timesteps", "hits",
        "misses", "recoveries", "at the end", "same",
    )  # fmt: skip
    caption = (
        "ms per token: after the first one, of each prompt the median turn; of several requests: from asking for them to the "
        "last token. Timesteps: per token. At the end: the passage then. Same: answers equal to the first contender's."
    )
    table = titled_table("Answers over slow links", columns, caption, left=("contender",))
    for point, here in points.items():
        for one in here:
            name = one.name if one.requests == 1 else f"{one.name}, {one.requests} requests"
            table.add_row(
                *_shown(point), name, f"{1000 / one.tokens_per_s:.1f}", f"{one.tokens_per_s:.1f}", f"{one.ttft_ms:.0f}",
                f"{one.timesteps:.2f}", str(one.hits), str(one.misses), str(one.recoveries),
                str(one.passage or "-"), f"{one.equal[0]}/{one.equal[1]}" if one.equal[1] else "-",
            )  # fmt: skip
        table.add_section()
    return table


def ratios_table(found: Mapping[Point, Mapping[str, float]]) -> Table:
    """A line for each point."""
    names = list(dict.fromkeys(name for some in found.values() for name in some))
    caption = "Of two contenders: speeds. Chain: the fastest one. Compute: pp without delay. Planned: by pipedec plan, from that."
    table = titled_table("Ratios", ("hosts", "delay ms", "Mbit/s", "passage", *names), caption)
    for point, some in found.items():
        table.add_row(*_shown(point), *(f"{some[name]:.2f}" if name in some else "-" for name in names))
    return table


def _shown(point: Point) -> tuple[str, ...]:
    return str(point.hosts), f"{point.delay_ms:g}", f"{point.rate_mbit:g}", point.passage or "-"


def links_figure(points: Mapping[Point, Sequence[Measured]]) -> Figure | None:
    """Tokens per second over the delay of a link, a panel for each cut through the grid; None for a single delay."""
    panels: dict[Point, list[Point]] = {}
    for point in sorted(points, key=lambda point: point.delay_ms):
        panels.setdefault(replace(point, delay_ms=0.0), []).append(point)
    panels = {cut: some for cut, some in panels.items() if len(some) > 1}
    if not panels:
        return None
    lines = dict.fromkeys(_line(one) for some in panels.values() for point in some for one in points[point] if one.requests == 1)
    looks = style.method_looks(lines)
    figure = style.new_figure(style.FULL_WIDTH, 2.6)
    for axes, (cut, some) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        for line, look in looks.items():
            kind, name = (METHOD, line) if line not in (CHAIN, BESIDE, LLAMA_CPP) else (line, None)
            axes.plot(
                [point.delay_ms for point in some], [_speed(points[point], kind, name) for point in some], color=look.color,
                marker=look.marker, markersize=4, linewidth=1.4, label=look.name(),
            )  # fmt: skip
        passage = f", passage {cut.passage}" if cut.passage else ""
        axes.set_title(f"{cut.hosts} hosts, {cut.rate_mbit:g} Mbit/s{passage}", fontsize=style.LABEL_POINTS, color=style.TEXT)
        style.dress(axes, "delay of a link, one way (ms)", "tokens/s", grid="both")
        low, high = floor(log2(axes.dataLim.ymin)), ceil(log2(axes.dataLim.ymax))
        style.log_axis(axes, "y", [2.0**power for power in range(low, high + 1)])
    handles, names = figure.axes[0].get_legend_handles_labels()
    figure.legend(
        handles, names, loc="outside upper left", ncols=4, frameon=False, fontsize=style.TICK_POINTS, labelcolor=style.TEXT
    )  # fmt: skip
    return figure


def _line(one: Measured) -> str:
    """The line of a figure on which a contender is; the fastest of several is drawn."""
    return one.name if one.kind == METHOD else one.kind


@click.command()
@options_of(PromptFlags, "prompts")
@options_of(LinksConfig, "config")
@own_options
def links(prompts: PromptFlags, config: LinksConfig, out: OutDirectory) -> None:
    """Measure answers over slow links between hosts on this machine: one row per turn in OUT/rows.jsonl, and OUT/links.png.

    Needs root, /dev/net/tun, iproute2 and openssh-server, and PYTHONPATH=tests. Nothing else should run: the hosts share the
    processors. Turns that OUT/rows.jsonl already contains are not measured again.
    """
    try:
        from support.hosts import lacking
    except ImportError:
        raise UserError("the hosts are made by tests/support: set PYTHONPATH=tests, in a checkout") from None
    texts = prompts.read()
    if missing := lacking():
        console.print(f"Nothing is measured: hosts on one machine need {', '.join(missing)}.")
        return
    make_directory(out)
    with ProgressBar() as bar:
        points = measured_points(measure_links(config, texts, out, bar))
    for table in (speeds_table(points), ratios_table(ratios(points, partial(planned_ms, config.models)))):
        print_table(table, 170)
    print_files(out / ROWS_FILE, *draw({"links": links_figure(points)}, out))


if __name__ == "__main__":
    run_command(links)
