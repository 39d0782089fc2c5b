"""``pipedec train annotate`` as a shell calls it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Pipedec = Callable[..., Any]
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
def test_annotate_writes_and_continues(pipedec: Pipedec, answers: Path, tmp_path: Path, dialect: str, annotated: Any) -> None:
    out = tmp_path / "out.jsonl"
    command = ("train", "annotate", "--dialect", dialect, "--in", answers, "--out", out, "--min-block-tokens", 3)
    ended = pipedec(*command)
    assert ended.status == 0 and "2 written" in ended.out and "answers.jsonl" in ended.out
    rows = {row["prompt"]: row for row in map(json.loads, out.read_text().splitlines())}
    assert len(rows) == 2 and rows["List three."]["annotated"][: len(annotated)] == annotated
    assert "0 written" in pipedec(*command).out
    assert len(out.read_text().splitlines()) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--dialect", "apar"], "nothing to annotate"),
        (["--dialect", "pasta", "--in", "a", "--min-block-tokens", "0"], "'--min-block-tokens': 0 is not in the range"),
        (["--dialect", "pasta", "--in", "a", "--block-tokens", "9"], "must be at least --min-block-tokens"),
        (["--dialect", "apar", "--problems", "absent.jsonl"], "there is no such file"),
        (["--dialect", "apar", "--in", "absent.jsonl"], "cannot read absent.jsonl"),
        (["--dialect", "apar", "--library"], "python -m recipes.reference_models questions --out library.jsonl"),
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
def test_mistakes_are_one_line(pipedec: Pipedec, tmp_path: Path, options: list[str], message: str) -> None:
    out = tmp_path / "out.jsonl"
    assert message in pipedec("train", "annotate", *options, "--out", out).refused()
    assert not out.exists()
