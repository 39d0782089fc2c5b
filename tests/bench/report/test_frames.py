"""The frame of answers: which rows it contains, in which order, and which may appear in one figure."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.synthetic_sweep import answers, bita, line, stochastic, write

from pipedec.bench.report.frames import prompt_sets, read_answers, studies, variants
from pipedec.core import UserError


def test_variants_and_prompt_sets_are_in_order(tmp_path: Path) -> None:
    lines = [
        line(method, name, groups=groups) for method in ("pipedec", "pp") for groups in (14, 7) for name in ("own", "rag", "qa")
    ]
    found = answers(tmp_path, [line("pipedec", width=8), *lines])
    assert [(one.method, one.groups, one.tree and one.tree.width) for one in variants(found)] == [
        ("pp", 7, None), ("pp", 14, None), ("pipedec", 7, 32), ("pipedec", 14, 8), ("pipedec", 14, 32)
    ]  # fmt: skip
    assert prompt_sets(found) == ["humaneval", "qa", "rag", "own"]


def test_a_case_is_the_question_its_sampling_and_the_draw(tmp_path: Path) -> None:
    found = answers(tmp_path, [line("pp"), line("pipedec"), stochastic("pp"), stochastic("pp", repeat=1), stochastic("pipedec")])
    assert found["question"].nunique() == 1 and found["case"].nunique() == 3
    assert answers(tmp_path, [line(), stochastic(temperature=0.0, seed=5)])["case"].nunique() == 1, "greedy answers have no seed"


def test_files_and_directories_are_joined_and_the_later_of_two_equal_rows_counts(tmp_path: Path) -> None:
    (tmp_path / "sweep").mkdir()
    write(tmp_path / "sweep" / "rows.jsonl", [line(prompt_index=0, ms=10.0), line(prompt_index=1, ms=10.0)])
    write(tmp_path / "again.jsonl", [line(prompt_index=1, ms=30.0)])
    found = read_answers([tmp_path / "sweep", tmp_path / "again.jsonl"])
    assert list(zip(found["prompt_index"], found["decode_ms"], strict=True)) == [(0, 100.0), (1, 300.0)]


def test_equal_weights_of_bita_are_one_variant_whatever_their_name(tmp_path: Path) -> None:
    renamed = bita(prompt_index=1) | {"bita": bita()["bita"] | {"name": "elsewhere"}}
    assert len(variants(answers(tmp_path, [bita(), renamed]))) == 1


def test_measured_and_computed_rows_are_kept_apart_and_stochastic_ones_need_greedy_ones(tmp_path: Path) -> None:
    lines = [line(), line(clock="computed"), stochastic(prompt_index=2), line(prompt_index=3, tokens=0, misses=0)]
    found = studies(answers(tmp_path, [*lines, stochastic(preset=None)]))
    assert {timing: list(kept["prompt_index"]) for timing, kept in found.items()} == {"measured": [0, 2], "computed": [0]}
    with pytest.raises(UserError, match="no row holds a greedy answer of two tokens or more: sweep with --temperature 0"):
        studies(answers(tmp_path, lines[2:]))


def test_rows_of_several_pairs_are_refused_but_slm_is_another_model(tmp_path: Path) -> None:
    other = {"target": "elsewhere/target", "draft": None, "digest": "abc"}
    assert studies(answers(tmp_path, [line(), line("slm", pair=other)]))
    with pytest.raises(UserError, match=r"several pairs of models \(abc, pair/target\)"):
        studies(answers(tmp_path, [line(), line("pp", pair=other)]))
