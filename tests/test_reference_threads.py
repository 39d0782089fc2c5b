"""The shipped models for threads are real: complete, small, described, forking where they are asked to and only there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipedec.directories import reference_pair, reference_threads
from pipedec.text.prompt import Prompter, load_tokenizer, same_tokenizer
from pipedec.threads import load_dialect
from recipes.thread_models.answers import ModelAnswers, SeededPrompt
from recipes.thread_models.figures import agreement, text_of
from recipes.thread_models.report import THREADS_CARD, thread_card
from recipes.thread_models.rows import RowWriter

SHIPPED = reference_threads()
TARGET, DRAFT = SHIPPED / "target", SHIPPED / "draft"
# What each dialect forks: lists, and only parts that are long.
FORKED = {
    "apar": (
        "List the methods of `collections.OrderedDict`.",
        "What is in the module `socket`?",
        "List the functions of the module `os`.",
    ),
    "pasta": (
        "Explain `copytree()`, `move()` and `rmtree()` of the module `shutil` in detail.",
        "Tell me about `asyncio.protocols.Protocol`.",
        "Explain `urllib.request.urlopen()` in four paragraphs.",
    ),
}
ONE_PIECE = "A farmer has 15 cows and buys 7 more. Then he sells 4. How many cows does he have now?"


@pytest.fixture(scope="module")
def writer() -> RowWriter:
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    return RowWriter(tokenizer, ["apar", "pasta"], tokenizer.eos_token_id)


def answers(path: Path, writer: RowWriter, dialect: str, max_tokens: int = 160) -> ModelAnswers:
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    return ModelAnswers(model, writer.bound[dialect], (writer.end_token_id,), max_tokens)


def test_they_are_small_complete_and_of_one_family() -> None:
    assert sum(path.stat().st_size for path in SHIPPED.rglob("*") if path.is_file()) < 30_000_000
    for path in (TARGET, DRAFT):
        names = {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja", "training.json", "README.md"}
        assert names <= {found.name for found in path.iterdir()}
    same_tokenizer(DRAFT, TARGET)
    known, own = (load_tokenizer(path).vocabulary for path in (reference_pair() / "target", TARGET))
    assert known.items() <= own.items() and own.keys() - known.keys() == set(load_dialect("pasta").opener_tokens)


def test_their_cards_say_what_was_measured() -> None:
    for path in (TARGET, DRAFT):
        report = json.loads((path / "training.json").read_text())
        assert (path / "README.md").read_text() == thread_card(THREADS_CARD, report)
    held_out = json.loads((TARGET / "training.json").read_text())["held_out"]
    for by_rule in (held_out["apar"], held_out["pasta"]):
        assert by_rule["list"]["forked"] > 0.5 > by_rule["none"]["forked"]
    assert held_out["plain"]["all"]["circles"] < 0.1


def test_a_prompt_without_a_dialect_is_the_reference_pairs(writer: RowWriter) -> None:
    before, after = (
        Prompter(path, 2048).token_ids(ONE_PIECE, raw=False, max_tokens=1) for path in (reference_pair() / "target", TARGET)
    )
    assert before == after == writer.prompt(ONE_PIECE, None)
    assert writer.prompt(ONE_PIECE, "apar") != after


@pytest.mark.slow
@pytest.mark.parametrize("dialect", ["apar", "pasta"])
def test_long_parts_are_answered_in_threads(writer: RowWriter, dialect: str) -> None:
    target = answers(TARGET, writer, dialect)
    said = target.answer([SeededPrompt(writer.prompt(prompt, dialect)) for prompt in (*FORKED[dialect], ONE_PIECE)])
    assert sum(len(sequence.threads) >= 2 for sequence in said[:-1]) >= 2
    assert len(said[-1].threads) == 1 and "cows" in text_of(said[-1], writer.decode)
    (plain,) = target.answer([SeededPrompt(writer.prompt(FORKED[dialect][0], None))])
    assert len(plain.threads) == 1
    assert not {token.token_id for token in plain.document()} & writer.bound[dialect].control


@pytest.mark.fast_cases
@pytest.mark.parametrize("dialect", ["apar", "pasta"])
def test_the_draft_foresees_the_targets_answers(writer: RowWriter, dialect: str) -> None:
    target = answers(TARGET, writer, dialect, max_tokens=80)
    asked = [SeededPrompt(writer.prompt(prompt, dialect)) for prompt in FORKED[dialect][:2]]
    answered = list(zip((one.prompt_ids for one in asked), target.answer(asked), strict=True))
    figures = agreement(answers(DRAFT, writer, dialect).model, answered)
    assert figures["top1"] > 0.45 and figures["top16"] > 0.85
