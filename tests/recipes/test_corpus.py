"""What models learn from: documents and how they are mixed, questions that the library answers, and prompts made of them."""

from __future__ import annotations

import json
import random
import re
import sysconfig
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest
from click.testing import CliRunner

from pipedec.core.errors import UserError
from recipes.reference_models import corpus
from recipes.reference_models.__main__ import reference_models
from recipes.reference_models.corpus import Document, standard_library_files
from recipes.reference_models.invented_prompts import exchanged, write_prompts
from recipes.reference_models.library_questions import corpus_questions, library_questions, sections
from recipes.reference_models.list_questions import Entry
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
    assert sum(counts["list"] for counts in rules.values()) > 150
    for found in library:
        if found.kind == "details":  # long enough for a thread
            parts = whole_parts(found.answer)
            assert parts is not None and 2 <= len(parts[1]) <= 5 and min(end - start for start, end in parts[1]) >= 130


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


def test_word_problems_lose_their_calculator_notes(tmp_path: Path) -> None:
    path = tmp_path / "problems.jsonl"
    path.write_text(json.dumps({"question": "How many?", "answer": "It is 2*3=<<2*3=6>>6.\n#### 6"}) + "\n")
    (document,) = corpus.word_problem_documents(path)
    assert document.text == "<|begin|><|user|>How many?<|end|><|assistant|>It is 2*3=6.\n#### 6<|end|>"


def test_mix_keeps_the_shares_and_is_reproducible() -> None:
    documents = [Document("a", f"a{number:09}") for number in range(50)] + [Document("b", f"b{number:09}") for number in range(9)]
    weights = {"a": 0.75, "b": 0.25, "absent": 1.0}
    mixed = list(corpus.mix(documents, weights, characters=4000, seed=3))
    share = sum(len(document.text) for document in mixed if document.family == "a") / 4000
    assert abs(share - 0.75) < 0.01
    assert mixed == list(corpus.mix(documents, weights, characters=4000, seed=3))
    assert [document.held_out for document in documents] == [Document("b", document.text).held_out for document in documents]
    first_epoch = [document for document in mixed if document.family == "b"][:9]
    assert len(set(first_epoch)) == 9, "every document once before any comes again"


def test_names_are_exchanged_for_names_of_their_shape_and_numbers_for_others() -> None:
    prompts = ["Explain `a.b()` and `Cat`.", "What is `os.path`?", "Solve:\n\n1. Add 12 and 7.5 to 3.\n2. Add 80,000 to 40."]
    questions = [Question(prompt, "", "", "", "") for prompt in (*prompts, "`x.y()` or `Dog`?")]
    found = set(islice(exchanged(questions, random.Random(0)), 400))
    assert {"Explain `x.y()` and `Dog`.", "`a.b()` or `Cat`?", "What is `os.path`?"} <= found
    names = {name for prompt in found for name in re.findall("`[^`]+`", prompt)}
    assert names == {"`a.b()`", "`x.y()`", "`Cat`", "`Dog`", "`os.path`"} and "What is `Cat`?" not in found
    sums = [re.fullmatch(r"Solve:\n\n1\. Add (\d+) and 7\.5 to (\d)\.\n2\. Add 80,000 to (\d+)\.", prompt) for prompt in found]
    numbers = [one.groups() for one in sums if one]
    assert len(numbers) > 9 and all(len(a) == len(c) == 2 and int(b) >= 2 for a, b, c in numbers)
    assert {b for _, b, _ in numbers} > {"3"}


def test_no_prompt_is_known_and_held_out_questions_give_nothing(tmp_path: Path) -> None:
    subjects = [Question("", "", "", "", f"s{number}") for number in range(400)]
    held_out = next(one.subject for one in subjects if one.held_out)
    known = next(one.subject for one in subjects if not one.held_out)
    rows = [
        {"prompt": "What is `shown`?", "answer": "An answer.", "subject": known},
        {"prompt": "Why is `also_shown`?", "answer": "An answer.", "subject": known},
        {"prompt": "Who is `hidden`?", "answer": "An answer.", "subject": held_out},
    ]
    source, out = tmp_path / "questions.jsonl", tmp_path / "prompts.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    ran = CliRunner().invoke(reference_models, ["prompts", "--in", str(source), "--count", "9", "--out", str(out)])
    assert ran.output == f"2 written to {out}\n" and ran.exit_code == 0
    assert {json.loads(line)["prompt"] for line in out.read_text().splitlines()} == {"What is `also_shown`?", "Why is `shown`?"}
    nothing = tmp_path / "without.jsonl"
    nothing.write_text('{"prompt": "What?", "answer": "That."}\n')
    with pytest.raises(UserError, match="nothing to exchange"):
        write_prompts((nothing,), 3, out)
