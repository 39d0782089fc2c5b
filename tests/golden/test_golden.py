"""The program behaves as it is written down in ``records``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from golden import texts
from golden.record import PARTS, PROCESSOR, Cases, NotHere, differences, is_of_another_processor, make, read
from golden.schedule import processor

pytestmark = [pytest.mark.slow, pytest.mark.seconds(1200.0), pytest.mark.numbers, pytest.mark.usefixtures("leaves_nothing")]

ADVICE = "If this was intended: make golden, in a commit of its own that says why."


@pytest.mark.in_turn(3)
@pytest.mark.parametrize("shape", texts.SHAPES)
def test_texts_are_those_of_the_record(shape: str, tmp_path: Path) -> None:
    others = tuple(f", {other}" for other in texts.SHAPES if other != shape)
    recorded = {name: case for name, case in read("texts").items() if not name.endswith(others)}
    check("texts", recorded, make("texts", tmp_path, shapes=[shape]))


@pytest.mark.parametrize("part", [part for part in PARTS if part != "texts"])
def test_the_record_is_what_the_program_does(part: str, tmp_path: Path) -> None:
    recorded, limits = read(part), dict[str, Any]()
    if part == "schedule":  # what is not compared need not be computed
        limits["with_rounded"] = recorded[PROCESSOR] == processor()
    try:
        made = make(part, tmp_path, **limits)
    except NotHere as why:
        pytest.skip(str(why))
    check(part, recorded, made)
    if is_of_another_processor(recorded, made):
        pytest.skip("what processors round otherwise is not compared: the record was made on another kind")


def check(part: str, recorded: Cases, made: Cases) -> None:
    found = differences(part, recorded, made)
    assert not found, "\n".join((f"{len(found)} differences.", *found, ADVICE))
