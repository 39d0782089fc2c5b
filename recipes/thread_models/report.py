"""Reports of training models that answer in threads: model cards, tables, and a plot of the trade-off of speed and quality.

Also the options of such a run. ``figures`` computes what is reported.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from pipedec.flags import Help
from pipedec.train.run import CELLS, Row, Run, card, change_cells, print_table

THREADS_CARD = Path(__file__).with_name("threads.md.jinja")
PREFERENCE_CARD = Path(__file__).with_name("preference.md.jinja")
_ANSWER_COLUMNS = ("", "answers", "forked", "threads", "tokens", "chain", "parallelism", "speed-up", "finished", "circles")
_QUANTITIES = (("speedup", "theoretical speed-up"), ("parallelism", "parallelism"))
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")  # by round


@dataclass(frozen=True)
class ThreadsRun(Run):
    """The options of a run that trains a model to answer in threads."""

    held_out_prompts: Annotated[int, Meta(ge=1), Help("Maximum number of prompts of each kind to measure on.")] = 48


def loss_cells(row: Row) -> list[str]:
    """Loss and tokens of text, then of control tokens; the latter are empty if there are none."""
    control = [f"{row['control_loss']:.3f}", f"{row['control_tokens']:,}"] if "control_loss" in row else ["", ""]
    return [f"{row['loss']:.3f}", f"{row['tokens']:,}", *control]


def answer_cells(row: Row) -> list[str]:
    """Figures of answers in threads (``thread_figures``); with their quality, if a judge rated them."""
    means = (f"{row[name]:.1f}" for name in ("threads", "tokens", "longest_chain"))
    ratios = (f"{row[name]:.2f}" for name in ("parallelism", "speedup"))
    quality = [f"{row['quality']:.2f}", f"{row['win_rate']:.0%}"] if "quality" in row else []
    ends = (f"{row[name]:.0%}" for name in ("finished", "circles"))
    return [str(row["answers"]), f"{row['forked']:.0%}", *means, *ratios, *ends, *quality]


def thread_card(template: Path, report: dict[str, Any]) -> str:
    """The model card of a model that answers in threads, from the report of its training."""
    return card(template, report, CELLS | {"loss_cells": loss_cells, "answer_cells": answer_cells})


def print_tuned(report: dict[str, Any]) -> None:
    """Print losses and answers of a tuned model or, if it learned from a teacher, how well it predicts the teacher's."""
    losses = [(name, *loss_cells(row)) for name, row in report["held_out_loss"].items() if row]
    print_table("Held-out answers", ("", "text loss", "tokens", "control loss", "tokens"), losses)
    if "held_out" in report:
        found = report["held_out"].items()
        rows = [(f"{dialect} {rule}", *answer_cells(row)) for dialect, by_rule in found for rule, row in by_rule.items()]
        print_table("Answers to held-out prompts", _ANSWER_COLUMNS, rows)
    else:
        before, found = report["before"], report["agreement"].items()
        lines = ((dialect, rule, row) for dialect, by_rule in found for rule, row in by_rule.items())
        rows = [(f"{dialect} {rule}", *change_cells(before[dialect][rule], row)) for dialect, rule, row in lines]
        print_table("The teacher's answers", ("written", "top 1", "top 4", "top 16", "tokens"), rows)


def print_preferred(reports: list[dict[str, Any]]) -> None:
    """Print the answers of the model before, and of that of every round."""
    rows = [("before", *answer_cells(report["before"])) for report in reports[:1] if report["before"]]
    for report in reports:
        recipe = report["recipe"]
        score = f"{recipe['efficiency']}, λ = {recipe['quality_weight']}, round {report['round']}"
        if report["held_out"]:
            rows.append(("after" if len(reports) == 1 else score, *answer_cells(report["held_out"])))
    print_table("Greedy answers to held-out prompts", (*_ANSWER_COLUMNS, "quality", "wins"), rows)


def markdown_summary(lines: list[dict[str, Any]]) -> str:
    """The points of a trade-off (``summary``) as a table in Markdown."""
    if not lines:
        return ""
    cells = [["–" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value) for value in line.values()]
             for line in lines]  # fmt: skip
    rule = [":--", *["--:"] * (len(lines[0]) - 1)]
    return "".join(f"| {' | '.join(row)} |\n" for row in (list(lines[0]), rule, *cells))


def draw_trade_off(lines: list[dict[str, Any]], out: Path) -> list[Path]:
    """Draw quality against speed over λ and efficiency terms (PASTA, Figures 4 and 5) into ``out``, as PNG and SVG.

    Wins are the share of comparisons with the answer in one thread (which has 1 and 50%), by the judge. ``lines`` are those of
    ``summary``; λ and efficiency are None before the first round.
    """
    from matplotlib.figure import Figure  # of the extra ``bench``

    several = len({line["efficiency"] for line in lines if line["efficiency"]}) > 1
    figure = Figure(figsize=(7, 2.8), layout="constrained")
    both = figure.subplots(1, 2, sharey=True)
    for axes, (name, label) in zip(both, _QUANTITIES, strict=True):
        axes.set_xlabel(label)
        axes.margins(x=0.4, y=0.1)  # for the names of the points
        for number in sorted({line["round"] for line in lines}):
            found = [line for line in lines if line["round"] == number]
            colour, marker = ("black", "*") if number == 0 else (_COLOURS[(number - 1) % len(_COLOURS)], "o")
            places = [(point[name], 100 * point["win_rate"]) for point in found]
            axes.scatter(*zip(*places, strict=True), c=colour, marker=marker, label=f"round {number}" if number else "before")
            for point, place in zip(found, places, strict=True):
                if point["lambda"] is not None:
                    axes.annotate(_score(point, several), place, (4, 3), textcoords="offset points", fontsize=7, color=colour)
    both[0].set_ylabel("wins over one thread, %")
    both[0].legend(fontsize=8, frameon=False)
    files = [out / f"trade-off.{ending}" for ending in ("png", "svg")]
    for path in files:
        figure.savefig(path, dpi=200)
    return files


def _score(point: dict[str, Any], with_efficiency: bool) -> str:
    weight = "λ = ∞" if point["lambda"] == "inf" else f"λ = {point['lambda']:g}"
    return f"{point['efficiency']}, {weight}" if with_efficiency and point["lambda"] != "inf" else weight
