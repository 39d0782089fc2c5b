"""The questions that the library answers: their lists and paragraphs have a structure, subjects are held out together."""

from __future__ import annotations

import random
import re
import sysconfig
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from recipes.reference_models.__main__ import reference_models
from recipes.reference_models.corpus import standard_library_files
from recipes.reference_models.library_questions import corpus_questions, gloss, library_questions, sections
from recipes.reference_models.list_questions import Entry, several_problems
from recipes.thread_models.records import Question, read_questions
from recipes.thread_models.structure import paragraph_tree, whole_parts


def test_sections_of_a_docstring_are_lists() -> None:
    docstring = """Do it.

    Positional arguments:
      first -- what comes first,
               and is needed
      *rest -- all that follows it

      last: what comes last

    Then it ends. Note: this is no entry.
    """
    ((noun, entries),) = sections(docstring)
    assert noun == "arguments"
    assert entries == [
        Entry("first", "what comes first, and is needed"),
        Entry("rest", "all that follows it"),
        Entry("last", "what comes last"),
    ]


@pytest.mark.parametrize(
    ("text", "short"),
    [("Say it.\nAnd more.\n\nLater.", "Say it. And more."), ("Short.", ""), ("See https://a.b now.", "")],
)
def test_a_gloss_is_whole_sentences_that_say_something(text: str, short: str) -> None:
    assert gloss(text) == short


def keep_one_file_in(number: int, library: Path, patch: pytest.MonkeyPatch) -> None:
    """A standard library in the directory ``library`` with some of the files, which is quick."""
    paths = sysconfig.get_paths()
    for path in standard_library_files()[::number]:
        kept = library / path.relative_to(paths["stdlib"])
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.symlink_to(path)
    patch.setattr(sysconfig, "get_paths", lambda: paths | {"stdlib": str(library)})


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Question]]:
    with pytest.MonkeyPatch.context() as patch:
        keep_one_file_in(6, tmp_path_factory.mktemp("library"), patch)
        yield list(library_questions(seed=0))


@pytest.mark.slow
def test_the_library_answers_with_lists_and_paragraphs(library: list[Question]) -> None:
    rules: dict[str, Counter[str]] = {}
    for found in library:
        structure = paragraph_tree(found.answer)
        rule = structure.rule if structure else "none"
        if found.kind == "details":  # APAR wants three points, of which some have two
            rule, _ = whole_parts(found.answer) or ("none", [])
        rules.setdefault(found.kind, Counter())[rule] += 1
    assert {"methods", "functions", "classes", "arguments", "attributes", "exceptions", "modules", "steps", "suggestions"} <= set(
        rules
    )
    for kind, counts in rules.items():
        wanted = "paragraphs" if kind in ("descriptions", "explanations", "topics") else "list"
        assert counts[wanted] > 0.9 * counts.total(), (kind, counts)
    assert sum(counts["list"] for counts in rules.values()) > 300
    for found in library:
        if found.kind == "details":  # long enough for a thread
            parts = whole_parts(found.answer)
            assert parts is not None and 2 <= len(parts[1]) <= 5 and min(end - start for start, end in parts[1]) >= 130


def test_several_problems_are_asked_and_solved_in_the_same_order() -> None:
    problems = [
        Question(f"What is {number} + 1?", f"It is {number} + 1 = {number + 1}.", "problems", "problems", f"{number}")
        for number in range(200)
    ]
    several = list(several_problems(problems, random.Random(0)))
    assert {len(re.findall(r"^\d\. What", one.prompt, re.MULTILINE)) for one in several} == {2, 3}
    used = [number for one in several for number in re.findall(r"What is (\d+)", one.prompt)]
    assert len(used) == len(set(used)) > 190, "each problem is in one question"
    held_out = {problem.subject for problem in problems if problem.held_out}
    for one in several:
        asked, solved = re.findall(r"What is (\d+)", one.prompt), re.findall(r"Problem \d: It is (\d+)", one.answer)
        assert asked == solved and len({number in held_out for number in asked}) == 1 and one.held_out == (asked[0] in held_out)


def test_so_many_are_given_as_are_asked_for_and_subjects_are_held_out_whole(library: list[Question]) -> None:
    asked = [(re.search(r"^(?:Give|Name|List) (?:me )?(\d) ", found.prompt), found.answer) for found in library]
    counted = [(int(number[1]), len(re.findall(r"^\d\. ", answer, re.MULTILINE))) for number, answer in asked if number]
    assert len(counted) > 10 and all(wanted == given for wanted, given in counted)
    held_out = {found.subject for found in library if found.held_out}
    assert held_out and not held_out & {found.subject for found in library if not found.held_out}


def test_a_file_of_questions_is_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_one_file_in(40, tmp_path / "library", monkeypatch)
    path = tmp_path / "library.jsonl"
    result = CliRunner().invoke(reference_models, ["questions", "--out", str(path), "--seed", "3"], catch_exceptions=False)
    assert f"written to {path}" in result.output
    expected = list(dict.fromkeys([*library_questions(3), *corpus_questions()]))
    assert list(read_questions([path])) == expected and {"docstrings", "methods"} <= {found.kind for found in expected}
