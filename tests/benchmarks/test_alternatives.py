"""The alternatives benchmark on a tiny pair: who takes part, what is counted, how answers are compared."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from support.refusals import refusal
from support.tiny_pair import SENTENCES, Pair
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from benchmarks.alternatives import AlternativesConfig, PassCount, alternatives, measure_alternatives
from pipedec.core.limits import KNEE_ROWS
from pipedec.engine.build import load_prompter


@pytest.mark.slow
def test_all_contenders_say_the_same_and_are_counted(pair: Pair) -> None:
    threads, verbosity, bars = torch.get_num_threads(), logging.get_verbosity(), logging.is_progress_bar_enabled()
    had: list[tuple[int, int]] = []
    config = AlternativesConfig(max_tokens=9, repeats=2, threads=1)
    rows = measure_alternatives(pair.spec(4), SENTENCES[:2], config, lambda *progress: had.append(progress))
    figures = {row["contender"]: row for row in rows}
    own = ["pipedec pp, 1 stage", "pipedec stpp, 1 stage", "pipedec pipedec-bestfirst, 1 stage", "pipedec bita, 1 stage"]
    own.append("pipedec, 4 stages")
    assert list(figures) == ["transformers greedy", "transformers assisted", "transformers lookup", *own]
    assert had == [(number, 32) for number in range(1, 33)]
    tokens = rows[0]["tokens"]
    for row in rows:
        assert row["equal"] == 2 and row["tokens"] == tokens
        assert [len(seconds) for seconds in row["seconds"]] == [2, 2]
        assert row["tokens_per_second"] == pytest.approx(1000 / row["ms_per_token"])
        assert row["transformers"] and row["config"]["threads"] == 1 and row["config"]["prompts"] == 2
    # One pass per token, the first of them over the prompt, or its last chunk: what greedy decoding of one row at a time needs.
    prompter = load_prompter(pair.spec(1))
    lengths = [len(prompter.token_ids(text, raw=False, max_tokens=9)) for text in SENTENCES[:2]]
    earlier_chunks = sum((length - 1) // KNEE_ROWS for length in lengths)
    for name, more in (("transformers greedy", 0), ("pipedec pp, 1 stage", earlier_chunks)):
        assert figures[name]["passes_per_token"] == pytest.approx(1 + more / tokens)
        assert figures[name]["rows_per_token"] == pytest.approx((tokens - 2) / tokens)
    assert figures["transformers assisted"]["passes_per_token"] < 1 < figures["transformers assisted"]["rows_per_token"]
    assert figures["pipedec stpp, 1 stage"]["passes_per_token"] < 1
    assert figures["pipedec bita, 1 stage"]["rows_per_token"] > 1, "masks are rows"
    assert figures["pipedec, 4 stages"]["rows_per_token"] > 1
    assert (threads, verbosity, bars) == (torch.get_num_threads(), logging.get_verbosity(), logging.is_progress_bar_enabled())


class Scripted:
    """A contender that gives the answers it was given, notes its turns, and computes two passes of five rows each."""

    def __init__(self, name: str, answers: list[list[int]], turns: list[str]) -> None:
        self.name = name
        self.count = PassCount()
        self._answers = iter(answers)
        self._turns = turns

    def answer(self, prompt_token_ids: Sequence[int], max_tokens: int) -> list[int]:
        self._turns.append(self.name)
        self.count.add(5 + len(prompt_token_ids))
        self.count.add(5)
        return next(self._answers)


def test_turns_rotate_and_one_wrong_repeat_is_not_equal(pair: Pair) -> None:
    turns: list[str] = []
    right, wrong = [7, 8, 9, 2], [7, 8, 8, 2]
    contenders = [Scripted("a", [right] * 5, turns), Scripted("b", [wrong, right, right, right, wrong], turns)]
    rows = measure_alternatives(
        pair.spec(), SENTENCES[:2], AlternativesConfig(max_tokens=4, repeats=2), load=lambda spec: contenders
    )
    assert turns == ["a", "b", *["a", "b", "b", "a"] * 2]  # a warm-up each, then two prompts
    assert [row["equal"] for row in rows] == [2, 1]
    for row in rows:
        assert (row["tokens"], row["passes_per_token"], row["rows_per_token"]) == (8, 4 / 8, 20 / 8)


def test_command_prints_a_table_and_writes_rows(pair: Pair, tmp_path: Path) -> None:
    out, prompts = tmp_path / "figures.jsonl", tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"words": text}) + "\n" for text in SENTENCES))
    flags = ["--prompts", str(prompts), "--field", "words", "--samples", "1", "--prompt", "Who?", "--stages", "2"]
    flags += ["--bita", str(pair.bita), "--max-tokens", "4", "--repeats", "1", "--threads", "1", "--out", str(out)]
    done = CliRunner().invoke(alternatives, [*pair.flags, *flags])
    assert done.exit_code == 0, (done.output, done.exception)
    text = " ".join(done.stdout.split())
    assert all(words in text for words in ("transformers lookup", "pipedec bita, 1 stage", "2/2", "cannot be faster"))
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["contender"] for row in rows][-1] == "pipedec, 2 stages"
    assert {row["config"]["pipeline"]["dtype"] for row in rows} == {"float32"}


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], "no prompts: give --prompt TEXT or --prompts FILE"),
        (["--prompts", "nowhere.jsonl"], "cannot read nowhere.jsonl"),
        (["--prompt", "a", "--stages", "9"], "9 stages, but the target has 8 layers"),
        (["--prompt", "a", "--repeats", "0"], "'--repeats': must be an integer (at least 1), not 0"),
        (["--prompt", "a", "--out", "nowhere/rows.jsonl"], "there is no directory nowhere"),
        (["--prompt", "word " * 3000], "shorten the prompt"),
    ],
)
def test_command_refuses(flags: list[str], words: str, pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", None)  # refused before a model is loaded
    done = CliRunner().invoke(alternatives, [*pair.flags, *flags])
    assert words in refusal(done)
