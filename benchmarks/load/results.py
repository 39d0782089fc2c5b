"""The outcomes of requests under load: their figures in a row; rows as a table for a terminal, and as the paper's Figure 8."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean
from typing import TYPE_CHECKING

from rich.table import Table

from benchmarks.load.offered import Pattern
from pipedec.bench.record import Row
from pipedec.bench.report import style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PERCENTILES = (50, 90, 99)
_PANELS = (("throughput (tokens/s)", "tokens_per_s", None), ("TPOT (ms)", "tpot_ms", "mean"), ("TTFT (ms)", "ttft_ms", "mean"))
_LEGEND_COLUMNS = 4
_COLUMNS = (
    "tokens/s", "steady", "× first", "TTFT ms", "p99", "TPOT ms", "p99", "ITL ms", "p99", "end to end s", "timesteps", "rows",
    "own ms",
)  # fmt: skip


@dataclass(frozen=True)
class ServedRequest:
    """One request. All times are seconds since the load began.

    Attributes:
        events: for each event that brought tokens, its time and their number.
        ended: when it was complete.
        queue_seconds: waiting for a place in the pipeline.
        timesteps: from the first token to the last.
        refused: why it was not answered; None if it was.
        turn: of its conversation, from 1.
        cached_tokens: tokens of the prompt that were not computed, because another request's KV cache had them.
        pauses: how often it was paused because KV memory ran short.
        ttft_timesteps: timesteps of the pipeline from its submission to the first token; None if only rank 0 knows.
    """

    prompt_set: str
    index: int
    prompt_tokens: int
    submitted: float
    events: tuple[tuple[float, int], ...]
    ended: float
    queue_seconds: float = 0.0
    timesteps: int = 0
    hits: int = 0
    misses: int = 0
    draft_tokens: int = 0
    refused: str | None = None
    turn: int = 1
    cached_tokens: int = 0
    pauses: int = 0
    ttft_timesteps: int | None = None

    @property
    def output_tokens(self) -> int:
        return sum(tokens for _, tokens in self.events)

    @property
    def ttft(self) -> float:
        return self.events[0][0] - self.submitted

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first; None if there is only one."""
        tokens = self.output_tokens
        return (self.events[-1][0] - self.events[0][0]) / (tokens - 1) if tokens > 1 else None

    @property
    def e2e(self) -> float:
        return self.ended - self.submitted

    @property
    def itl(self) -> list[float]:
        """The times between events that bring tokens."""
        return [after - before for (before, _), (after, _) in pairwise(self.events)]

    def meets(self, goals: Goals) -> bool:
        """Whether it was answered within the goals. An answer of one token meets any TPOT."""
        if self.refused is not None or (goals.ttft_ms is not None and 1000 * self.ttft > goals.ttft_ms):
            return False
        return goals.tpot_ms is None or self.tpot is None or 1000 * self.tpot <= goals.tpot_ms


@dataclass(frozen=True)
class Goals:
    """Limits for goodput, which counts requests whose times are at most these."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None


@dataclass(frozen=True)
class LoadOutcome:
    """A whole run of one method under one load.

    Attributes:
        timesteps, rows: of the pipeline while any request was in it, and rows that entered; None if only its own rank 0 knows.
        own_seconds, kv: rank 0's own work in the timesteps; a row's field about the pools of KV memory; None likewise.
        fill: by timestep, for each group the requests and their numbers of rows there; empty if not recorded.
    """

    served: tuple[ServedRequest, ...]
    timesteps: int | None = None
    rows: int | None = None
    own_seconds: float | None = None
    fill: Sequence[Sequence[dict[int, int]]] = field(default=(), repr=False)
    kv: Row | None = None

    def figures(self, concurrency: int | None, goals: Goals) -> Row:
        """All figures: times in ms, throughput in tokens/s, goodput in requests/s; the makespan ends with the last request."""
        answered = [one for one in self.served if one.refused is None and one.events]
        tokens = sum(one.output_tokens for one in answered)
        makespan = max(one.ended for one in self.served) - min(one.submitted for one in self.served)
        steady = steady_throughput(answered, concurrency)
        return {
            "requests": len(self.served),
            "refused": sum(one.refused is not None for one in self.served),
            "output_tokens": tokens,
            "makespan_s": round(makespan, 6),
            "tokens_per_s": _ratio(tokens, makespan),
            "steady_tokens_per_s": steady and round(steady, 4),
            "goodput_per_s": None if goals == Goals() else _ratio(sum(one.meets(goals) for one in answered), makespan),
            "timesteps": self.timesteps,
            "rows_per_timestep": _ratio(self.rows or None, self.timesteps),
            "own_ms_per_timestep": _ratio(1000 * self.own_seconds if self.own_seconds else None, self.timesteps),
            "tokens_per_timestep": _ratio(tokens, self.timesteps),
            "pauses": sum(one.pauses for one in self.served),
            "kv": self.kv,
            "turns": self._turns(),
            **_prompt_figures(answered),
            "ttft_ms": _distribution(one.ttft for one in answered),
            "itl_ms": _distribution(gap for one in answered for gap in one.itl),
            "tpot_ms": _distribution(one.tpot for one in answered if one.tpot is not None),
            "e2e_ms": _distribution(one.e2e for one in answered),
            "queue_ms": _distribution(one.queue_seconds for one in answered),
        }

    def _turns(self) -> list[Row]:
        """By turn of the conversations; empty if each has only one."""
        turns = sorted({one.turn for one in self.served})
        rows = []
        for turn in turns if len(turns) > 1 else ():
            some = [one for one in self.served if one.turn == turn and one.events]
            timesteps = max((one.ttft_timesteps or 0 for one in some), default=0) or None
            ttft_ms = _distribution(one.ttft for one in some)
            rows.append({"turn": turn, **_prompt_figures(some), "ttft_ms": ttft_ms, "ttft_timesteps": timesteps})
        return rows


def steady_throughput(answered: Sequence[ServedRequest], concurrency: int | None) -> float | None:
    """Tokens per second while the load is full; None if it never is.

    With a fixed concurrency the load is full from when as many requests have their first token until the last one is submitted;
    else from the first submission to the last.
    """
    if not answered:
        return None
    begins = sorted(one.events[0][0] for one in answered)
    start = begins[min(concurrency, len(begins)) - 1] if concurrency else min(one.submitted for one in answered)
    end = max(one.submitted for one in answered)
    tokens = sum(count for one in answered for at, count in one.events if start < at <= end)
    return tokens / (end - start) if end > start else None


def _prompt_figures(served: Sequence[ServedRequest]) -> Row:
    """Tokens of all prompts, and how many of them were computed."""
    prompts, cached = sum(one.prompt_tokens for one in served), sum(one.cached_tokens for one in served)
    return {"prompt_tokens": prompts, "cached_tokens": cached, "prefilled_tokens": prompts - cached}


def _distribution(seconds: Iterable[float]) -> Row | None:
    """Mean, percentiles and maximum in ms; None if there are no values."""
    ordered = sorted(seconds)
    if not ordered:
        return None
    ranks = {f"p{share}": ordered[min(len(ordered) - 1, len(ordered) * share // 100)] for share in PERCENTILES}
    return {name: round(1000 * value, 3) for name, value in {"mean": fmean(ordered), **ranks, "max": ordered[-1]}.items()}


def _ratio(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else round(part / whole, 4)


def load_table(rows: Sequence[Row]) -> Table:
    """One line per method and load; below the lines goodput, refusals, memory and turns."""
    cluster = rows[0]["cluster"]
    title = f"Load on {cluster['preset']}, emulated ({cluster['stages']} stages), times computed"
    caption = "\n".join(note for row in rows for note in _notes(row))
    table = style.terminal_table(title, ("load", "method", *_COLUMNS), ("load", "method"), caption)
    table.columns[0].no_wrap = table.columns[1].no_wrap = True
    for row in rows:
        first = next(one for one in rows if (one["pattern"], one["max_num_seqs"]) == (row["pattern"], row["max_num_seqs"]))
        load = Pattern(**row["pattern"]).label
        if len({one["max_num_seqs"] for one in rows}) > 1:
            load += f", {row['max_num_seqs']} at once"
        table.add_row(
            load, row["policy"], _number(row["tokens_per_s"]), _number(row["steady_tokens_per_s"]),
            f"{row['tokens_per_s'] / first['tokens_per_s']:.2f}" if row["tokens_per_s"] and first["tokens_per_s"] else "-",
            *(_number((row[name] or {}).get(part)) for name in ("ttft_ms", "tpot_ms", "itl_ms") for part in ("mean", "p99")),
            f"{row['e2e_ms']['mean'] / 1000:.2f}" if row["e2e_ms"] else "-",
            str(row["timesteps"] or "-"), _number(row["rows_per_timestep"]), _number(row["own_ms_per_timestep"]),
        )  # fmt: skip
    return table


def row_name(row: Row) -> str:
    """The load and the method of a row."""
    return f"{Pattern(**row['pattern']).label}, {row['policy']}"


def _notes(row: Row) -> list[str]:
    notes = []
    if row["goodput_per_s"] is not None:
        notes.append(f"goodput {row['goodput_per_s']:.3f} requests/s")
    if row["refused"]:
        notes.append(f"{row['refused']} requests refused")
    computed = f"{row['prefilled_tokens']:,} prompt tokens computed, {row['cached_tokens']:,} cached, {row['pauses']} pauses"
    kv = row["kv"]
    memory = f", {kv['peak_slots']:,} of {kv['capacity_slots']:,} KV slots used at most" if kv else ""
    notes.append(computed + memory)
    for turn in row["turns"]:
        timesteps = f", at most {turn['ttft_timesteps']} timesteps" if turn["ttft_timesteps"] else ""
        notes.append(
            f"turn {turn['turn']}: {turn['prefilled_tokens']:,} of {turn['prompt_tokens']:,} prompt tokens computed, "
            f"TTFT {turn['ttft_ms']['mean']:.0f} ms{timesteps}"
        )
    return [f"{row_name(row)}: {note}" for note in notes]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def load_figure(rows: Sequence[Row], title: str | None = None) -> Figure | None:
    """Throughput, time per output token and time to first token over the load, a line per method; None for a single load."""
    rows = [row for row in rows if row["max_num_seqs"] == rows[0]["max_num_seqs"]]
    by_rate = all(row["pattern"]["rate"] is not None for row in rows)
    key = "rate" if by_rate else "concurrency"
    rows = [row for row in rows if row["pattern"][key] is not None]
    loads = sorted({row["pattern"][key] for row in rows})
    if len(loads) < 2:
        return None
    looks = style.method_looks(row["method"] for row in rows)
    policies = sorted(dict.fromkeys(row["policy"] for row in rows), key=lambda one: list(looks).index(one.partition(":")[0]))
    figure = style.new_figure(style.FULL_WIDTH, 2.5)
    panels = figure.subplots(1, len(_PANELS))
    for axes, (y_label, name, part) in zip(panels, _PANELS, strict=True):
        for policy in policies:
            look = looks[policy.partition(":")[0]]
            own = [row for row in rows if row["policy"] == policy]
            values = {row["pattern"][key]: row[name] if part is None else (row[name] or {}).get(part) for row in own}
            points = sorted((load, value) for load, value in values.items() if value is not None)
            label = policy if ":" in policy else look.name()
            axes.plot(
                *zip(*points, strict=True), color=look.color, marker=look.marker, markersize=4, linewidth=1.4, label=label
            )  # fmt: skip
        style.dress(axes, "requests per second" if by_rate else "concurrent requests", y_label, grid="both")
        style.log_axis(axes, "x", loads)
        axes.set_ylim(0, 1.08 * axes.dataLim.ymax)
    handles, names = panels[0].get_legend_handles_labels()
    figure.legend(
        handles, names, loc="outside upper left", ncols=min(len(names), _LEGEND_COLUMNS), frameon=False,
        fontsize=style.TICK_POINTS, labelcolor=style.TEXT,
    )  # fmt: skip
    counts = sorted({row["requests"] for row in rows})
    span = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return style.finish(figure, [provenance(rows), f"Means over {span} requests"], title)


def provenance(rows: Sequence[Row]) -> str:
    """Cluster, clock and version of the rows, for small print."""
    row, cluster = rows[0], rows[0]["cluster"]
    place = f"{cluster['preset']} ({cluster['stages']} stages), emulated"
    return f"{place}, times computed, pipedec {row['version']} {row['revision'][:8]}"
