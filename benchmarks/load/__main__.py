"""``python -m benchmarks.load``: many requests at once, on recorded answers in computed time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import click
from rich.console import Console

from benchmarks.load.benchmark import LoadConfig, bench_load
from benchmarks.load.flags import LoadFlags, ReplayFlags
from benchmarks.load.offered import Conversation, drawn_in_turn, led_by
from benchmarks.load.replayed import OnReplay, disturbance_text, disturbed, random_prompts
from benchmarks.load.results import load_figure, load_table, provenance, row_name
from benchmarks.output import draw
from pipedec.bench.options import Drawing
from pipedec.bench.record import ROWS_FILE, Row, append_rows
from pipedec.bench.report.style import FAINT, FULL_WIDTH, TEXT, TICK_POINTS, dress, finish, legend_above, new_figure
from pipedec.cli.benchmarks.shared import BenchPromptFlags, ProgressBar, make_directory, print_files, question_options
from pipedec.cli.options import refuse_flags
from pipedec.core.errors import UserError
from pipedec.flags import Help, options_of, own_options, partial_of, run_command
from pipedec.messages.request import PromptRequest

if TYPE_CHECKING:
    import numpy
    from matplotlib.figure import Figure

_REQUEST_COLORS = (
    "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#6A4C9C", "#8C6D31", "#1B2A41", "#F0B323",
)  # fmt: skip
_CELL = 12  # columns of the picture per timestep
_FILL_TIMESTEPS = 72


def fill_figure(fill: Sequence[Sequence[dict[int, int]]], row: Row, title: str | None = None) -> Figure | None:
    """Who occupies which stage at which timestep: a column for each timestep, a line for each group, divided among requests by
    their rows. None without a record of it."""
    if not fill:
        return None
    shown = fill[:_FILL_TIMESTEPS]
    requests = sorted({number for groups in shown for here in groups for number in here})
    figure = new_figure(FULL_WIDTH, 0.9 + 0.13 * len(shown[0]))
    axes = figure.add_subplot()
    frame = (0.5, len(shown) + 0.5, len(shown[0]) + 0.5, 0.5)
    axes.imshow(_picture(shown, requests), aspect="auto", interpolation="nearest", extent=frame)
    dress(axes, "timestep", "stage" if row["cluster"]["groups"] == row["cluster"]["stages"] else "group", grid="x")
    axes.set_axisbelow(False)
    axes.grid(False)
    axes.set_yticks(range(1, len(shown[0]) + 1), [str(group) if group % 2 else "" for group in range(1, len(shown[0]) + 1)])
    for number in requests[: len(_REQUEST_COLORS)]:
        axes.plot([], [], marker="s", linestyle="", color=_color(number), label=f"request {number + 1}")
    if len(requests) > len(_REQUEST_COLORS):
        axes.plot([], [], marker="s", linestyle="", color=FAINT, label=f"{len(requests) - len(_REQUEST_COLORS)} more")
    legend_above(figure, axes)
    axes.tick_params(labelsize=TICK_POINTS, colors=TEXT)
    notes = [f"{row['policy']}, {provenance([row])}", "A cell is divided among requests by their rows in it; white: idle"]
    return finish(figure, notes, title)


def _picture(fill: Sequence[Sequence[dict[int, int]]], requests: Sequence[int]) -> numpy.ndarray:
    """The cells as an image [groups, timesteps × _CELL, 3]."""
    import numpy
    from matplotlib.colors import to_rgb

    picture = numpy.ones((len(fill[0]), len(fill) * _CELL, 3))
    for timestep, groups in enumerate(fill):
        for group, here in enumerate(groups):
            column, total = float(timestep * _CELL), sum(here.values())
            for number in requests:
                if number in here:
                    after = column + (_CELL - 1) * here[number] / total  # the last column stays white, between two timesteps
                    picture[group, round(column) : round(after)] = to_rgb(_color(number))
                    column = after
    return picture


def _color(number: int) -> str:
    return _REQUEST_COLORS[number] if number < len(_REQUEST_COLORS) else FAINT


@click.command()
@options_of(ReplayFlags, "where")
@options_of(LoadFlags, "offered")
@partial_of(LoadConfig, "configured")
@question_options
@options_of(Drawing, "drawing", only=("seed", "raw_prompts", "own_work"))
@own_options
def load(
    where: ReplayFlags,
    offered: LoadFlags,
    configured: Callable[..., LoadConfig],
    asked: BenchPromptFlags,
    drawing: Drawing,
    out: Annotated[Path, Help("Directory of the results: rows.jsonl and pictures.", "DIR")],
) -> None:
    """Offer many requests at once, a fixed number at a time or at random times; one row per method and load.

    Recorded answers pass through an emulated cluster in computed time: minutes instead of hours. Reports the time to first token
    (TTFT), between events that bring tokens (ITL), per output token (TPOT) and end to end, throughput over all and while the load
    is full, and goodput.

    Appends to OUT/rows.jsonl and draws OUT/load, and OUT/fill: who occupies which stage at which timestep, of the load that
    yields the most tokens per timestep.
    """
    config = configured(**offered.settings(), sampling=asked.sampling, seed=drawing.seed)
    make_directory(out)
    request = config.request(drawing.raw_prompts)
    place = OnReplay(where.shape(asked.config, asked.pair, drawing.own_work), where.recording, request, where.dispatch == "tasks")
    conversations, intruder = _conversations(where, offered, asked, config, place, request)
    loads = []
    with ProgressBar() as bar:
        for measured in bench_load(config, place, conversations, bar):
            if intruder is not None:
                measured.row["intruder"] = disturbed(measured.load, measured.outcome, place, intruder)
            append_rows(out / ROWS_FILE, [measured.row])
            loads.append(measured)
    rows = [one.row for one in loads]
    page = Console(width=None if Console().is_terminal else 150)
    page.print(load_table(rows))
    for row in rows:
        if late := row.get("intruder"):
            page.print(f"{row_name(row)}: {disturbance_text(late)}")
    fullest = max(loads, key=lambda one: one.row["tokens_per_timestep"] or 0.0)
    files = draw({"load": load_figure(rows), "fill": fill_figure(fullest.outcome.fill, fullest.row)}, out)
    print_files(out / ROWS_FILE, *files)


def _conversations(
    where: ReplayFlags,
    offered: LoadFlags,
    asked: BenchPromptFlags,
    config: LoadConfig,
    place: OnReplay,
    request: PromptRequest,
) -> tuple[list[Conversation], Conversation | None]:
    """Those of the longest load, and the intruder."""
    intruder = None
    if config.intruder is not None:
        (intruder,) = random_prompts(config.intruder, place.vocabulary, request, 1, config.seed + 1)
    if where.random_tokens is not None:
        refuse_flags(("system_prompt",), "has text, and --random prompts have none")
        drawn = random_prompts(where.random_tokens, place.vocabulary, request, config.most, config.seed, config.turns)
        return drawn, intruder
    if where.recording is None:
        raise UserError("give --recording DIR, where the target's answers are kept, or --random N")
    drawn = drawn_in_turn(place.prompter, asked.prompt_sets(), request, config.most, config.seed, config.turns)
    return led_by(offered.system_text(), drawn, place.prompter), intruder


if __name__ == "__main__":
    run_command(load)
