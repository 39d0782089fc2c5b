"""What commands show: several answers in the order of the prompts, and bars while ranks start."""

from __future__ import annotations

import io
import random

import pytest
from rich.console import Console

from pipedec.cli import show
from pipedec.cli.answers import Pages
from pipedec.cli.show import loading_bars


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


@pytest.mark.parametrize("seed", range(10))
def test_every_order_gives_the_same_page(seed: int, capsys: pytest.CaptureFixture[str]) -> None:
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
