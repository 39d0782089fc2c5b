"""docs/reliability-cases.md has every case with its tests; the tests that CONTRIBUTING.md names exist."""

from __future__ import annotations

import re

from support import failure_cases
from support.failure_cases import PAGE, ROOT

GUIDE, CONTRIBUTING = (path.read_text(encoding="utf-8") for path in (PAGE, ROOT / "CONTRIBUTING.md"))
ROWS = [line.split("|") for line in GUIDE.splitlines() if re.match(r"\| [HKSRM]\d+ \|", line)]
LAST = {"H": 43, "K": 11, "S": 20, "R": 15, "M": 26}
DEFINED = {
    (path.relative_to(ROOT).as_posix(), name)
    for path in (ROOT / "tests").rglob("test_*.py")
    for name in re.findall(r"def (test_\w+)\(", path.read_text(encoding="utf-8"))
}


def test_every_case_is_there_once() -> None:
    assert [row[1].strip() for row in ROWS] == [f"{kind}{number}" for kind, last in LAST.items() for number in range(1, last + 1)]


def test_the_page_is_what_the_markers_say() -> None:
    assert failure_cases.page(GUIDE, failure_cases.tests_by_case()) == GUIDE, "run python tests/support/failure_cases.py"


def test_every_behaviour_has_a_test_by_name() -> None:
    """And every test that this page names is in the file that it names."""
    section = CONTRIBUTING.split("## Behaviours with a test by name")[1].split("\n## ")[0]
    behaviours = [line for line in section.splitlines() if line.startswith("| ")][1:]
    assert len(behaviours) >= 17 and all("::test_" in line.split("|")[2] for line in behaviours)
    named = set(re.findall(r"`([\w/]+\.py)::(\w+)`", CONTRIBUTING))
    assert named <= DEFINED, named - DEFINED
