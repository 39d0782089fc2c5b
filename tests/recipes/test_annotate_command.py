"""The command annotate: what it writes, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from support.refusals import refusal

from recipes.thread_models.__main__ import thread_models

LIST = "Here:\n\n1. One: the first of the points\n2. Two: the second of the points\n3. Three: the third of the points"


@pytest.fixture
def answers(tmp_path: Path) -> Path:
    path = tmp_path / "answers.jsonl"
    rows = [
        {"question": "List three.", "answer": LIST},
        {"question": "Why?", "answer": "So."},
        {"question": "Who?", "answer": "He."},
    ]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


@pytest.mark.parametrize(
    ("dialect", "annotated"),
    [
        ("apar", ["Here:\n\n1. One:", {"fork": " the first of the points"}]),
        ("pasta", 'Here:\n\n1. One:<promise topic="One" tokens="10"/><async> the first of the points</async>\n2. '),
    ],
)
def test_annotate_writes_and_continues(answers: Path, tmp_path: Path, dialect: str, annotated: Any) -> None:
    out = tmp_path / "out.jsonl"
    command = ["annotate", "--dialect", dialect, "--in", str(answers), "--out", str(out), "--min-block-tokens", "3"]
    ended = CliRunner().invoke(thread_models, command, catch_exceptions=False)
    assert ended.exit_code == 0 and "2 written" in ended.output and "answers.jsonl" in ended.output
    rows = {row["prompt"]: row for row in map(json.loads, out.read_text().splitlines())}
    assert len(rows) == 2 and rows["List three."]["annotated"][: len(annotated)] == annotated
    assert "0 written" in CliRunner().invoke(thread_models, command, catch_exceptions=False).output
    assert len(out.read_text().splitlines()) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--dialect", "apar"], "nothing to annotate"),
        (["--dialect", "pasta", "--in", "a", "--min-block-tokens", "0"], "'--min-block-tokens': 0 is not in the range"),
        (["--dialect", "pasta", "--in", "a", "--block-tokens", "9"], "must be at least --min-block-tokens"),
        (["--dialect", "apar", "--problems", "absent.jsonl"], "there is no such file"),
        (["--dialect", "apar", "--in", "absent.jsonl"], "cannot read absent.jsonl"),
        (["--dialect", "apar", "--in", "a", "--unstructured-share", "1"], "below 1"),
        (["--dialect", "apar", "--in", "a", "--limit", "0"], "'--limit': 0 is not in the range"),
        (["--dialect", "apar", "--in", "a", "--annotator", "http://a/v1", "--model", "m"], "goes with --dialect pasta"),
        (["--dialect", "pasta", "--in", "a", "--annotator", "http://a/v1"], "--model NAME"),
        (["--dialect", "pasta", "--in", "a", "--annotator", "a/v1", "--model", "m"], "is not an address"),
        (
            ["--dialect", "pasta", "--in", "a", "--annotator", "http://a/v1", "--model", "m", "--api-key-env", "ABSENT"],
            "the environment variable ABSENT is not set",
        ),
        (["--dialect", "pasta", "--in", "a", "--tokenizer", "absent"], "no tokenizer in absent"),
    ],
)
def test_mistakes_are_one_line(tmp_path: Path, options: list[str], message: str) -> None:
    out = tmp_path / "out.jsonl"
    result = CliRunner().invoke(thread_models, ["annotate", *options, "--out", str(out)])
    assert message in refusal(result) and "\n" not in str(result.exception)
    assert not out.exists()
