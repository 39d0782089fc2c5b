"""From questions to annotated files, by function and by command: shares, resuming, refusals."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from support.refusals import refusal

from pipedec.core.errors import UserError
from recipes.thread_models.__main__ import thread_models
from recipes.thread_models.annotation import AparRules, PastaRules, Rejected, choose
from recipes.thread_models.annotation import annotate as annotate_all
from recipes.thread_models.records import Question, read_annotated, read_questions
from recipes.thread_models.structure import JoinPoint, Structured

LIST = (
    "Three of them:\n\n1. One: the first of all points\n2. Two: the second of them all\n3. Six: the last of all points\n\nDone."
)


def length(text: str) -> int:
    return len(text.split())


def question(number: int, answer: str) -> Question:
    return Question(f"What is {number}?", answer, "file.jsonl", "file", f"What is {number}?")


def jsonl(path: Path, *rows: object) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def test_files_and_problems_are_questions_once_each(tmp_path: Path) -> None:
    row = {"question": " How many? ", "answer": "It is <<2*3=6>>6.\n"}
    named = {"prompt": "a", "answer": "b", "source": "s", "kind": "k", "subject": "t"}
    file = jsonl(tmp_path / "file.jsonl", row, {"instruction": "Go", "output": "Gone."}, row, named)
    *found, last = read_questions((file,), jsonl(tmp_path / "problems.jsonl", row))
    assert [(one.prompt, one.answer, one.source) for one in found] == [
        ("How many?", "It is <<2*3=6>>6.", "file.jsonl"),
        ("Go", "Gone.", "file.jsonl"),
        ("a", "b", "s"),
    ]
    assert found[2] == Question("a", "b", "s", "k", "t")
    assert (last.answer, last.source) == ("It is 6.", "problems")
    for answer in ({}, {"answer": " "}, {"answer": 3}):
        with pytest.raises(UserError, match=r"file\.jsonl, record 2: no question or no answer"):
            list(read_questions((jsonl(file, named, {"question": "How?", **answer}),)))


@pytest.mark.parametrize(("share", "others"), [(0.0, 0), (0.2, 2), (0.9, 30)])
def test_unstructured_answers_have_their_share_as_far_as_there_are_any(share: float, others: int) -> None:
    questions = [question(number, LIST) for number in range(8)] + [question(100 + number, "One.") for number in range(30)]
    chosen = choose(questions, AparRules(), share, seed=1)
    assert sorted(found.prompt for found in chosen if found.answer == LIST) == sorted(found.prompt for found in questions[:8])
    assert len(chosen) == len(set(chosen)) == 8 + others
    assert chosen == choose(questions, AparRules(), share, seed=1) != choose(questions, AparRules(), share, seed=2)


@pytest.mark.parametrize(("dialect", "rules"), [("apar", AparRules()), ("pasta", PastaRules(length, min_tokens=3))])
def test_a_killed_run_continues(tmp_path: Path, dialect: str, rules: AparRules | PastaRules) -> None:
    out = tmp_path / "out.jsonl"
    questions = [question(0, LIST), question(1, "One.\nTwo…"), question(2, LIST)]
    assert annotate_all(questions[:2], dialect, rules, None, out).written == 2
    whole = out.read_text()
    out.write_text(whole + whole[:40])
    outcome = annotate_all(questions, dialect, rules, None, out)
    assert (outcome.written, outcome.present) == (1, 2)
    records = list(read_annotated(out, dialect))
    assert [record.question for record in records] == questions
    assert [record.rule for record in records] == ["list", "none", "list"]
    assert records[1].pieces == ("One.\nTwo…",) and len(records[0].forks) == 3
    assert (JoinPoint() in records[0].pieces) == (dialect == "pasta")
    assert out.read_text().startswith(whole)


class Moody:
    """An annotator that refuses some questions."""

    name = "moody"

    def annotate(self, question: str, answer: str) -> Structured | None:
        if "1" in question:
            raise Rejected("not now")
        return None


def test_what_is_refused_is_left_out_or_left_to_the_rules(tmp_path: Path) -> None:
    questions = [question(0, LIST), question(1, LIST)]
    outcome = annotate_all(questions, "apar", Moody(), None, tmp_path / "out")
    assert (outcome.written, outcome.rejected) == (1, Counter({"not now": 1}))
    outcome = annotate_all(questions, "apar", Moody(), AparRules(), tmp_path / "out")
    assert (outcome.written, outcome.present, outcome.rejected) == (1, 1, Counter({"not now": 1}))
    assert [(record.annotator, record.rule) for record in read_annotated(tmp_path / "out", "apar")] == [
        ("moody", "none"),
        ("rules", "list"),
    ]


def test_a_record_that_is_wrong_is_named(tmp_path: Path) -> None:
    row = {"prompt": "?", "answer": "a b", "dialect": "pasta", "annotated": "a b"}
    for annotated, message in (("a<async topic='b'> b</async>", "without a promised length"), ("a<async> b", "unpaired")):
        path = jsonl(tmp_path / "out.jsonl", row, row | {"annotated": annotated})
        with pytest.raises(UserError, match=rf"out\.jsonl, record 2: .*{message}"):
            list(read_annotated(path, "pasta"))
    for changes, message in (
        ({"annotated": "a b"}, "its dialect is 'pasta', not 'apar'"),
        ({"dialect": "apar", "annotated": ["a", {"fork": " c"}]}, "'annotated' is not the answer"),
        ({"dialect": "apar", "annotated": ["a", {"spoon": " b"}]}, "must hold only texts and forks"),
    ):
        with pytest.raises(UserError, match=message) as wrong:
            list(read_annotated(jsonl(tmp_path / "out.jsonl", row | changes), "apar"))
        assert "\n" not in str(wrong.value)


def run(*options: str) -> Result:
    return CliRunner().invoke(thread_models, ["annotate", *options])


@pytest.mark.parametrize(
    ("dialect", "annotated"),
    [
        ("apar", ["Three of them:\n\n1. One:", {"fork": " the first of all points"}]),
        ("pasta", 'Three of them:\n\n1. One:<promise topic="One" tokens="10"/><async> the first of all points</async>\n2. '),
    ],
)
def test_the_command_writes_and_continues(tmp_path: Path, dialect: str, annotated: Any) -> None:
    out, rows = tmp_path / "out.jsonl", [{"question": text, "answer": "So."} for text in ("Why?", "Who?")]
    answers = jsonl(tmp_path / "answers.jsonl", {"question": "List three.", "answer": LIST}, *rows)
    command = ["--dialect", dialect, "--in", str(answers), "--out", str(out), "--min-block-tokens", "3"]
    ended = run(*command)
    assert ended.exit_code == 0 and "2 written" in ended.output and "answers.jsonl" in ended.output
    written = {row["prompt"]: row for row in map(json.loads, out.read_text().splitlines())}
    assert len(written) == 2 and written["List three."]["annotated"][: len(annotated)] == annotated
    assert "0 written" in run(*command).output and len(out.read_text().splitlines()) == 2


JUDGE = ["--annotator", "http://a/v1", "--model", "m"]


@pytest.mark.parametrize(
    ("dialect", "options", "message"),
    [
        ("apar", [], "nothing to annotate"),
        ("apar", ["--in", "absent.jsonl"], "cannot read absent.jsonl"),
        ("apar", ["--in", "a", "--unstructured-share", "1"], "below 1"),
        ("pasta", ["--in", "a", *JUDGE, "--api-key-env", "ABSENT"], "the environment variable ABSENT is not set"),
        ("pasta", ["--in", "a", "--tokenizer", "absent"], "no tokenizer in absent"),
    ],
)
def test_mistakes_are_one_line(tmp_path: Path, dialect: str, options: list[str], message: str) -> None:
    result = run("--dialect", dialect, *options, "--out", str(tmp_path / "out.jsonl"))
    assert message in refusal(result) and "\n" not in str(result.exception)
    assert not (tmp_path / "out.jsonl").exists()
