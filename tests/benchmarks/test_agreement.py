"""How often a draft's top k hold the target's next token, on a tiny pair."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from support.programs import Calls, caller
from support.tiny_pair import SENTENCES, Pair
from transformers import AutoModelForCausalLM

from benchmarks.agreement import agreement, ranks_by_set, ranks_of, shares
from pipedec.flags import run_command
from pipedec.train.measuring import TOP_K, MeasuredDraft


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Calls:
    return caller(lambda: run_command(agreement), monkeypatch, capsys)


def test_ranks_are_those_among_the_draft_s_logits(pair: Pair) -> None:
    draft = AutoModelForCausalLM.from_pretrained(pair.draft)
    ids = torch.randint(draft.config.vocab_size, (12,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.no_grad():
        logits = draft(torch.tensor([ids])).logits[0]
    naive = [int((logits[place - 1] > logits[place - 1, ids[place]]).sum()) for place in range(5, 12)]
    assert ranks_of(MeasuredDraft.load(pair.draft, draft.config.vocab_size), ids[:5], ids[5:]) == naive
    assert sum(naive) > 0


def test_a_target_agrees_with_itself_and_a_second_run_measures_nothing_again(pair: Pair, tmp_path: Path, call: Calls) -> None:
    asked = ["--target", pair.target, "--prompt", SENTENCES[0], "--prompt", SENTENCES[1], "--max-tokens", "6", "--out", tmp_path]
    assert call(*asked, "--draft", pair.target).status == 0
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [set(row["ranks"]) for row in rows] == [{0}, {0}], "its own greedy tokens are its likeliest"
    assert call(*asked, "--draft", pair.draft).status == 0
    lines = (tmp_path / "rows.jsonl").read_text().splitlines()
    assert lines[:2] == [json.dumps(row) for row in rows] and len(lines) == 4, "another draft has rows of its own"
    assert call(*asked, "--draft", pair.draft).status == 0
    assert (tmp_path / "rows.jsonl").read_text().splitlines() == lines


def test_shares_count_tokens_of_each_set_and_of_all() -> None:
    rows = [{"prompt_set": "a", "ranks": [0, 3]}, {"prompt_set": "b", "ranks": [1, 100]}, {"prompt_set": "a", "ranks": [20]}]
    ranks = ranks_by_set(rows)
    assert ranks == {"a": [0, 3, 20], "b": [1, 100], "all": [0, 3, 20, 1, 100]}
    assert dict(zip(TOP_K, shares(ranks["all"]), strict=True)) == {1: 0.2, 2: 0.4, 4: 0.6, 8: 0.6, 16: 0.6}
    assert ranks_by_set(rows[:1]) == {"a": [0, 3]}


def test_what_is_missing_is_named(pair: Pair, tmp_path: Path, call: Calls) -> None:
    models = ["--target", pair.target, "--out", tmp_path]
    assert call(*models, "--draft", "none", "--prompt", "x").refused() == "--draft none: give the directory of a draft to measure"
    assert call(*models, "--draft", pair.draft).refused() == "no prompts: give --prompts FILE or --prompt TEXT"
