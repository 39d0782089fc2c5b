"""The threads of an answer on a terminal, and elsewhere."""

from __future__ import annotations

import io

from rich.console import Console

from pipedec.cli.answers import ThreadsView
from pipedec.messages import ThreadNews


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
