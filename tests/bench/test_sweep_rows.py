"""Rows of a sweep: what is read, what is refused and how, which rows may stand together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from synthetic_sweep import bita, line, rows, stochastic, write

from pipedec.bench.sweep_rows import Pipeline, TrainedBita, Tree, read_rows, studies
from pipedec.core import UserError


def test_a_line_becomes_a_row(tmp_path: Path) -> None:
    (row,) = rows(tmp_path, [line("pipedec", "qa", 3, tokens=9, ms=20.0, misses=4, groups=7, stages=14, preset="paper-7")])
    assert row.pipeline == Pipeline("paper-7", "llama-3.1-70b", "float32", 14, 7, ("rtx3090",) * 14, True)
    assert (row.timing, row.method, row.tree) == ("measured", "pipedec", Tree(32, 16))
    assert (row.tokens, row.decode_ms, row.timesteps, row.hits, row.misses) == (9, 180.0, 5 + 28, 5, 4)
    assert row.question == ("qa", 3, 64, True)
    assert (row.is_greedy, row.sampling, row.draw) == (True, (0.0, 0, 1.0), (0, None))


def test_a_row_of_bita_says_which_bita_and_which_tree(tmp_path: Path) -> None:
    lines = [bita(), bita(ms=10.0, name="elsewhere") | {"bita": bita()["bita"] | {"name": "elsewhere"}}, bita(prompt_tokens=8)]
    first, second = rows(tmp_path, [*lines, bita(name="deep-8", prompt_tokens=8)])[::2]
    assert (first.bita, first.tree) == (TrainedBita("deep-16", "deep", 4, 16, ""), Tree(None, 5, 4, shape="efficient"))
    assert first.bita and first.bita.name == "elsewhere" and first.decode_ms == 100.0, "equal weights, whatever their name"
    assert second.bita and (second.bita.prompt_tokens, second.bita.prompt) == (8, "deep prompt of 8 tokens")


def test_rows_from_before_bita_are_read(tmp_path: Path) -> None:
    old = line("pipedec-bestfirst")
    del old["bita"]
    (row,) = rows(tmp_path, [old])
    assert row.bita is None and row.tree == Tree(32, 16)


def test_how_tokens_were_drawn_is_read_and_means_nothing_to_greedy_answers(tmp_path: Path) -> None:
    (row,) = rows(tmp_path, [stochastic("pipedec", repeat=2, seed=5)])
    assert (row.is_greedy, row.sampling, row.draw) == (False, (0.6, 80, 0.9), (2, 7))
    (row,) = rows(tmp_path, [stochastic("pipedec", temperature=0.0)])
    assert (row.is_greedy, row.sampling, row.draw) == (True, (0.0, 0, 1.0), (0, None))


@pytest.mark.parametrize(
    ("clock", "preset", "timing"), [("measured", "p", "measured"), ("computed", "p", "computed"), ("measured", None, "machine")]
)
def test_the_timing_says_what_kind_of_time_it_is(tmp_path: Path, clock: str, preset: str | None, timing: str) -> None:
    (row,) = rows(tmp_path, [line(clock=clock, preset=preset)])
    assert row.timing == timing
    assert list(studies([row])) == [timing]


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
def test_a_preset_cut_anew_is_told_by_its_name(preset: str | None, groups: int, recut: bool, name: str) -> None:
    pipeline = Pipeline(preset, None, None, 14, groups)
    assert (pipeline.recut, pipeline.name) == (recut, name)


def test_files_and_directories_are_joined_and_the_later_of_two_equal_rows_counts(tmp_path: Path) -> None:
    (tmp_path / "sweep").mkdir()
    write(tmp_path / "sweep" / "rows.jsonl", [line(prompt_index=0, ms=10.0), line(prompt_index=1, ms=10.0)])
    write(tmp_path / "again.jsonl", [line(prompt_index=1, ms=30.0)])
    found = read_rows([tmp_path / "sweep", tmp_path / "again.jsonl"])
    assert [(row.prompt_index, row.decode_ms) for row in found] == [(0, 100.0), (1, 300.0)]


@pytest.mark.parametrize("cut", [b'{"schema": "pipedec.swe', '{"key": "Größe'.encode()[:-3], b"{"])
def test_a_last_line_cut_off_is_ignored(tmp_path: Path, cut: bytes) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(json.dumps(line()).encode() + b"\n" + cut)
    assert len(read_rows([path])) == 1
    path.write_bytes(cut)
    with pytest.raises(UserError, match="holds no rows"):
        read_rows([path])


def test_a_last_line_without_newline_counts_if_it_is_whole(tmp_path: Path) -> None:
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
def test_what_is_no_row_is_said_with_file_and_line(tmp_path: Path, bad: str, words: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join([json.dumps(line()), "", bad, json.dumps(line(prompt_index=1)), ""]))
    with pytest.raises(UserError) as refused:
        read_rows([path])
    assert f"{path}, line 3: " in str(refused.value) and words in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"clock": "sundial"}, "clock must be measured or computed, not sundial"),
        ({"hits": -1}, "hits is -1, below 0"),
        ({"hits": 1.5}, "hits is 1.5, not of type int"),
        ({"timesteps": True}, "timesteps is True"),
        ({"timesteps": 0}, "timesteps is 0, below 1"),
        ({"overran": 10**400}, "line 1: "),
        ({"tree": [1]}, "tree is [1], not of type dict"),
        ({"decode_ms": float("nan")}, "decode_ms is nan"),
        ({"decode_ms": 0}, "decode_ms is 0, not above 0"),
        ({"decode_ms": "5"}, "decode_ms is '5'"),
        ({"overran": -0.1}, "overran is -0.1"),
        ({"method": None}, "method is None"),
        ({"sampling": {"temperature": 0.0, "ignore_eos": True}}, "max_tokens is missing"),
        ({"sampling": line()["sampling"] | {"temperature": 0.6}}, "seed is None, not of type int"),
        ({"sampling": None}, "sampling is None, not of type dict"),
        ({"pair": "target"}, "pair is 'target', not of type dict"),
        ({"cluster": {"stages": 2, "groups": 3}}, "cluster.groups must lie between 1 and cluster.stages, not 3 for 2 stages"),
        ({"cluster": {"stages": 2}}, "groups is missing"),
        ({"tree": {"width": "wide"}}, "width is 'wide'"),
        (bita() | {"bita": None}, "bita is None, not of type dict"),
        (bita() | {"tree": {"depth": 4, "children": 5}}, "shape is missing"),
        (bita() | {"tree": {"shape": "round"}}, "shape is 'round', not one of likeliest, efficient, straightforward, full"),
        (bita() | {"bita": bita()["bita"] | {"prompting": "hard"}}, "prompting is 'hard', not one of none, shallow, deep"),
        (bita() | {"bita": bita()["bita"] | {"masks": 0}}, "masks is 0, below 1"),
        ({"breakdown": {"compute": "much"}}, "compute is 'much'"),
    ],
)
def test_bad_fields_are_named_with_file_and_line(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as refused:
        rows(tmp_path, [line(**changes)])
    assert words in str(refused.value) and "line 1: " in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["method", "pair", "decode_ms", "breakdown", "prompt_set"])
def test_missing_fields_are_named(tmp_path: Path, name: str) -> None:
    lacking = line()
    del lacking[name]
    with pytest.raises(UserError, match=f"line 1: {name} is missing"):
        rows(tmp_path, [lacking])


def test_measured_and_computed_rows_are_kept_apart_and_stochastic_ones_need_greedy_ones(tmp_path: Path) -> None:
    lines = [line(), line(clock="computed"), stochastic(prompt_index=2), line(prompt_index=3, tokens=0, misses=0)]
    found = studies(rows(tmp_path, [*lines, stochastic(preset=None)]))
    assert {timing: [row.prompt_index for row in kept] for timing, kept in found.items()} == {"measured": [0, 2], "computed": [0]}
    with pytest.raises(UserError, match="no row holds a greedy answer of two tokens or more: sweep with --temperature 0"):
        studies(rows(tmp_path, lines[2:]))


def test_rows_of_several_pairs_are_refused_but_slm_is_another_model(tmp_path: Path) -> None:
    other = {"target": "elsewhere/target", "draft": None, "digest": "abc"}
    assert studies(rows(tmp_path, [line(), line("slm", pair=other)]))
    with pytest.raises(UserError, match=r"several pairs of models \(abc, pair/target\)"):
        studies(rows(tmp_path, [line(), line("pp", pair=other)]))
