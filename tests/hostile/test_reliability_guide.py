"""docs/reliability.md: it has every case, and the tests that its table names exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GUIDE = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
ROWS = [line.split("|") for line in GUIDE.splitlines() if re.match(r"\| [HKSRM]\d+ \|", line)]
LAST = {"H": 20, "K": 7, "S": 18, "R": 15, "M": 14}


def test_every_case_is_there_once() -> None:
    assert [row[1].strip() for row in ROWS] == [f"{kind}{number}" for kind, last in LAST.items() for number in range(1, last + 1)]


def test_every_case_has_a_test_or_a_reason() -> None:
    defined = {name for path in (ROOT / "tests").rglob("test_*.py") for name in re.findall(r"def (test_\w+)\(", path.read_text())}
    for _, case, _, _, tests, _ in ROWS:
        named = set(re.findall(r"`(test_\w+)`", tests))
        assert named <= defined, (case, named - defined)
        assert named or "*no test*" in tests, case
