"""The default policy against other trees, at toy size: budgets, the best of them by prompt set, and opponents of the replay."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.drafters import PROMPT, ScriptedDrafter, begun, rows
from support.programs import Calls, caller
from support.tiny_pair import Pair

from benchmarks.methods import registered
from benchmarks.policy.__main__ import policy
from benchmarks.policy.opponents import OPPONENTS, FlowSpecOptions
from pipedec.bench.policy import Policy
from pipedec.core.errors import UserError
from pipedec.core.request import DEFAULT_METHOD, TokenizedRequest
from pipedec.core.verdict import Verdict
from pipedec.flags import run_command
from pipedec.methods import METHOD_NAMES, METHODS


@pytest.fixture
def opponents() -> Iterator[None]:
    with registered(*OPPONENTS):
        yield


def test_the_command_shows_and_writes_them(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    compare: Calls = caller(lambda: run_command(policy), monkeypatch, capsys)
    asked = [
        "--preset", "paper-14", "--stages", "2", "--prompt", "The pipeline", "--max-tokens", "6", "--no-own-work",
        "--target", str(pair.target), "--draft", str(pair.draft), "--recording", str(tmp_path / "recording"),
    ]  # fmt: skip
    ended = compare(*asked, "--policy", "pp", "--rivals", "chain,pipedec", "--json", tmp_path / "out.json")
    assert ended.status == 0, ended.err
    assert "The default over the best trees of the field" in ended.out and "best rival / default" in ended.out
    written = json.loads((tmp_path / "out.json").read_text())
    best = {one["rival"]: one["ms"] for one in written["rivals"]["best"]}
    assert best.keys() == {"chain", "pipedec"}
    found = written["rivals"]["sets"]["prompt"]
    assert found["ms"] == min(best.values()) and found["ratio"] == pytest.approx(found["ms"] / found["default_ms"])
    assert [one["policy"] for one in written["policies"]][:2] == ["pp", DEFAULT_METHOD]
    refused = compare(*asked, "--rivals", "medusa")
    assert refused.status == 2 and "--rivals medusa: choose from all, static, eagle2" in refused.err


@pytest.mark.usefixtures("opponents")
def test_a_chain_sends_one_token_per_timestep() -> None:
    drafter = ScriptedDrafter({10: ((11, 0.6), (12, 0.3)), 11: ((13, 0.5), (14, 0.4))})
    method = begun(TokenizedRequest(0, PROMPT, method="chain", options=Policy.parse("chain").options), drafter)
    method.apply(Verdict.of(10))
    for row in ((10, -1), (11, 0), (13, 1)):
        assert rows(method.propose()) == [row]
        method.draft()


@pytest.mark.usefixtures("opponents")
def test_flowspec_sends_segments_by_score_and_drafts_the_best_rows() -> None:
    """12: 0.3 has a better child, 0.27, than the second one of 11: 0.6, 0.06; of two rows per forward the best are drafted."""
    drafter = ScriptedDrafter({10: ((11, 0.6), (12, 0.3)), 11: ((13, 0.5), (14, 0.1)), 12: ((15, 0.9), (16, 0.1))})
    options = FlowSpecOptions(width=3, children=2, forwards=1, rows=5)
    method = begun(TokenizedRequest(0, PROMPT, method="flowspec", options=options), drafter)
    method.apply(Verdict.of(10))
    assert rows(method.propose()) == [(10, -1)]
    method.draft()
    assert rows(method.propose()) == [(11, 0), (12, 0)]
    method.draft()
    assert drafter.expanded == [[10], [11, 12]]
    assert rows(method.propose()) == [(13, 1), (15, 2)], "the tree in flight has its five rows"
    method.draft()
    method.apply(Verdict.of(12))
    assert rows(method.propose())[0] == (16, 0), "what is left of the tree goes on"


def test_opponents_are_methods_of_the_replay_alone() -> None:
    with registered(*OPPONENTS):
        assert tuple(METHODS) == (*METHOD_NAMES, "chain", "flowspec", "eagle2", "opt-tree", "sequoia")
        with pytest.raises(UserError, match="children: must be an integer"):
            Policy.parse("chain:children=0")
        with pytest.raises(ValueError, match="another method chain, eagle2, flowspec, opt-tree, sequoia"), registered(*OPPONENTS):
            pass
    assert tuple(METHODS) == METHOD_NAMES
