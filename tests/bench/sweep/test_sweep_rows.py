"""Rows of a sweep: what is read, and which files and lines are refused."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from support.synthetic_sweep import Line, bita, line, stochastic, write

from pipedec.bench.sweep.rows import PipelineColumns, SweepRow, TrainedBita, Tree, read_rows
from pipedec.core import UserError


def rows(tmp_path: Path, lines: Iterable[Line]) -> list[SweepRow]:
    return read_rows([write(tmp_path / "rows.jsonl", lines)])


def test_a_line_becomes_a_row(tmp_path: Path) -> None:
    (row,) = rows(tmp_path, [line("pipedec", "qa", 3, tokens=9, ms=20.0, misses=4, groups=7, stages=14, preset="paper-7")])
    assert row.pipeline == PipelineColumns(14, 7, "llama-3.1-70b", "float32", ("rtx3090",) * 14, True, "paper-7")
    assert (row.timing, row.method, row.tree) == ("measured", "pipedec", Tree(32, 16))
    assert (row.tokens, row.decode_ms, row.timesteps, row.hits, row.misses) == (9, 180.0, 5 + 28, 5, 4)
    assert (row.prompt_set, row.prompt_index, row.sampling.max_tokens, row.sampling.ignore_eos) == ("qa", 3, 64, True)


def test_a_row_of_bita_has_its_bita_and_its_tree(tmp_path: Path) -> None:
    first, second = rows(tmp_path, [bita(), bita(name="elsewhere") | {"bita": bita()["bita"] | {"name": "elsewhere"}}])
    assert (first.bita, first.tree) == (TrainedBita("deep-16", "deep", 4, 16, ""), Tree(None, 5, 4, shape="efficient"))
    assert first.bita == second.bita and second.bita and second.bita.name == "elsewhere", "equal weights, whatever their name"


def test_rows_from_before_bita_are_read(tmp_path: Path) -> None:
    old = line("pipedec-bestfirst")
    del old["bita"]
    (row,) = rows(tmp_path, [old | {"tree": {"width": 32, "children": 16, "shape": "likeliest"}}])
    assert row.bita is None and row.tree == Tree(32, 16), "a shape is of bita alone"


def test_sampling_is_read_and_means_nothing_to_greedy_answers(tmp_path: Path) -> None:
    (row,) = rows(tmp_path, [stochastic("pipedec", repeat=2, seed=5)])
    assert (row.sampling.temperature, row.sampling.top_k, row.sampling.top_p, row.sampling.seed) == (0.6, 80, 0.9, 7)
    (row,) = rows(tmp_path, [stochastic("pipedec", temperature=0.0)])
    assert (row.sampling.top_k, row.sampling.top_p, row.sampling.seed) == (0, 1.0, None)


@pytest.mark.parametrize(
    ("clock", "preset", "timing"), [("measured", "p", "measured"), ("computed", "p", "computed"), ("measured", None, "machine")]
)
def test_the_timing_is_by_clock_and_emulation(tmp_path: Path, clock: str, preset: str | None, timing: str) -> None:
    (row,) = rows(tmp_path, [line(clock=clock, preset=preset)])
    assert row.timing == timing


@pytest.mark.parametrize(
    ("preset", "groups", "recut", "name"),
    [
        ("paper-14", 14, False, "paper-14"),
        ("paper-14", 4, True, "paper-14, 4 stages"),
        ("paper-7", 7, False, "paper-7"),
        ("home", 3, False, "home"),
        (None, 3, False, "3 stages"),
        (None, 1, False, "1 stage"),
    ],
)
def test_a_preset_with_other_numbers_of_stages_is_named_so(preset: str | None, groups: int, recut: bool, name: str) -> None:
    pipeline = PipelineColumns(14, groups, preset=preset)
    assert (pipeline.recut, pipeline.name) == (recut, name)


@pytest.mark.parametrize("cut", [b'{"schema": "pipedec.swe', '{"key": "Größe'.encode()[:-3], b"{"])
def test_an_unfinished_last_line_is_ignored(tmp_path: Path, cut: bytes) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(json.dumps(line()).encode() + b"\n" + cut)
    assert len(read_rows([path])) == 1
    path.write_bytes(cut)
    with pytest.raises(UserError, match="holds no rows"):
        read_rows([path])


def test_a_complete_last_line_without_newline_counts(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(line()))
    assert len(read_rows([path])) == 1


def test_missing_and_empty_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot read .*rows\.jsonl: No such file"):
        read_rows([tmp_path])
    with pytest.raises(UserError, match=r"cannot read .*absent"):
        read_rows([tmp_path / "absent"])
    (tmp_path / "rows.jsonl").write_text("\n\n")
    with pytest.raises(UserError, match="holds no rows: write some with pipedec bench sweep"):
        read_rows([tmp_path])


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ("not json", "not JSON"),
        (json.dumps(line())[:-30], "not JSON"),
        ("[1, 2]", "no schema, not pipedec.sweep/1"),
        ("7", "no schema"),
        ('{"benchmark": "overhead"}', "no schema"),
        (json.dumps(line(schema="pipedec.sweep/2")), "schema pipedec.sweep/2, not pipedec.sweep/1"),
    ],
)
def test_a_line_that_is_no_row_is_named_with_its_file(tmp_path: Path, bad: str, words: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join([json.dumps(line()), "", bad, json.dumps(line(prompt_index=1)), ""]))
    with pytest.raises(UserError) as refused:
        read_rows([path])
    assert f"{path}, line 3: " in str(refused.value) and words in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"clock": "sundial"}, "clock: must be one of computed, measured, not 'sundial'"),
        ({"hits": -1}, "hits: must be at least 0, not -1"),
        ({"hits": 1.5}, "hits: must be an integer, not a number"),
        ({"timesteps": True}, "timesteps: must be an integer, not true or false"),
        ({"timesteps": 0}, "timesteps must be at least 1"),
        ({"overran": 10**400}, "overran: must be finite and at least 0, not 1000"),
        ({"tree": [1]}, "tree: must be a mapping, not a list"),
        ({"decode_ms": float("nan")}, "decode_ms: must be finite and at least 0, not nan"),
        ({"decode_ms": 0}, "decode_ms must be above 0"),
        ({"decode_ms": "5"}, "decode_ms: must be a number, not a string"),
        ({"overran": -0.1}, "overran: must be finite and at least 0, not -0.1"),
        ({"method": None}, "method: must be a string, not empty"),
        ({"sampling": {"temperature": 0.0, "ignore_eos": True}}, "sampling.max_tokens: missing"),
        ({"sampling": line()["sampling"] | {"temperature": 0.6}}, "sampling.seed: missing, which a temperature above 0 needs"),
        ({"sampling": None}, "sampling: must be a mapping, not empty"),
        ({"pair": "target"}, "pair: must be a mapping, not a string"),
        ({"cluster": {"stages": 2, "groups": 3}}, "cluster.groups must lie between 1 and stages, not 3 for 2 stages"),
        ({"cluster": {"stages": 2}}, "cluster.groups: missing"),
        ({"tree": {"width": "wide"}}, "tree.width: must be an integer, not a string"),
        (bita() | {"bita": None}, "bita: missing, which the method bita needs"),
        (bita() | {"tree": {"depth": 4, "children": 5}}, "tree.shape must be one of"),
        (
            bita() | {"tree": {"shape": "round"}},
            "tree.shape must be one of likeliest, efficient, straightforward, full,",
        ),
        (
            bita() | {"bita": bita()["bita"] | {"prompting": "hard"}},
            "bita.prompting: must be one of deep, none, shallow, not 'hard'",
        ),
        (bita() | {"bita": bita()["bita"] | {"masks": 0}}, "bita.masks: must be at least 1, not 0"),
        ({"breakdown": {"compute": "much"}}, "breakdown.compute: must be a number, not a string"),
    ],
)
def test_bad_fields_are_named_with_file_and_line(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as refused:
        rows(tmp_path, [line(**changes)])
    assert words in str(refused.value) and "line 1: " in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["method", "decode_ms", "breakdown", "prompt_set"])
def test_missing_fields_are_named(tmp_path: Path, name: str) -> None:
    lacking = line()
    del lacking[name]
    with pytest.raises(UserError, match=f"line 1: {name}: missing"):
        rows(tmp_path, [lacking])
