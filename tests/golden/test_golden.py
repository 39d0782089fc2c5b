"""The program behaves as it is written down in ``records``."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

import pytest

from golden.processes import KINDS
from golden.record import PROCESSOR, Cases, differences, is_of_another_processor, make, read
from golden.schedule import processor
from golden.texts import SHAPES

pytestmark = [pytest.mark.seconds(1200.0), pytest.mark.numbers, pytest.mark.usefixtures("leaves_nothing")]

ADVICE = "If this was intended: make golden, in a commit of its own that says why."


@pytest.mark.slow
@pytest.mark.in_turn(3)
@pytest.mark.parametrize("shape", SHAPES)
def test_texts_are_those_of_the_record(shape: str, tmp_path: Path) -> None:
    check("texts", without(SHAPES, shape, read("texts")), make("texts", tmp_path, shapes=[shape]))


@pytest.mark.slow
@pytest.mark.in_turn(3)
@pytest.mark.parametrize("kind", KINDS)
def test_processes_do_what_is_in_the_record(kind: str, tmp_path: Path) -> None:
    check("processes", without(KINDS, kind, read("processes")), make("processes", tmp_path, kinds=[kind]))


@pytest.mark.slow
def test_timesteps_are_those_of_the_record(tmp_path: Path) -> None:
    """Rounded values are computed only on the processor of the record: elsewhere they are not compared."""
    recorded = read("schedule")
    check("schedule", recorded, make("schedule", tmp_path, with_rounded=recorded[PROCESSOR] == processor()))


def test_the_program_looks_as_in_the_record(tmp_path: Path) -> None:
    check("faces", read("faces"), make("faces", tmp_path))


def without(choices: Collection[str], choice: str, recorded: Cases) -> Cases:
    """The cases whose names have none of the other choices."""
    others = re.compile(rf"(^|[/ ])({'|'.join(re.escape(other) for other in choices if other != choice)})(,|$)")
    return {name: case for name, case in recorded.items() if not others.search(name)}


def check(part: str, recorded: Cases, made: Cases) -> None:
    found = differences(part, recorded, made)
    assert not found, "\n".join((f"{len(found)} differences.", *found, ADVICE))
    if is_of_another_processor(recorded, made):
        pytest.skip("what processors round otherwise is not compared: the record was made on another kind")
