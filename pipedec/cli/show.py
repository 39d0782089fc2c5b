"""Prints answers, progress and metrics. The answer goes to standard output, everything else to standard error."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from rich.table import Table

from pipedec.cli.threads_view import ThreadsView
from pipedec.client.client import Client
from pipedec.client.reply import Reply
from pipedec.client.resumption import Resumption
from pipedec.core import Completion, UserError
from pipedec.messages import PromptRequest
from pipedec.tracing import SCHEDULER_TRACK, write_trace

console = Console(stderr=True, highlight=False)


@contextmanager
def loading_bars(bars: Mapping[str, Collection[int]]) -> Iterator[Callable[[int, str, int, int], None]]:
    """Progress bars over the weights of ranks and their warm-up; yields the callback for a cluster's ``start``.

    Without a terminal, each of several bars is a line when it is full.

    Args:
        bars: the title of each bar, and its ranks.
    """
    columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn()
    reported: dict[int, tuple[str, int, int]] = {}
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        tasks = {title: progress.add_task(f"{title}: starting", total=None) for title in bars}

        def update(rank: int, what: str, done: int, total: int) -> None:
            reported[rank] = what, done, total
            title = next(title for title, ranks in bars.items() if rank in ranks)
            alike = [told for other in bars[title] if (told := reported.get(other)) and told[0] == what]
            completed, in_all = sum(told[1] for told in alike), sum(told[2] for told in alike)
            described = f"{title}: warming up" if what == "warming" else f"{title}: {what} weights"
            shown = f"{described}, {completed} of {in_all} forwards" if what == "warming" else described
            progress.update(tasks[title], description=shown, completed=completed, total=in_all)
            if completed == in_all and len(bars) > 1 and not console.is_terminal:
                console.print(f"{described}: done", soft_wrap=True)

        yield update


def ask_and_show(
    client: Client,
    requests: Sequence[PromptRequest],
    as_json: bool,
    trace: Path | None,
    resumption: Resumption | None = None,
) -> None:
    """Submit the requests, stream their text (or print one JSON document for each), then print their metrics.

    Args:
        resumption: what the only request goes on with.

    Raises:
        UserError: a request was refused; of several, the others are answered and shown first.
    """
    if len(requests) == 1:
        _ask_one(client, requests[0], as_json, trace, resumption)
        return
    if as_json:
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
    """The texts of several answers on standard output, one after the other, each as it is generated once those before it end."""

    def __init__(self, count: int) -> None:
        self._held: list[list[str]] = [[] for _ in range(count)]
        self._is_closed = [False] * count
        self._shown = 0  # whose text goes out as it comes

    def add(self, index: int, text: str) -> None:
        """A piece of the text of answer ``index``."""
        if index == self._shown:
            _write(text)
        else:
            self._held[index].append(text)

    def close(self, index: int) -> None:
        """The answer ``index`` is complete."""
        self._is_closed[index] = True
        while self._shown < len(self._held) and self._is_closed[self._shown]:
            self._shown += 1
            _write("\n" if self._shown == len(self._held) else "\n\n")
            if self._shown < len(self._held):
                _write("".join(self._held[self._shown]))


def _ask_one(client: Client, request: PromptRequest, as_json: bool, trace: Path | None, resumption: Resumption | None) -> None:
    if request.show_threads:
        with ThreadsView(console) as view:
            reply = client.follow(request, on_threads=view.update)
        _write(reply.completed().text)
    else:
        reply = client.follow(request, on_text=(lambda text: None) if as_json else _write, on_pause=_say_paused)
    completion = reply.completed()
    if resumption is not None and request.sampling.logprobs is not None:
        resumption.complete(completion)
    if as_json:
        print(json.dumps(completion.as_dict()))
    else:
        _write("\n")
        console.print(metrics_table(completion))
    if trace is not None:
        names = {0: "rank 0: draft", SCHEDULER_TRACK: "scheduler"}
        names |= {rank: f"rank {rank}: stage {rank}" for rank in range(1, completion.stages + 1)}
        write_trace(trace, reply.trace, names)
        console.print(f"Trace of {len(reply.trace)} tasks in {trace}: open it at https://ui.perfetto.dev")


def many_metrics_table(replies: Sequence[Reply]) -> Table:
    """The metrics of several answers, one line for each."""
    table = Table(title=f"{len(replies)} prompts", title_justify="left")
    for name in ("prompt", "prompt tokens", "tokens", "queued ms", "TTFT ms", "TPOT ms", "end to end ms", "timesteps per token"):
        table.add_column(name, justify="right")
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
    """The metrics of an answer, as printed below it."""
    figures = completion.as_dict()
    table = Table(title=f"{completion.method}, {completion.stages} stages", show_header=False, title_justify="left")
    table.add_column(style="dim")
    table.add_column(justify="right")
    cached = f" ({figures['cached_tokens']} cached)" if figures["cached_tokens"] else ""
    table.add_row("prompt tokens", f"{completion.prompt_tokens}{cached}")
    table.add_row("tokens", f"{figures['output_tokens']} ({completion.finish_reason})")
    if completion.seed is not None:
        table.add_row("seed", str(completion.seed))
    metrics = completion.metrics
    if metrics.ttft_seconds is not None:
        table.add_row("TTFT", f"{metrics.ttft_seconds * 1000:.1f} ms")
    if metrics.tpot_seconds is not None:
        table.add_row("TPOT", f"{metrics.tpot_seconds * 1000:.1f} ms")
    table.add_row("tokens/s", f"{figures['tokens_per_second']:.1f}")
    table.add_row("timesteps per token", f"{figures['timesteps_per_token']:.2f}")
    if metrics.acceptance_rate is not None:
        table.add_row("acceptance rate", f"{metrics.acceptance_rate:.0%} of {metrics.draft_tokens} draft tokens")
    table.add_row("hit rate", f"{figures['hit_rate']:.0%}")
    if metrics.pauses:
        table.add_row("pauses", str(metrics.pauses))
    table.add_row("prefill", f"{metrics.prefill_seconds * 1000:.1f} ms")
    if completion.threads is not None:
        of_threads, anomalies = completion.threads["metrics"], completion.threads["anomalies"]
        table.add_row("threads", str(of_threads["threads"]))
        table.add_row("parallelism", f"{of_threads['parallelism']:.2f}")
        cached, cached_flat = of_threads["max_cached_tokens"], of_threads["max_cached_tokens_flat"]
        table.add_row("peak cached tokens", f"{cached} ({cached_flat} if decoded in one thread)")
        for name, count in anomalies.items():
            table.add_row(name.replace("_", " "), str(count))
    return table


def _say_paused(is_paused: bool) -> None:
    if is_paused and console.is_terminal:
        console.print(" (waiting for KV memory) ", style="dim", end="")


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
