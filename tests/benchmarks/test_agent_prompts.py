"""The prompts of a repetitive agent."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.programs import caller

from benchmarks.agent_prompts import TASKS, VARIATIONS, prompts
from pipedec.data import PromptSource
from pipedec.flags import run_command


def test_each_task_has_its_own_variations_and_they_are_always_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = caller(lambda: run_command(prompts), monkeypatch, capsys)
    for name in ("one.jsonl", "two.jsonl"):
        assert run("--out", tmp_path / name).status == 0
    assert (tmp_path / "one.jsonl").read_bytes() == (tmp_path / "two.jsonl").read_bytes()
    sets = [PromptSource.parse(f"{tmp_path / 'one.jsonl'}#task={task}").read() for task in TASKS]
    texts = [text for prompt_set in sets for text in prompt_set.prompts]
    assert len(texts) == len(set(texts)) == VARIATIONS * len(TASKS) == 100
    assert len({text.split("\n\n")[0] for text in texts}) == 1, "they begin with the same instructions"
    assert not any(mark in text for text in texts for mark in "{}")
