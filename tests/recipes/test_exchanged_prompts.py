"""Prompts with other names and numbers: new, worded like the questions, and made of nothing that is held out."""

from __future__ import annotations

import json
import random
import re
from itertools import islice
from pathlib import Path

import pytest
from click.testing import CliRunner

from pipedec.core import UserError
from recipes.reference_models.__main__ import reference_models
from recipes.reference_models.invented_prompts import exchanged, write_prompts
from recipes.thread_models.records import Question


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
