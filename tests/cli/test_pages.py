"""What commands show: several answers in the order of the prompts, threads of an answer, and bars while ranks start."""

from __future__ import annotations

import io
import random

import pytest
from rich.console import Console

from pipedec.cli import show
from pipedec.cli.answers import Pages, ThreadsView
from pipedec.cli.show import loading_bars
from pipedec.messages.events import ThreadNews


def test_the_first_answer_that_has_not_ended_is_printed_as_it_comes(capsys: pytest.CaptureFixture[str]) -> None:
    pages = Pages(2)
    pages.add(0, "one")
    assert capsys.readouterr().out == "one"
    pages.add(1, "two")
    assert capsys.readouterr().out == ""
    pages.close(0)
    assert capsys.readouterr().out == "\n\ntwo"
    pages.add(1, "!")
    pages.close(1)
    assert capsys.readouterr().out == "!\n"


def test_every_order_gives_the_same_page(capsys: pytest.CaptureFixture[str]) -> None:
    for seed in range(10):
        pages, source = Pages(4), random.Random(seed)
        left = {index: [f"{index}{piece}" for piece in "abc"[: index + 1]] for index in range(4)}
        while left:
            index = source.choice(sorted(left))
            if left[index]:
                pages.add(index, left[index].pop(0))
            else:
                pages.close(index)
                del left[index]
        assert capsys.readouterr().out == "0a\n\n1a1b\n\n2a2b2c\n\n3a3b3c\n"


def test_the_bar_of_a_warm_up_counts_forwards(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(show, "console", Console(file=screen, force_terminal=True, width=120))
    with loading_bars({"3 ranks": range(3)}) as progress:
        progress(0, "loading", 5, 10)
        progress(0, "warming", 12, 40)
        progress(2, "warming", 3, 40)
    assert "3 ranks: warming up, 15 of 80 forwards" in screen.getvalue()


def news(*path: int, text: str = "", state: str = "running", tokens: int = 1) -> ThreadNews:
    return ThreadNews(path, text, state, tokens)


def test_elsewhere_a_thread_is_a_line_when_it_has_ended() -> None:
    out = io.StringIO()
    with ThreadsView(Console(file=out, width=200)) as view:
        view.update([news(text="One. "), news(0, text="[fir")])
        view.update([])
        assert out.getvalue() == ""
        view.update([news(0, text="st] ", state="ended", tokens=4)])
        view.update([news(0, state="ended", tokens=4), news(0, 1, text="deep", state="waiting")])
        assert out.getvalue() == "thread 1, 4 tokens: [first]\n"
        view.update([news(0, 1, text="er", state="ended", tokens=2), news(text="Two.", state="ended", tokens=9)])
    assert out.getvalue().splitlines()[1:] == ["thread 1.2, 2 tokens: deeper", "main, 9 tokens: One. Two."]


def test_a_terminal_shows_a_panel_for_each_thread() -> None:
    out = io.StringIO()
    with ThreadsView(Console(file=out, width=100, force_terminal=True, color_system=None)) as view:
        view.update([news(text="One."), news(1, text="second [bold]"), news(0, text="\n".join(map(str, range(100, 130))))])
        view.update([news(1, text=" more", state="ended", tokens=7)])
    shown = out.getvalue()
    for wanted in ("main · 1", "thread 1 · 1", "thread 2 · 7", "second [bold] more", "129"):
        assert wanted in shown
    assert "105" not in shown, "only the latest lines"
    last = shown[shown.rindex("main · 1") :]
    assert last.index("thread 1") < last.index("thread 2")
