"""What differs between two records is found and named, and a revision without a record is one line."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from golden.margins import close_calls
from golden.questions import QUESTIONS
from golden.record import PROCESSOR, Cases, differences, read, write
from golden.revision import NoRecord, made_in, parts_of, worktree

CASE = {"tokens": [[5, 6, 7], [8]], "finish": "stop", "logprobs": [-0.5, -1.25]}
RECORDER = """
import pathlib, sys
folder, part = pathlib.Path(sys.argv[2]), sys.argv[3]
folder.mkdir(parents=True)
(folder / f"{part}.json").write_text('{"greedy": 1}')
"""


def changed(**values: Any) -> list[str]:
    return differences("texts", {"greedy": CASE}, {"greedy": {**CASE, **values}})


@pytest.mark.parametrize(
    ("values", "lines"),
    [
        ({}, []),
        ({"tokens": [[5, 9, 9], [8]]}, ["texts, greedy: tokens[0][1]: 9, recorded 6"]),
        ({"tokens": [[5, 6, 7], [8, 1]]}, ["texts, greedy: tokens[1][1]: 1, recorded nothing"]),
        ({"tokens": [[5, 6, 7]]}, ["texts, greedy: tokens[1]: nothing, recorded [8]"]),
        ({"logprobs": [-0.50009, -1.25]}, []),
        ({"logprobs": [-0.5, -1.2502]}, ["texts, greedy: logprobs[1]: -1.2502, recorded -1.25"]),
        (
            {"finish": "length", "tokens": []},
            ["texts, greedy: tokens[0]: nothing, recorded [5,6,7]", 'texts, greedy: finish: "length", recorded "stop"'],
        ),
        ({"report:calls": 9}, []),
        ({"rows": 1}, ["texts, greedy: rows: 1, recorded nothing"]),
    ],
)
def test_a_change_is_named_with_its_place(values: dict[str, Any], lines: list[str]) -> None:
    assert changed(**values) == lines


def test_an_integer_is_no_float_and_no_truth_value() -> None:
    assert differences("texts", {"rows": 1, "pruned": 0}, {"rows": 1.0, "pruned": False}) == [
        "texts, rows: 1.0, recorded 1",
        "texts, pruned: false, recorded 0",
    ]


@pytest.mark.parametrize(("processor", "found"), [("one", 2), ("another", 1)])
def test_what_a_processor_rounds_is_compared_on_its_kind_alone(processor: str, found: int) -> None:
    recorded = {PROCESSOR: "one", "rounded/alone": 1, "exact/alone": 1}
    assert len(differences("schedule", recorded, {PROCESSOR: processor, "rounded/alone": 2, "exact/alone": 2})) == found


def test_a_file_has_a_line_for_each_case_and_gives_back_what_was_written(tmp_path: Path) -> None:
    cases: Cases = {"greedy": CASE, "drawn": {"text": "Grüße\n"}, "none": {}}
    write("texts", cases, tmp_path)
    assert read("texts", tmp_path) == cases and read("schedule", tmp_path) == {}
    assert len((tmp_path / "texts.json").read_text(encoding="utf-8").splitlines()) == len(cases) + 2


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Two revisions: without a record, and with one whose recorder is a stub."""
    root = tmp_path / "repository"
    golden = root / "tests" / "golden"
    golden.mkdir(parents=True)
    (root / "README.md").write_text("first")
    git(root, "init", "--quiet")
    commit(root)
    for name, text in (("__init__", ""), ("__main__", RECORDER), ("texts", "")):
        (golden / f"{name}.py").write_text(text)
    commit(root)
    return root


def git(root: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=somebody", "-c", "user.email=somebody@example.org")
    return subprocess.run(["git", "-C", root, *identity, *arguments], check=True, capture_output=True, text=True).stdout


def commit(root: Path) -> None:
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "--message", "A revision")


def test_a_revision_makes_its_parts_with_its_own_recorder_and_leaves_nothing(repository: Path, tmp_path: Path) -> None:
    with worktree("HEAD", repository) as tree:
        assert parts_of(tree, ("texts", "faces")) == ("texts",)
        assert made_in(tree, ("texts",), tmp_path / "made") == {"texts": {"greedy": 1}}
    assert not tree.exists() and len(git(repository, "worktree", "list").splitlines()) == 1


@pytest.mark.parametrize(("revision", "message"), [("HEAD~1", "the revision has no tests/golden"), ("nowhere", "nowhere")])
def test_a_revision_without_a_record_is_one_line(repository: Path, revision: str, message: str) -> None:
    with pytest.raises(NoRecord, match=message), worktree(revision, repository) as tree:
        parts_of(tree, ("texts",))
    assert len(git(repository, "worktree", "list").splitlines()) == 1


def test_of_an_answer_that_is_not_the_targets_the_token_is_named() -> None:
    """So that only answers that are clear on every processor are recorded."""
    said = [read("texts")[f"question: {name}"]["tokens"] for name in ("copytree", "baker")]
    found = close_calls(QUESTIONS["copytree"], [*said[0][:3], said[1][3]])
    assert [call.place for call in found] == [((), 3)] and found[0].lead < 0 and "token 3 leads by -" in str(found[0])
