"""What benchmarks share."""

from __future__ import annotations

import pytest

from benchmarks.output import SameAnswers
from pipedec.core.errors import PipedecError


def test_answers_to_a_question_are_equal() -> None:
    same = SameAnswers()
    rows = [{"method": method, "cluster": {"stages": stages}} for method, stages in (("pp", 1), ("bita", 2))]
    same.check("first", [1, 2], rows[0], "to the first")
    same.check("first", [1, 2], rows[1], "to the first")
    same.check("second", [3], rows[1], "to the second")
    with pytest.raises(PipedecError, match="bita on 2 stages and pp on 1 stages gave different answers to the first: a defect"):
        same.check("first", [1, 3], rows[1], "to the first")
