"""What the steps of ``make gpu-day`` have measured, as tables in Markdown, each with a line that says what to look at."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

GOAL = 0.80  # of the bound that the memory's bandwidth sets, for steps of up to GOAL_ROWS rows
GOAL_ROWS = 16
LOG = "log.txt"  # what the commands of a step have printed
_LINES = 40


class Reading(NamedTuple):
    """A line for the overview, and what stands under the step's heading."""

    note: str
    text: str


def printed(folder: Path) -> Reading:
    """The last lines that the commands have printed."""
    return Reading("", f"```text\n{tail(folder / LOG)}\n```")


def tail(path: Path, lines: int = _LINES) -> str:
    """The last lines of a log, of those that a progress bar has written over each other the last one."""
    text = path.read_text(errors="replace").split("\n") if path.is_file() else []
    return "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in text[-lines:]).strip("\n")


def tests(folder: Path) -> Reading:
    """How many tests passed, why others did not run, and the figures that they recorded."""
    path = folder / "tests.xml"
    if not path.is_file():
        return Reading("the tests did not end", "")
    cases = list(ElementTree.parse(path).iter("testcase"))
    failed = [str(case.get("name")) for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = Counter(str(found.get("message")) for case in cases if (found := case.find("skipped")) is not None)
    counts = [f"{len(cases) - len(failed) - skipped.total()} of {len(cases)} tests passed"]
    counts += [f"failed: {', '.join(failed)}"] if failed else []
    counts += [f"{count} skipped: {reason}" for reason, count in skipped.items()]
    recorded = [(case.get("name"), found.get("name"), found.get("value")) for case in cases for found in case.iter("property")]
    return Reading("; ".join(counts), table(("test", "figure", "value"), recorded) if recorded else "")


def layers(folder: Path) -> Reading:
    """Forwards beside their bounds, and whether small steps reach the goal."""
    measured = records(folder / "layers.jsonl")
    rows = [row for row in measured if row["operation"] == "forward"]
    speed = [row["speed"] for row in measured if row["operation"] == "products" and row["speed"] is not None]
    small = [row for row in rows if row["rows"] <= GOAL_ROWS and row["lanes"] == 1 and row["bound_by"] == "memory"]
    if not small:
        return Reading("no step was bound by memory", "")
    worst = min(small, key=lambda row: row["share_of_bound"])
    state = "reached" if worst["share_of_bound"] >= GOAL else "MISSED"
    where = f"{worst['share_of_bound']:.0%} with {worst['rows']} rows after {worst['past']} tokens"
    source = rows[0]["roofline"]["source"]
    note = f"goal of {GOAL:.0%} of the memory's bound {state}: at worst {where} (bandwidth: {source})"
    cells = [
        (row["past"], row["lanes"], row["rows"], ms(row["time_us"]["median"] / 1000), ms(row["bound_us"] / 1000), row["bound_by"],
         f"{row['share_of_bound']:.0%}")
        for row in rows
    ]  # fmt: skip
    text = table(("tokens before", "requests", "rows", "ms", "bound, ms", "bound by", "of the bound"), cells)
    of_plans = [f"\n\nFor plans (`layers --write`):\n\n```json\n{json.dumps(one, indent=1)}\n```" for one in speed]
    return Reading(note, "".join((text, *of_plans)))


def kernels(folder: Path) -> Reading:
    """Own kernels beside torch's way, and which of them reach the goal."""
    rows = records(folder / "kernels.jsonl")
    worst = min(rows, key=lambda row: row["share_of_bandwidth"])
    where = f"{worst['operation']} with {worst['rows']} rows, {worst['share_of_bandwidth']:.0%} of the bandwidth"
    cells = [
        (row["operation"], row["past"] or "-", row["rows"], f"{row['time_us']['median']:.1f}", f"{row['share_of_bandwidth']:.0%}",
         f"{row['torch_time_us']['median']:.1f}", f"{row['torch_share']:.0%}", f"{row['difference']:.0e}")
        for row in rows
    ]  # fmt: skip
    names = "kernel", "tokens before", "rows", "µs", "of the bandwidth", "torch, µs", "torch's", "difference"
    return Reading(f"computed by {rows[0]['computed_by']}; at worst {where}", table(names, cells))


def draft(folder: Path) -> Reading:
    """Forwards of a draft, and how many a timestep has time for."""
    step, *rows = records(folder / "draft.jsonl")
    cells = [
        (row["rows"], ms(row["time_us"]["median"] / 1000), ms(row["bound_us"] / 1000), f"{row['share_of_bound']:.0%}",
         row["per_timestep"])
        for row in rows
    ]  # fmt: skip
    layers = f"{step['config']['layers']} layers of {step['config']['model']}"
    note = f"a timestep of {layers} takes {ms(step['time_us']['median'] / 1000)} ms"
    return Reading(note, table(("rows", "ms", "bound, ms", "of the bound", "per timestep"), cells))


def operations(folder: Path) -> Reading:
    rows = records(folder / "operations.jsonl")
    cells = [(row["operation"], row["tree_rows"], f"{row['time_us']['median']:.1f}") for row in rows]
    return Reading("", table(("operation", "rows", "median, µs"), cells))


def stages(folder: Path) -> Reading:
    """Milliseconds per token of the cluster that ran (wall) beside the computed ones, and what a timestep consists of.

    The computed clock gives every stage a card of its own. ``pp`` has one stage at work at a time, so one card for all is no loss
    to it: its ratio is the cost of processes, transfers and Redis. Other methods share the card, and may take up to
    ``stages`` times as long.
    """
    wall, computed = (ms_per_token(folder / name / "rows.jsonl") for name in ("wall", "computed"))
    ratios = {method: wall[method] / computed[method] for method in wall if computed.get(method)}
    cells = [(method, ms(wall[method]), ms(computed[method]), f"{ratio:.2f}") for method, ratio in ratios.items()]
    of_timesteps = [
        (row["method"], row["rows"], ms(row["timestep_ms"]), ms(row["slowest_compute_ms"]), ms(row["left_ms"]))
        for row in records(folder / "overhead.jsonl")
    ]
    note = "wall time over computed time: " + ", ".join(f"{method} {ratio:.2f}" for method, ratio in ratios.items())
    text = table(("method", "ms per token, wall", "computed", "ratio"), cells) + "\n\n"
    return Reading(note, text + table(("method", "rows", "timestep, ms", "slowest stage's forward", "left"), of_timesteps))


def ms_per_token(path: Path) -> dict[str, float]:
    """Of a sweep, by method."""
    return {row["method"]: row["ms_per_token"] for row in records(path) if row["ms_per_token"]}


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def ms(value: float) -> str:
    return f"{value:.3f}" if value < 1 else f"{value:.2f}"


def table(names: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """In Markdown."""
    lines = [names, ["---"] * len(names), *([str(cell).replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
