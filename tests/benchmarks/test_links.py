"""Answers over slow links: the order of turns, what follows from rows, what is refused. ``.ci/run`` has the hosts."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import support.hosts
from click.testing import CliRunner
from support.refusals import refusal
from support.tiny_pair import Pair

from benchmarks.links import (
    CHAIN,
    METHOD,
    PP_OVER_RING,
    Contender,
    LinksConfig,
    Point,
    links,
    links_figure,
    measure_links,
    measured_points,
    planned_ms,
    ratios,
    ratios_table,
    speeds_table,
)
from pipedec.bench.record import Row
from pipedec.plan.partition import Measured as MeasuredTimes

PROMPTS = ["one", "two"]
CONFIG = LinksConfig(
    hosts=(3,), delay_ms=(0.0, 40.0), methods=("pp,pipedec-bestfirst",), chains=("pipedec:width=1", "pipedec:width=2"),
    requests=(8,), repeats=2, beside=Path(__file__).parents[2],
)  # fmt: skip
MS = {  # per token, without delay and with it
    (METHOD, "pp", 1): (30.0, 165.0),
    (METHOD, "pipedec-bestfirst", 1): (10.0, 40.0),
    (CHAIN, "pipedec:width=1", 1): (20.0, 100.0),
    (CHAIN, "pipedec:width=2", 1): (15.0, 60.0),
    ("beside", "beside", 1): (10.0, 50.0),
    (METHOD, "pipedec-bestfirst", 8): (2.0, 2.5),
}


class Progress:
    def start(self, total: int) -> None:
        self.total = total

    def busy(self, text: str) -> None: ...

    def row(self) -> None: ...


class Site:
    """Answers without hosts. In its first turn a contender takes ten times as long, as on a machine that is disturbed."""

    def __init__(self, config: LinksConfig, point: Point, turns: list[str]) -> None:
        self._is_delayed, self._turns = point.delay_ms > 0, turns

    def turn(self, contender: Contender, prompts: Sequence[str]) -> Row:
        self._turns.append(contender.name)
        ms = 5 * MS[contender.kind, contender.name, contender.requests][self._is_delayed]
        answer = {"tokens": 6, "decode_ms": ms, "ttft_ms": 100.0, "timesteps": 7, "hits": 3, "misses": 2, "recoveries": 1}
        whole = 6 * ms / 5 * contender.requests
        answers = [{**answer, "e2e_ms": whole, "answer": prompt} for prompt in prompts]
        if contender.kind == CHAIN:
            answers[-1]["answer"] = "another"
        return {"answers": answers, "passage_at_end": 8}


def measured(out: Path, config: LinksConfig = CONFIG) -> tuple[list[Row], list[str]]:
    turns: list[str] = []

    def site(config: LinksConfig, point: Point) -> Any:
        return nullcontext(Site(config, point, turns))

    return measure_links(config, PROMPTS, out, Progress(), site), turns


def test_turns_go_in_both_orders_and_what_is_there_is_not_measured_again(tmp_path: Path) -> None:
    rows, turns = measured(tmp_path)
    order = [contender.name for contender in CONFIG.contenders]
    assert order[-2:] == ["beside", "pipedec-bestfirst"] and turns == [*order, *order[::-1]] * 2
    assert [len(row["answers"]) for row in rows[: len(order)]] == [2, 2, 2, 2, 2, 8]
    again, turns = measured(tmp_path, replace(CONFIG, repeats=3))
    assert turns == order * 2 and [row for row in again if row["turn"] < 2] == rows


def test_ratios_follow_from_the_rows(tmp_path: Path) -> None:
    points = measured_points(measured(tmp_path)[0])
    still, slow = points
    assert (still.ring_ms, slow.ring_ms) == (0, 120)

    def planned(point: Point, times: MeasuredTimes) -> tuple[float, float]:
        assert (times.pass_ms, times.timestep_ms, times.timesteps_per_token) == pytest.approx((30, 10 / 1.4, 1.4))
        return point.ring_ms + 30, 50

    assert ratios(points, planned)[slow] == pytest.approx({
        PP_OVER_RING: 165 / (120 + 30), "pp: time / planned": 165 / 150, "default: time / planned": 40 / 50,
        "default / pp": 165 / 40, "default / chain": 60 / 40, "default / beside": 50 / 40,
        "8 requests / without delay": 2.0 / 2.5,
    })  # fmt: skip
    assert "default / llama.cpp" not in ratios(points)[slow]
    without = {point: here for point, here in points.items() if point == slow}
    assert PP_OVER_RING not in ratios(without, planned)[slow] and "default / pp" in ratios(without)[slow]
    chain = next(one for one in points[slow] if one.kind == CHAIN)
    assert (chain.timesteps, chain.hits, chain.misses, chain.recoveries) == (7 / 5, 6, 4, 4)
    assert (chain.passage, chain.equal) == (8, (2, 4))


def test_plans_know_the_links(pair: Pair) -> None:
    models = {"target": str(pair.target), "draft": str(pair.draft)}
    times = MeasuredTimes(30.0, 10.0, 0.5)
    pp, default = planned_ms(models, Point(3, 40.0, 100.0, "auto"), times)
    assert 150 < pp < 160 and default < pp
    assert planned_ms(models, Point(3, 40.0, 100.0, "9"), times)[1] != default


def test_a_disturbed_turn_does_not_count(tmp_path: Path) -> None:
    rows, _ = measured(tmp_path, replace(CONFIG, repeats=3))
    expected = ratios(measured_points(rows))
    for row in rows:
        if row["turn"] == 1:
            row["answers"] = [answer | {name: 10 * answer[name] for name in ("decode_ms", "e2e_ms")} for answer in row["answers"]]
    assert ratios(measured_points(rows)) == expected


def test_tables_and_figure_show_every_contender(tmp_path: Path) -> None:
    points = measured_points(measured(tmp_path)[0])
    speeds = speeds_table(points)
    assert speeds.row_count == 2 * len(CONFIG.contenders) and ratios_table(ratios(points)).row_count == 2
    assert "pipedec-bestfirst, 8 requests" in speeds.columns[4].cells
    figure = links_figure(points)
    assert figure is not None
    drawn = {line.get_label(): list(line.get_ydata()) for line in figure.axes[0].lines}
    assert drawn["chain"] == pytest.approx([1000 / 15, 1000 / 60]), "the fastest"
    assert set(drawn) == {"PP", "PipeDec best-first", "chain", "beside"}
    assert links_figure({point: here for point, here in points.items() if point.delay_ms}) is None


def test_hosts_that_cannot_be_made_are_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support.hosts, "lacking", lambda: ["root", "/dev/net/tun"])
    done = CliRunner().invoke(links, ["--prompt", "a", "--out", str(tmp_path / "out")])
    assert done.exit_code == 0 and "Nothing is measured: hosts on one machine need root, /dev/net/tun." in done.output
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--prompt", "a", "--chain", "pipedec:breadth=1"], "no option 'breadth'"),
        (["--prompt", "a", "--delay-ms", "-1"], "--delay-ms"),
        (["--prompt", "a", "--beside", "nowhere"], "--beside nowhere: no checkout of pipedec"),
        (["--prompt", "a", "--llama-cpp", "."], "needs a target that is a GGUF file: give --target smollm2"),
        (["--prompt", "a", "--llama-cpp", ".", "--target", "model.gguf"], "no llama-server and rpc-server"),
        ([], "no prompts"),
    ],
)
def test_command_refuses(flags: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert words in refusal(CliRunner().invoke(links, [*flags, "--out", "out"]))
