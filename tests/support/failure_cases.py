"""The column of tests in docs/reliability-cases.md, from the marker ``failure_case`` of tests.

``python tests/support/failure_cases.py`` writes the page. The other columns are written by hand, and so is the reason of a case
without a test. Sources are read and not imported.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reliability-cases.md"
ROW = re.compile(r"\| (?P<case>[A-Z]\d+[a-e]?) \| (?P<text>.+? \| .+?) \| (?P<tests>.*) \|")
UNTESTED = re.compile(r"\*no test\*.*")


def tests_by_case() -> dict[str, list[str]]:
    """The names of the tests of each case, sorted."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in (ROOT / "tests").rglob("test_*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if not isinstance(node, ast.FunctionDef):
                continue
            for mark in node.decorator_list:
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.failure_case":
                    for case in mark.args:
                        found[ast.literal_eval(case)].add(node.name)
    return {case: sorted(tests) for case, tests in found.items()}


def page(text: str, tests: dict[str, list[str]]) -> str:
    """The page ``text`` with ``tests`` in its last column.

    Raises:
        ValueError: a test names a case that the page does not have, or a case has neither a test nor a reason.
    """
    cases = {row["case"] for row in map(ROW.fullmatch, text.splitlines()) if row}
    if unknown := tests.keys() - cases:
        raise ValueError(f"{PAGE.name} has no case {', '.join(sorted(unknown))}")

    def with_tests(row: re.Match[str]) -> str:
        untested = UNTESTED.search(row["tests"])
        names = [f"`{name}`" for name in tests.get(row["case"], [])] + ([untested[0]] if untested else [])
        if not names:
            raise ValueError(f"case {row['case']} has no test: mark one, or write *no test* and why")
        return f"| {row['case']} | {row['text']} | {', '.join(names)} |"

    return "\n".join(with_tests(row) if (row := ROW.fullmatch(line)) else line for line in text.split("\n"))


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), tests_by_case()), encoding="utf-8")
