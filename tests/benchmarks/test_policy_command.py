"""``python -m benchmarks.policy``, from its arguments to what it prints and writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.programs import Calls, caller
from support.tiny_pair import Pair

from benchmarks.policy.__main__ import policy
from pipedec.flags import run_command


@pytest.fixture
def compare(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Calls:
    return caller(lambda: run_command(policy), monkeypatch, capsys)


def flags(pair: Pair, recording: Path) -> list[str]:
    return [
        "--preset", "paper-14", "--stages", "2", "--prompt", "The pipeline", "--max-tokens", "6",
        "--target", str(pair.target), "--draft", str(pair.draft), "--recording", str(recording),
    ]  # fmt: skip


def prompt_file(directory: Path) -> Path:
    path = directory / "other.jsonl"
    path.write_text(json.dumps({"prompt": "at every timestep"}) + "\n")
    return path


def policies_in(document: Path) -> list[str]:
    return [row["policy"] for row in json.loads(document.read_text())["policies"]]


def test_compares_policies_with_each_other_and_with_a_sweep(compare: Calls, pipedec: Calls, pair: Pair, tmp_path: Path) -> None:
    asked = [*flags(pair, tmp_path / "recording"), "--no-own-work"]  # which is measured, and never twice the same
    # What best-first learns of costs changes nothing for pp.
    sweep = [*asked[:-3], "--no-own-work", "--clock", "computed", "--methods", "pipedec-bestfirst,pp", "--dispatch", "tasks"]
    sweep += ["--out", tmp_path / "sweep"]
    assert pipedec("bench", "sweep", *sweep).status == 0
    policies = ["--policy", "pp", "--policy", "pipedec:width=4", "--policy", "pipedec-bestfirst"]
    ended = compare(*asked, *policies, "--json", tmp_path / "out.json", "--check", tmp_path / "sweep")
    assert ended.status == 0, ended.err
    for text in ("Policies on paper-14 (2 stages), emulated", "by cause", "by prompt set", "Compared with a sweep"):
        assert text in ended.out
    written = json.loads((tmp_path / "out.json").read_text())
    assert policies_in(tmp_path / "out.json") == ["pp", "pipedec:width=4", "pipedec-bestfirst"]
    assert written["policies"][0]["timesteps_per_token"] == 2
    assert [row["policy"] for row in written["check"]] == ["pp", "pipedec-bestfirst"]
    assert all(row["ratio"] == pytest.approx(1, abs=2e-3) and row["clock"] == "computed" for row in written["check"])


def test_calibration_is_that_of_the_default_method(compare: Calls, pair: Pair, tmp_path: Path) -> None:
    asked = [*flags(pair, tmp_path / "recording"), "--prompts", prompt_file(tmp_path), "--max-tokens", "4"]
    ended = compare(*asked, "--calibration", "--json", tmp_path / "out.json")
    assert ended.status == 0, ended.err
    assert "Compared with a sweep" not in ended.out and policies_in(tmp_path / "out.json") == ["pipedec", "pipedec-bestfirst"]
    for kind in ("chance", "depth", "rank", "source", "chance of the path"):
        assert f"Accepted share by {kind}" in ended.out
    found = json.loads((tmp_path / "out.json").read_text())["calibration"]
    assert [(one["policy"], one["prompt_set"]) for one in found] == [("pipedec-bestfirst", one) for one in ("other", "prompt")]
    assert all(one["observations"] > 0 and 0 <= one["difference"] <= 1 for one in found)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policy", "warp"], "--policy warp: unknown method 'warp'"),
        (["--preset", "paper-15"], "paper-15"),
        (["--json", "nowhere/out.json"], "--json nowhere/out.json: there is no directory nowhere"),
        (["--check", "nowhere"], "cannot read nowhere/rows.jsonl: No such file"),
        (["--policy", "pp", "--calibration"], "--calibration is that of the default method: add --policy pipedec-bestfirst"),
        (["--draft", "none"], "method pipedec needs a draft model"),
    ],
)
def test_mistakes_are_one_line(compare: Calls, pair: Pair, tmp_path: Path, arguments: list[str], message: str) -> None:
    assert message in compare(*flags(pair, tmp_path / "recording"), *arguments).refused()
    assert not (tmp_path / "recording").exists()
