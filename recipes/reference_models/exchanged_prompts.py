"""Prompts that no answer was written to: questions whose names and numbers are exchanged for others.

A model remembers the answers that it was trained on, so what it says to their questions is not what it says to new ones. These
are new, and worded like those. Owns the exchange; questions that are held out give neither wordings nor names.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

from pipedec.core import UserError
from recipes.thread_models.records import Question, read_questions

_NAME = re.compile(r"`[^`\n]+`")
_NUMBER = re.compile(r"(?<![\w.,:/\n])\d+(?![\w:/]|[.,]\d)")  # not those that number a list
_LONGEST = 1200  # characters of a prompt
_MAX_TRIES = 20  # for a prompt


def write_prompts(files: tuple[Path, ...], count: int, out: Path, seed: int = 0) -> int:
    """Write ``count`` different prompts to ``out`` as JSONL; returns their number, which is less if questions are few.

    Raises:
        UserError: a file is unsound, or no question has a name or a number.
    """
    questions = list(read_questions(files))
    known = {question.prompt for question in questions}
    found: dict[str, None] = {}
    invented = exchanged([question for question in questions if not question.held_out], random.Random(seed))
    for _, prompt in zip(range(_MAX_TRIES * count), invented, strict=False):
        if prompt not in known and len(found) < count:
            found[prompt] = None
    out.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in found), encoding="utf-8")
    return len(found)


def exchanged(questions: list[Question], rng: random.Random) -> Iterator[str]:
    """An endless stream of the questions with other names and numbers. Raises UserError if none has either."""
    names: dict[object, list[str]] = {}
    for question in questions:
        for name in _NAME.findall(question.prompt):
            names.setdefault(_shape(name), []).append(name)
    asked = [
        one.prompt
        for one in questions
        if len(one.prompt) <= _LONGEST and (_NAME.search(one.prompt) or _NUMBER.search(one.prompt))
    ]
    if not asked:
        raise UserError("no question has a name in backquotes or a number: there is nothing to exchange")
    while True:
        prompt = _NAME.sub(lambda found: rng.choice(names[_shape(found[0])]), rng.choice(asked))
        yield _NUMBER.sub(lambda found: _other_number(found[0], rng), prompt)


def _shape(name: str) -> tuple[bool, bool]:
    """The kind of a name, which its replacement must share: whether it is dotted, and whether it is called."""
    return "." in name, name.endswith("()`")


def _other_number(number: str, rng: random.Random) -> str:
    """A number of as many digits. Those of one digit stay half of the time: many of them count what is asked for."""
    if len(number) == 1 and rng.random() < 0.5:
        return number
    return str(rng.randint(max(2, 10 ** (len(number) - 1)), 10 ** len(number) - 1))
