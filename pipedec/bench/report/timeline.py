"""Draws a trace: one lane per rank and one for the scheduler, time from left to right.

Knows the Chrome trace format that ``tracing`` writes; not how the trace was made.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipedec.bench.report.style import TEXT, new_figure
from pipedec.core.errors import UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Colours that colour-blind readers can distinguish, in the order of the legend.
CATEGORIES = {"prefill": "#E3B23C", "forward": "#3B7DB8", "sync": "#C8553D", "transfer": "#A9B4C0"}
_NAMES = {"pre": "prefill", "dec": "forward", "sync": "sync", "transfer": "transfer"}
_LETTERS = {"P": "prefill", "F": "forward", "S": "sync", ">": "transfer"}
_FORMATS = (".svg", ".png", ".pdf")
_LANE_INCHES = 0.34
_FONT_POINTS = 7.0
_MOST_TIMESTEP_MARKS = 60


@dataclass(frozen=True)
class Bar:
    """One task in lane ``lane`` (the trace's tid); times in ms since the start of the trace."""

    lane: int
    label: str
    category: str
    start_ms: float
    end_ms: float


@dataclass(frozen=True)
class Timeline:
    """The bars, in order of their start, and the title of every lane from top to bottom."""

    bars: tuple[Bar, ...]
    lanes: dict[int, str]

    @property
    def start_ms(self) -> float:
        return min(bar.start_ms for bar in self.bars)

    @property
    def end_ms(self) -> float:
        return max(bar.end_ms for bar in self.bars)

    def between(self, from_ms: float | None, to_ms: float | None) -> Timeline:
        """The part between two times; bars that cross the borders are cut. Raises UserError if no bar lies in it."""
        low = self.start_ms if from_ms is None else from_ms
        high = self.end_ms if to_ms is None else to_ms
        if low >= high:
            raise UserError(f"--from-ms {low:g} must be below --to-ms {high:g}")
        bars = tuple(
            replace(bar, start_ms=max(bar.start_ms, low), end_ms=min(bar.end_ms, high))
            for bar in self.bars
            if bar.start_ms < high and bar.end_ms > low
        )
        if not bars:
            raise UserError(f"no task runs between {low:g} and {high:g} ms: the trace ends at {self.end_ms:.1f} ms")
        return Timeline(bars, self.lanes)


def read_timeline(path: Path) -> Timeline:
    """Read a trace of ``pipedec generate --trace``. Raises UserError if it is missing, no such trace, or has no task."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        events = document["traceEvents"] if isinstance(document, dict) else document
        lanes = {event["tid"]: str(event["args"]["name"]) for event in events if event.get("name") == "thread_name"}
        bars = [_bar(event) for event in events if event.get("ph") == "X"]
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{path} is not a Chrome trace: give a file that pipedec generate --trace wrote") from None
    tasks = sorted((bar for bar in bars if bar is not None), key=lambda bar: bar.start_ms)
    if not tasks:
        raise UserError(f"{path} holds no pipeline task: trace a request with pipedec generate --trace FILE")
    scheduler_last = sorted({bar.lane for bar in tasks}, key=lambda lane: (lane == 0, lane))
    return Timeline(tuple(tasks), {lane: lanes.get(lane, f"rank {lane - 1}") for lane in scheduler_last})


def draw_timeline(timeline: Timeline, out: Path, title: str | None = None) -> None:
    """Write the timeline to ``out``; its suffix determines the format.

    Raises UserError if matplotlib is not installed, or the format is unknown.
    """
    if out.suffix.lower() not in _FORMATS:
        raise UserError(f"--out {out}: the name must end in one of {', '.join(_FORMATS)}")
    positions, heights = _stacked(timeline)
    figure = new_figure(15, 1.3 + _LANE_INCHES * sum(heights.values()))
    from matplotlib.patches import Patch

    axes = figure.add_subplot()
    span = timeline.end_ms - timeline.start_ms
    axes.set_xlim(timeline.start_ms, timeline.end_ms)
    axes.set_ylim(sum(heights.values()), 0)
    _draw_lanes(axes, timeline, heights)
    points_per_ms = 72 * 13.4 / span
    for bar, (top, height) in zip(timeline.bars, positions, strict=True):
        _draw_bar(axes, bar, top, height, span, points_per_ms)
    _mark_timesteps(axes, timeline)
    used = {bar.category for bar in timeline.bars}
    handles = [Patch(facecolor=color, label=category) for category, color in CATEGORIES.items() if category in used]
    axes.legend(
        handles=handles, loc="lower right", bbox_to_anchor=(1, 1.0), borderaxespad=1.6, ncols=len(handles), frameon=False,
        fontsize=9, handlelength=1.2, labelcolor=TEXT,
    )  # fmt: skip
    heading = title if title is not None else "dotted lines and numbers: where rank 0 begins each timestep"
    axes.set_title(heading, loc="left", fontsize=10, color=TEXT, pad=18)  # clear of the timestep numbers
    figure.savefig(out, dpi=160, metadata={"Date": None} if out.suffix.lower() == ".svg" else None)


def _bar(event: dict[str, Any]) -> Bar | None:
    """A bar for a pipeline's task; None for other events (the end of an answer, other tools' events)."""
    name, start = str(event["name"]), float(event["ts"]) / 1000
    category = _NAMES.get(event["cat"]) or next((kind for letter, kind in _LETTERS.items() if letter in name), None)
    if category is None:
        return None
    return Bar(int(event["tid"]), name, category, start, start + float(event["dur"]) / 1000)


def _stacked(timeline: Timeline) -> tuple[list[tuple[float, float]], dict[int, float]]:
    """Position (top, height) of each bar, and height of each lane, in units of a rank's lane.

    A rank runs one task at a time. The scheduler has granted many at once: they share its lane in thin rows.
    """
    levels: list[int] = []
    ends: dict[int, list[float]] = {lane: [] for lane in timeline.lanes}
    for bar in timeline.bars:
        free = ends[bar.lane]
        level = next((index for index, end in enumerate(free) if end <= bar.start_ms), len(free))
        free[level : level + 1] = [bar.end_ms]
        levels.append(level)
    heights = {lane: 1.0 if len(ends[lane]) == 1 else max(1.0, 0.16 * len(ends[lane])) for lane in timeline.lanes}
    tops = dict(zip(heights, accumulate(heights.values(), initial=0.0), strict=False))
    positions = []
    for bar, level in zip(timeline.bars, levels, strict=True):
        height = 0.76 * heights[bar.lane] / len(ends[bar.lane])
        positions.append((tops[bar.lane] + 0.12 * heights[bar.lane] + level * height, height))
    return positions, heights


def _draw_bar(axes: Axes, bar: Bar, top: float, height: float, span: float, points_per_ms: float) -> None:
    """A bar of at least a visible width, and its label if it fits."""
    width = max(bar.end_ms - bar.start_ms, span / 2500)
    gap = 0.0 if height > 0.5 else 0.1 * height
    color = CATEGORIES[bar.category]
    axes.broken_barh([(bar.start_ms, width)], (top, height - gap), facecolor=color, edgecolor="white", linewidth=0.25)
    label_points = 0.62 * _FONT_POINTS * len(bar.label) + 2
    if height > 0.5 and label_points < width * points_per_ms:
        axes.text(
            bar.start_ms + width / 2, top + height / 2, bar.label, ha="center", va="center_baseline",
            fontsize=_FONT_POINTS, color="white" if bar.category in ("forward", "sync") else TEXT, clip_on=True,
        )  # fmt: skip


def _draw_lanes(axes: Axes, timeline: Timeline, heights: dict[int, float]) -> None:
    """Lane titles, a faint stripe under every other lane, the time axis."""
    top, centres = 0.0, []
    for index, height in enumerate(heights.values()):
        if index % 2 == 0:
            axes.axhspan(top, top + height, color="#F4F6F8", linewidth=0, zorder=0)
        centres.append(top + height / 2)
        top += height
    axes.set_yticks(centres, list(timeline.lanes.values()), fontsize=9, color=TEXT)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=9, colors=TEXT)
    axes.set_xlabel("time (ms)", fontsize=9, color=TEXT)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _mark_timesteps(axes: Axes, timeline: Timeline) -> None:
    """A dotted line with the timestep's number where rank 0 begins it, unless there are too many timesteps."""
    first_lane = 1  # rank 0
    begins = {bar.label[2:]: bar.start_ms for bar in timeline.bars if bar.lane == first_lane and bar.label.startswith("0F")}
    if len(begins) > _MOST_TIMESTEP_MARKS:
        return
    for seq, start_ms in begins.items():
        if start_ms > timeline.start_ms:
            axes.axvline(start_ms, color=TEXT, linewidth=0.6, linestyle=(0, (1, 2)), alpha=0.6, zorder=3)
            axes.annotate(
                seq, (start_ms, 1), xycoords=("data", "axes fraction"), xytext=(0, 2), textcoords="offset points",
                ha="center", va="bottom", fontsize=7.5, color=TEXT,
            )  # fmt: skip
