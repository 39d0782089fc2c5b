"""The program behaves as it is written down in ``records``."""

from __future__ import annotations

from pathlib import Path

import pytest

from golden.record import PARTS, NotHere, differences, is_of_another_processor, make, read

ADVICE = "If this was intended: make golden, in a commit of its own that says why."


@pytest.mark.slow
@pytest.mark.seconds(1200.0)
@pytest.mark.numbers
@pytest.mark.usefixtures("leaves_nothing")
@pytest.mark.parametrize("part", PARTS)
def test_the_record_is_what_the_program_does(part: str, tmp_path: Path) -> None:
    try:
        made = make(part, tmp_path)
    except NotHere as why:
        pytest.skip(str(why))
    recorded = read(part)
    found = differences(part, recorded, made)
    assert not found, "\n".join((f"{len(found)} differences.", *found, ADVICE))
    if is_of_another_processor(recorded, made):
        pytest.skip("what processors round otherwise is not compared: the record was made on another kind")
