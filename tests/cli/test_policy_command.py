"""``pipedec bench policy`` through the real program."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.tiny_pair import Pair

Pipedec = Callable[..., Any]


def flags(pair: Pair, recording: Path) -> list[str]:
    return [
        "bench", "policy", "--preset", "paper-14", "--stages", "2", "--prompt", "The pipeline", "--max-tokens", "6",
        "--target", str(pair.target), "--draft", str(pair.draft), "--recording", str(recording),
    ]  # fmt: skip


def policies_in(document: Path) -> list[str]:
    return [row["policy"] for row in json.loads(document.read_text())["policies"]]


def test_compares_policies_with_each_other_and_with_a_sweep(pipedec: Pipedec, pair: Pair, tmp_path: Path) -> None:
    asked = [*flags(pair, tmp_path / "recording"), "--no-own-work"]  # which is measured, and never twice the same
    sweep = [
        *asked[2:-3],
        "--no-own-work",
        "--clock",
        "computed",
        "--methods",
        "pp,pipedec-bestfirst",
        "--dispatch",
        "tasks",
        "--out",
        tmp_path / "sweep",
    ]
    assert pipedec("bench", "sweep", *sweep).status == 0
    policies = ["--policy", "pp", "--policy", "pipedec:width=4", "--policy", "pipedec-bestfirst"]
    ended = pipedec(*asked, *policies, "--json", tmp_path / "out.json", "--check", tmp_path / "sweep")
    assert ended.status == 0, ended.err
    for text in (
        "Policies on paper-14 (2 stages), emulated",
        "by cause",
        "by prompt set",
        "Compared with a sweep",
        "pipedec:width=4",
    ):
        assert text in ended.out
    written = json.loads((tmp_path / "out.json").read_text())
    assert policies_in(tmp_path / "out.json") == ["pp", "pipedec:width=4", "pipedec-bestfirst"]
    assert written["policies"][0]["timesteps_per_token"] == 2
    assert [row["policy"] for row in written["check"]] == ["pp", "pipedec-bestfirst"]
    assert all(row["ratio"] == pytest.approx(1, abs=2e-3) and row["clock"] == "computed" for row in written["check"])


def test_by_default_the_papers_method_beside_best_first(pipedec: Pipedec, pair: Pair, tmp_path: Path) -> None:
    ended = pipedec(*flags(pair, tmp_path / "recording"), "--json", tmp_path / "out.json")
    assert ended.status == 0, ended.err
    assert "Compared with a sweep" not in ended.out
    assert policies_in(tmp_path / "out.json") == ["pipedec", "pipedec-bestfirst"]


def test_without_a_row_to_compare_with_there_are_figures(pipedec: Pipedec, pair: Pair, tmp_path: Path) -> None:
    asked = flags(pair, tmp_path / "recording")
    sweep = [*asked[2:-2], "--clock", "computed", "--methods", "pp", "--out", tmp_path / "sweep"]
    assert pipedec("bench", "sweep", *sweep).status == 0
    ended = pipedec(*asked, "--policy", "pipedec", "--json", tmp_path / "out.json", "--check", tmp_path / "sweep")
    assert ended.status == 2 and "no row has the same policies" in ended.err and "Compared with a sweep" not in ended.out
    assert policies_in(tmp_path / "out.json") == ["pipedec"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policy", "warp"], "--policy warp: unknown method 'warp'"),
        (["--policy", "pipedec:width=0"], "width: must be between 1 and 4096, not 0"),
        (["--preset", "paper-15"], "paper-15"),
        (["--stages", "99"], "99 stages"),
        (["--json", "nowhere/out.json"], "--json nowhere/out.json: there is no directory nowhere"),
        (["--prompts", "missing.jsonl"], "cannot read missing.jsonl"),
        (["--check", "nowhere"], "cannot read nowhere/rows.jsonl: No such file"),
        (["--draft", "none"], "method pipedec needs a draft model"),
    ],
)
def test_mistakes_are_one_line(pipedec: Pipedec, pair: Pair, tmp_path: Path, arguments: list[str], message: str) -> None:
    assert message in pipedec(*flags(pair, tmp_path / "recording"), *arguments).refused()
    assert not (tmp_path / "recording").exists()


def test_asks_for_prompts(pipedec: Pipedec, tmp_path: Path) -> None:
    line = pipedec("bench", "policy", "--preset", "paper-14", "--recording", tmp_path / "recording").refused()
    assert line == "no prompts: give --prompts FILE or --prompt TEXT"


def test_without_pandas_one_line_says_what_to_install(
    pipedec: Pipedec, pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    for module in ("pipedec.bench.policy.summary", "pipedec.cli.benchmarks.policy"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    line = pipedec(*flags(pair, tmp_path / "recording")).refused()
    assert line == "this command needs pandas: pip install 'pipedec[bench]'"
    assert not (tmp_path / "recording").exists()
