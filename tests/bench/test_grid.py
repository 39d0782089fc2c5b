"""A grid: no row twice, whatever interrupted it, and rows of another schema are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.silent_progress import Silent

from pipedec.bench.record import Grid, append_rows, check_writable, header, revision
from pipedec.core.errors import PipedecError, UserError

SCHEMA = "pipedec.toy/1"


def measure(out: Path, cases: list[int], asked: str = "a question", wrong: int | None = None) -> tuple[Grid, list[int], Silent]:
    """The grid of ``cases``, those that were measured now, and the progress. ``wrong`` is a figure that cannot be right."""
    progress, measured = Silent(), list[int]()
    grid = Grid(SCHEMA, out, progress)

    def figures(case: int) -> dict[str, Any]:
        measured.append(case)
        return {"figure": 10 * case}

    def check(row: dict[str, Any]) -> None:
        if row["figure"] == wrong:
            raise PipedecError(f"{wrong} cannot be right")

    for case in cases:
        grid.row({"case": case}, [asked], lambda case=case: figures(case), check)
    return grid, measured, progress


def test_a_known_case_is_not_measured_again(tmp_path: Path) -> None:
    first, measured, progress = measure(tmp_path / "new", [1, 2])
    assert measured == [1, 2] and progress.rows == 2
    lines = (tmp_path / "new" / "rows.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == first.rows
    assert list(first.rows[0]) == ["schema", "key", "date", "version", "revision", "machine", "case", "figure"]
    again, measured, progress = measure(tmp_path / "new", [2, 3, 1])
    assert measured == [3] and progress.rows == 3 and [row["figure"] for row in again.rows] == [20, 30, 10]
    assert again.rows[0] == first.rows[1]


def test_what_was_asked_is_part_of_the_key(tmp_path: Path) -> None:
    measure(tmp_path, [1])
    _, measured, _ = measure(tmp_path, [1], "another question")
    assert measured == [1] and len((tmp_path / "rows.jsonl").read_text().splitlines()) == 2


def test_an_unfinished_line_is_measured_again_and_known_rows_are_checked_too(tmp_path: Path) -> None:
    measure(tmp_path, [1, 2])
    file = tmp_path / "rows.jsonl"
    file.write_text(file.read_text()[:-20])
    grid, measured, _ = measure(tmp_path, [1, 2])
    assert measured == [2] and [json.loads(line) for line in file.read_text().splitlines()] == grid.rows
    with pytest.raises(PipedecError, match="20 cannot be right"):
        measure(tmp_path, [1, 2], wrong=20)


def test_rows_of_another_schema_are_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"schema": "pipedec.other/1"}\n')
    with pytest.raises(UserError, match=r"line 1: schema pipedec\.other/1, not pipedec\.toy/1"):
        Grid(SCHEMA, tmp_path, Silent())


def test_rows_are_appended_with_their_header_where_they_can_be_written(tmp_path: Path) -> None:
    out = tmp_path / "figures.jsonl"
    check_writable(out)
    for number in (1, 2):
        append_rows(out, [header("x", {"a": number})])
    assert [line.count('"benchmark": "x"') for line in out.read_text().splitlines()] == [1, 1]
    known = revision()
    assert known == "unknown" or len(known.removesuffix("-dirty")) == 40
    for place, words in ((tmp_path / "missing" / "x.jsonl", "no directory"), (tmp_path, "cannot be written")):
        with pytest.raises(UserError, match=words):
            check_writable(place)
