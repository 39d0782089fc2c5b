"""The benchmark of structured answers at toy size: its rows, after an interruption, and its figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.silent_progress import Silent
from support.tiny_pair import Pair

from benchmarks.structured import StructuredBench, StructuredConfig, document, figures, load_cases, markdown
from pipedec.bench.sweep.pipelines import ModelPair as Models
from pipedec.config import paper_cluster
from pipedec.core.errors import PipedecError
from pipedec.core.sampling import SamplingParams
from pipedec.engine.local import LocalPipeline
from pipedec.grammar import check


def config(pair: Pair, methods: tuple[str, ...] = ("pp", "bita"), questions: int = 1) -> StructuredConfig:
    models = Models(pair.target, str(pair.draft), bita=pair.bita)
    return StructuredConfig(
        paper_cluster(), "paper-14", (1, 2), methods, questions, SamplingParams(max_tokens=6), models
    )  # fmt: skip


def test_an_answer_each_and_none_twice(pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = StructuredBench(config(pair), tmp_path, Silent()).run()
    assert len(rows) == 2 * 2 * 2
    lines = (tmp_path / "rows.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == rows
    (tmp_path / "rows.jsonl").write_text("\n".join(lines[:-3]) + "\n" + lines[-3][:20])
    assert [row["key"] for row in StructuredBench(config(pair), tmp_path, Silent()).run()] == [row["key"] for row in rows]
    monkeypatch.setattr(LocalPipeline, "load", lambda spec: pytest.fail("a model was loaded"))
    assert len(StructuredBench(config(pair), tmp_path, Silent()).run()) == len(rows)


def test_figures(pair: Pair, tmp_path: Path) -> None:
    rows = StructuredBench(config(pair, ("pp",), 3), tmp_path, Silent()).run()
    one, two = figures(rows)
    assert (one["stages"], two["stages"], one["method"], one["answers"]) == (1, 2, "pp", 3)
    assert one["timesteps"]["without"] == pytest.approx(1) and two["timesteps"]["without"] == pytest.approx(2)
    with_schema = [row for row in rows if row["structured"] and row["cluster"]["stages"] == 1]
    tokens = sum(len(row["token_ids"]) - 1 for row in with_schema)
    assert one["timesteps"]["with"] == pytest.approx(sum(row["timesteps"] for row in with_schema) / tokens)
    assert all(row["parses"] for row in with_schema if row["finish_reason"] == "stop")
    assert "| pp " in markdown(rows) and json.loads(document(rows))["figures"] == figures(rows)


def test_a_different_answer_ends_the_run(pair: Pair, tmp_path: Path) -> None:
    StructuredBench(config(pair, ("pp",), 1), tmp_path, Silent()).run()
    file = tmp_path / "rows.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    lines[-1]["token_ids"][0] += 1
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(PipedecError, match="pp on 2 stages and pp on 1 stages gave different answers about integer"):
        StructuredBench(config(pair, ("pp",), 1), tmp_path, Silent()).run()


def test_thirty_questions_with_valid_schemas() -> None:
    cases = load_cases()
    assert len({case.kind for case in cases}) == 30
    for case in cases:
        check(case.structure)
