"""Rows of a sweep: what is read, and which files and lines are refused."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from support.synthetic_sweep import Line, bita, line, stochastic, write

from pipedec.bench.sweep.rows import PipelineColumns, SweepRow, TrainedBita, Tree, read_rows
from pipedec.core.errors import UserError


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


def test_missing_and_empty_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot read .*rows\.jsonl: No such file"):
        read_rows([tmp_path])
    with pytest.raises(UserError, match=r"cannot read .*absent"):
        read_rows([tmp_path / "absent"])
    (tmp_path / "rows.jsonl").write_text("\n\n")
    with pytest.raises(UserError, match="holds no rows: write some with pipedec bench sweep"):
        read_rows([tmp_path])


def test_the_timing_is_by_clock_and_emulation(tmp_path: Path) -> None:
    found = rows(tmp_path, [line(clock="measured"), line(clock="computed"), line(clock="measured", preset=None)])
    assert [row.timing for row in found] == ["measured", "computed", "machine"]


def test_a_preset_with_other_numbers_of_stages_is_named_so() -> None:
    pipelines = [
        PipelineColumns(14, groups, preset=preset) for preset, groups in (("paper-14", 14), ("paper-14", 4), ("home", 3))
    ]
    assert [(one.recut, one.name) for one in pipelines] == [(False, "paper-14"), (True, "paper-14, 4 stages"), (False, "home")]
    assert [PipelineColumns(14, groups).name for groups in (3, 1)] == ["3 stages", "1 stage"]


def test_an_unfinished_last_line_is_ignored_and_a_complete_one_counts(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    for cut, count in ((b"", 1), (b"\n", 1), (b"\n" + '{"key": "Größe'.encode()[:-3], 1)):
        path.write_bytes(json.dumps(line()).encode() + cut)
        assert len(read_rows([path])) == count
    path.write_bytes(b"{")
    with pytest.raises(UserError, match="holds no rows"):
        read_rows([path])


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (json.dumps(line())[:-30], "not JSON"),
        ("[1, 2]", "no schema, not pipedec.sweep/1"),
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
        ({"clock": "sundial"}, "clock: must be one of measured, computed, not 'sundial'"),
        ({"hits": -1}, "hits: must be an integer (at least 0), not -1"),
        ({"timesteps": True}, "timesteps: must be an integer (at least 0), not True"),
        ({"timesteps": 0}, "timesteps must be at least 1"),
        ({"overran": 10**400}, "overran: must be finite and at least 0, not 1000"),
        ({"decode_ms": float("nan")}, "decode_ms: must be finite and at least 0, not nan"),
        ({"decode_ms": 0}, "decode_ms must be above 0"),
        ({"sampling": {"temperature": 0.0, "ignore_eos": True}}, "sampling.max_tokens: missing"),
        ({"sampling": line()["sampling"] | {"temperature": 0.6}}, "sampling.seed: missing, which a temperature above 0 needs"),
        ({"pair": "target"}, "pair: must be"),
        ({"cluster": {"stages": 2, "groups": 3}}, "cluster.groups must lie between 1 and stages, not 3 for 2 stages"),
        ({"tree": {"width": "wide"}}, "tree.width: must be an integer"),
        (bita() | {"bita": None}, "bita: missing, which the method bita needs"),
        (bita() | {"tree": {"shape": "round"}}, "tree.shape must be one of likeliest, efficient, straightforward, full,"),
        (bita() | {"bita": bita()["bita"] | {"prompting": "hard"}}, "bita.prompting: must be one of none, shallow, deep, not"),
        ({"breakdown": {"compute": "much"}}, "breakdown.compute: must be finite"),
    ],
)
def test_bad_fields_are_named_with_file_and_line(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as refused:
        rows(tmp_path, [line(**changes)])
    assert words in str(refused.value) and "line 1: " in str(refused.value) and "\n" not in str(refused.value)


def test_missing_fields_are_named(tmp_path: Path) -> None:
    for name in ("method", "breakdown", "prompt_set"):
        with pytest.raises(UserError, match=f"line 1: {name}: missing"):
            rows(tmp_path, [{field: value for field, value in line().items() if field != name}])
