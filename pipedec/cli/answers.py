"""``pipedec generate`` and ``submit``: answers of a cluster that is started for them, or of a running one, and their metrics.

An answer goes to standard output, everything else to standard error.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import click
from msgspec.structs import replace
from rich.columns import Columns
from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.table import Column, Table
from rich.text import Text

from pipedec.cli.options import ClusterFlags, RequestFlags, cluster_options, request_options
from pipedec.cli.show import console, loading_bars, show_sentence
from pipedec.client.client import Client
from pipedec.client.reply import Reply
from pipedec.client.resumption import Resumption
from pipedec.client.run_handle import RunHandle
from pipedec.cluster.local import LocalCluster, resolve_apart
from pipedec.config import NONE, Settings, settings_options
from pipedec.core.completion import Completion
from pipedec.core.errors import UserError
from pipedec.core.request import DEFAULT_METHOD
from pipedec.flags import ON_OFF, Help, own_options
from pipedec.messages.events import ThreadNews
from pipedec.messages.request import PromptRequest
from pipedec.messages.run import RunDescription
from pipedec.methods import find_method
from pipedec.tracing import SCHEDULER_TRACK, write_trace

_LINES = 12  # the latest lines of each thread that a panel shows
_BORDERS = {"running": "green", "waiting": "yellow", "ended": "dim"}


@click.command()
@settings_options
@request_options
def generate(settings: Settings, asked: RequestFlags) -> None:
    """Answer prompts with a temporary cluster on this machine.

    Starts a Redis server, rank 0 and one process per stage, streams the answers, and stops them. The draft model is loaded if the
    method can use one. Several prompts are answered together; their answers are printed in the order of the prompts.
    """
    requests = asked.requests()
    methods = [find_method(name) for name in (asked.method or DEFAULT_METHOD, asked.compare) if name is not None]
    if asked.threads is not None:
        settings = settings.for_threads()
    if all(method.draft == "none" for method in methods):
        settings = settings.replaced(draft=NONE)
    cluster = local_cluster(settings)
    for method in methods:
        method.check_needs(cluster.spec.draft is not None, cluster.spec.bita is not None)
    with started(cluster) as client:
        ask_and_show(client, requests, asked, cluster.description)


def local_cluster(settings: Settings, run_id: str | None = None) -> LocalCluster:
    """A cluster with these settings. Shows which target it has if none is given. Raises UserError as ``resolve_apart``."""
    settings, sentence = settings.for_answers()
    cluster = LocalCluster(resolve_apart(settings), run_id)
    show_sentence(sentence)
    return cluster


@contextmanager
def started(cluster: LocalCluster) -> Iterator[Client]:
    """Start a cluster for as long as its client is used. It is stopped in the end, and killed after an error."""
    try:
        with loading_bars({f"{len(cluster.topology.ranks)} ranks": cluster.topology.ranks}) as progress:
            cluster.start(progress)
        assert cluster.scheduler is not None
        yield Client(cluster.scheduler, cluster.check)
    except BaseException:
        cluster.kill()
        raise
    cluster.stop()


@click.command()
@cluster_options
@request_options
@own_options
def submit(
    place: ClusterFlags,
    asked: RequestFlags,
    shared_suffixes: Annotated[
        bool, Help("Draft also from earlier answers that were submitted here, and let later ones draft from these.", ON_OFF)
    ] = True,
) -> None:
    """Send prompts to a running cluster and stream the answers. Ctrl-C cancels the requests; the cluster keeps running.

    Several prompts are answered together; their answers are printed in the order of the prompts, with --json one line for each.
    """
    requests = [replace(request, tenant=asked.tenant if shared_suffixes else None) for request in asked.requests()]
    found = place.find()
    scheduler = found.connect()
    ask_and_show(Client(scheduler), requests, asked, lambda: RunHandle.of(scheduler, found.run_id).description)


def ask_and_show(
    client: Client, requests: Sequence[PromptRequest], asked: RequestFlags, description: Callable[[], RunDescription]
) -> None:
    """Submit the requests, stream their text (or print one JSON document for each), then print their metrics.

    Raises UserError if a request was refused; of several, the others are answered and shown first. ``description`` is called to
    compare methods.
    """
    if len(requests) == 1:
        completion = _ask_one(client, requests[0], asked.json, asked.trace, asked.resumption)
        if asked.compare is not None:
            _compare(client, requests[0], completion, asked.compare, description())
        return
    if asked.json:
        replies = client.ask_all(requests)
        for index, reply in enumerate(replies):
            shown = {"error": str(reply.error)} if reply.completion is None else reply.completion.as_dict()
            print(json.dumps({"prompt": index, **shown}))
    else:
        pages = Pages(len(requests))
        replies = client.ask_all(requests, pages.add, pages.close)
        console.print(many_metrics_table(replies))
    if refused := [index for index, reply in enumerate(replies) if reply.completion is None]:
        raise UserError(
            f"{len(refused)} of {len(replies)} prompts were not answered: prompt {refused[0]}: {replies[refused[0]].error}"
        )


class Pages:
    """The texts of several answers on standard output, in order: each streams once those before it have ended."""

    def __init__(self, count: int) -> None:
        self._held: list[list[str]] = [[] for _ in range(count)]
        self._is_closed = [False] * count
        self._shown = 0  # the one whose text goes out as it comes

    def add(self, index: int, text: str) -> None:
        if index == self._shown:
            write(text)
        else:
            self._held[index].append(text)

    def close(self, index: int) -> None:
        self._is_closed[index] = True
        while self._shown < len(self._held) and self._is_closed[self._shown]:
            self._shown += 1
            write("\n" if self._shown == len(self._held) else "\n\n")
            if self._shown < len(self._held):
                write("".join(self._held[self._shown]))


def _ask_one(
    client: Client, request: PromptRequest, as_json: bool, trace: Path | None, resumption: Resumption | None
) -> Completion:
    if request.show_threads:
        with ThreadsView(console) as view:
            reply = client.follow(request, on_threads=view.update)
        write(reply.completed().text)
    else:

        def show_pause(is_paused: bool) -> None:
            if is_paused and console.is_terminal:
                console.print(" (waiting for KV memory) ", style="dim", end="")

        reply = client.follow(request, on_text=(lambda text: None) if as_json else write, on_pause=show_pause)
    completion = reply.completed()
    if resumption is not None and request.sampling.logprobs is not None:
        resumption.complete(completion)
    if as_json:
        print(json.dumps(completion.as_dict()))
    else:
        write("\n")
        console.print(metrics_table(completion))
    if trace is not None:
        names = {0: "rank 0: draft", SCHEDULER_TRACK: "scheduler"}
        names |= {rank: f"rank {rank}: stage {rank}" for rank in range(1, completion.stages + 1)}
        write_trace(trace, reply.trace, names)
        console.print(f"Trace of {len(reply.trace)} tasks in {trace}: open it at https://ui.perfetto.dev")
    return completion


def _compare(client: Client, request: PromptRequest, completion: Completion, method: str, description: RunDescription) -> None:
    """Answer a request again, by another method, and print both methods' times. Raises UserError if it is refused."""
    sampling = replace(request.sampling, seed=completion.seed)
    with console.status(f"The same prompt by {method}"):
        other = client.ask(replace(request, method=method, options={}, sampling=sampling))
    pair = [completion, other]
    times: list[Any] = [1000 * (one.metrics.tpot_seconds or 0.0) for one in pair]
    timesteps: list[Any] = [one.as_dict()["timesteps_per_token"] for one in pair]
    columns = (Column(name, justify="right") for name in ("", "ms per token", "timesteps per token"))
    table = Table(*columns, title=f"The same prompt by {method}", title_justify="left")
    for one, ms, count in zip(pair, times, timesteps, strict=True):
        table.add_row(one.method, f"{ms:.1f}", f"{count:.2f}")
    table.add_row(
        f"{method} / {completion.method}", *(f"{after / before:.2f}×" if before else "-" for before, after in (times, timesteps))
    )
    console.print(table)
    if completion.token_ids != other.token_ids:
        console.print("The two answers differ; in 16 bits that may be a near tie: see pipedec verify.", soft_wrap=True)
    if len({rank.host for rank in description.ranks}) == 1 and all(rank.device == "cpu" for rank in description.ranks):
        console.print(
            "In a timestep every stage computes once. Here the draft and all stages share one machine's processor, so each waits "
            "for the others; where every stage has a GPU of its own, the time follows the timesteps.",
            soft_wrap=True,
        )


def many_metrics_table(replies: Sequence[Reply]) -> Table:
    names = ("prompt", "prompt tokens", "tokens", "queued ms", "TTFT ms", "TPOT ms", "end to end ms", "timesteps per token")
    columns = (Column(name, justify="right") for name in names)
    table = Table(*columns, title=f"{len(replies)} prompts", title_justify="left")
    for index, reply in enumerate(replies):
        if reply.completion is None:
            table.add_row(str(index), "-", "refused")
            continue
        figures = reply.completion.as_dict()
        times = (figures[f"{name}_seconds"] for name in ("queue", "ttft", "tpot", "e2e"))
        table.add_row(
            str(index), str(figures["prompt_tokens"]), f"{figures['output_tokens']} ({figures['finish_reason']})",
            *("-" if not isinstance(seconds, float) else f"{1000 * seconds:.1f}" for seconds in times),
            f"{figures['timesteps_per_token']:.2f}",
        )  # fmt: skip
    return table


def metrics_table(completion: Completion) -> Table:
    figures, metrics = completion.as_dict(), completion.metrics
    cached = f" ({figures['cached_tokens']} cached)" if figures["cached_tokens"] else ""
    rate = metrics.acceptance_rate
    rows = {
        "prompt tokens": f"{completion.prompt_tokens}{cached}",
        "tokens": f"{figures['output_tokens']} ({completion.finish_reason})",
        "seed": completion.seed,
        "TTFT": shown_ms(metrics.ttft_seconds),
        "TPOT": shown_ms(metrics.tpot_seconds),
        "tokens/s": f"{figures['tokens_per_second']:.1f}",
        "timesteps per token": f"{figures['timesteps_per_token']:.2f}",
        "acceptance rate": None if rate is None else f"{rate:.0%} of {metrics.draft_tokens} draft tokens",
        "hit rate": f"{figures['hit_rate']:.0%}",
        "pauses": metrics.pauses or None,
        "prefill": shown_ms(metrics.prefill_seconds),
    }
    if completion.threads is not None:
        of_threads = completion.threads["metrics"]
        peak, flat = of_threads["max_cached_tokens"], of_threads["max_cached_tokens_flat"]
        rows |= {
            "threads": of_threads["threads"],
            "parallelism": f"{of_threads['parallelism']:.2f}",
            "peak cached tokens": f"{peak} ({flat} if decoded in one thread)",
        }
        rows |= {name.replace("_", " "): count for name, count in completion.threads["anomalies"].items()}
    return figures_table(rows, f"{completion.method}, {completion.stages} stages")


def figures_table(rows: Mapping[str, object], title: str | None = None) -> Table:
    """A table of names and figures, without those that are None."""
    table = Table(Column(style="dim"), Column(justify="right"), title=title, show_header=False, title_justify="left")
    for name, figure in rows.items():
        if figure is not None:
            table.add_row(name, str(figure))
    return table


def shown_ms(seconds: float | None) -> str | None:
    """Like ``3.2 ms``."""
    return None if seconds is None else f"{seconds * 1000:.1f} ms"


def write(text: str) -> None:
    """Write a piece of an answer to standard output, so that it can be read at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


class ThreadsView:
    """On a terminal, one panel per thread, redrawn in place. Otherwise one line per thread, printed when the thread ends."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._threads: dict[tuple[int, ...], ThreadNews] = {}  # with the whole text of each
        self._live = Live(console=console, refresh_per_second=10, transient=False) if console.is_terminal else None

    def __enter__(self) -> ThreadsView:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def update(self, changes: list[ThreadNews]) -> None:
        for change in changes:
            before = self._threads.get(change.path, ThreadNews(change.path, "", "running", 0))
            known = self._threads[change.path] = replace(change, text=before.text + change.text)
            if self._live is None and known.state == "ended" != before.state:
                self._console.print(f"{_name(known.path)}, {known.tokens} tokens: {known.text.strip()}", markup=False)
        if self._live is not None and changes:
            width = max(24, min(48, (self._console.width - 2) // max(1, min(len(self._threads), 4)) - 1))
            panels = []
            for path, known in sorted(self._threads.items()):
                text = Text("\n".join(known.text.strip().splitlines()[-_LINES:]))
                title = f"{_name(path)} · {known.tokens}"
                panels.append(Panel(text, title=title, width=width, border_style=_BORDERS[known.state]))
            self._live.update(Columns(panels))


def _name(path: tuple[int, ...]) -> str:
    return "main" if not path else "thread " + ".".join(str(ordinal + 1) for ordinal in path)
