"""The default policy against other trees, at toy size: budgets, the best of them by prompt set, and opponents of the replay."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.drafters import PROMPT, ScriptedDrafter, begun, rows
from support.programs import Calls, caller
from support.silent_progress import Silent
from support.tiny_pair import Pair

from benchmarks.methods import registered
from benchmarks.policy.__main__ import policy
from benchmarks.policy.opponents import OPPONENTS, FlowSpecOptions
from benchmarks.policy.replay import WatchedExperience
from benchmarks.policy.study import PolicyConfig, Study
from pipedec.bench.policy import Policy
from pipedec.bench.sweep.pipelines import ModelPair
from pipedec.config import paper_cluster
from pipedec.core.errors import UserError
from pipedec.core.request import DEFAULT_METHOD, TokenizedRequest
from pipedec.core.sampling import SamplingParams
from pipedec.core.stage_message import Load
from pipedec.core.verdict import Verdict
from pipedec.data import PromptSet
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


@pytest.mark.usefixtures("opponents")
@pytest.mark.parametrize(
    ("row_ms", "entering"),
    [
        (0.1, [(10, -1), (11, 0), (12, 0), (13, 1), (14, 1)]),
        (1.0, [(10, -1), (11, 0), (13, 1)]),  # 12: 0.2 brings less per millisecond than what is before it
        (9.0, [(10, -1)]),
    ],
)
def test_evict_cuts_the_tree_where_a_row_costs_more_than_it_brings(row_ms: float, entering: list[tuple[int, int]]) -> None:
    """Below 10 the chances of paths are 11: 0.6, 13: 0.3, 12: 0.2, 14: 0.06."""
    experience = WatchedExperience(2)
    experience.round_ms = lambda rows, forwards: 2.0 + forwards + row_ms * rows
    drafter = ScriptedDrafter({10: ((11, 0.6), (12, 0.2)), 11: ((13, 0.5), (14, 0.1))})
    options = Policy.parse("evict:rows=4,depth=2,children=2").options
    method = begun(TokenizedRequest(0, PROMPT, method="evict", options=options), drafter, experience)
    method.apply(Verdict.of(10))
    method.propose()
    method.draft()
    assert rows(method.propose()) == entering


@pytest.mark.usefixtures("opponents")
def test_mtp_sends_a_chain_per_round() -> None:
    drafter = ScriptedDrafter({10: ((11, 0.6), (12, 0.3)), 11: ((13, 0.5), (14, 0.4))})
    options = Policy.parse("mtp:depth=2").options
    method = begun(TokenizedRequest(0, PROMPT, method="mtp", options=options), drafter)
    method.apply(Verdict.of(10))
    method.propose()
    method.draft()
    assert rows(method.propose()) == [(10, -1), (11, 0), (13, 1)]


def test_only_drafts_of_mtp_take_no_time(pair: Pair, tmp_path: Path) -> None:
    """The same chains, of two tokens, by ``stpp``."""
    with registered(*OPPONENTS):
        policies = tuple(map(Policy.parse, ("mtp:depth=2", "stpp:width=1,children=1,depth=2")))
        config = PolicyConfig(
            paper_cluster(), "paper-14", policies, stages=2, own_work=False, pair=ModelPair(pair.target, str(pair.draft)),
            sampling=SamplingParams(max_tokens=6, ignore_eos=True),
        )  # fmt: skip
        free, drafted = [one.replayed for one in Study(config, [PromptSet("one", ("The pipeline",))], tmp_path).run(Silent())]
    assert (free.timesteps, free.hits) == (drafted.timesteps, drafted.hits)
    emulation = config.shape.spec.emulation
    assert emulation is not None and emulation.draft is not None
    rounds = free.timesteps / 3  # one timestep drafts, and two pass a chain on
    forwards_ms = 2 * emulation.draft.compute_ms(Load(1))
    assert drafted.decode_ms - free.decode_ms == pytest.approx(rounds * forwards_ms, rel=0.01)


def test_opponents_are_methods_of_the_replay_alone() -> None:
    with registered(*OPPONENTS):
        assert tuple(METHODS) == (*METHOD_NAMES, "chain", "flowspec", "eagle2", "opt-tree", "sequoia", "evict", "mtp")
        with pytest.raises(UserError, match="children: must be an integer"):
            Policy.parse("chain:children=0")
        with pytest.raises(ValueError, match="another method chain, eagle2, evict, flowspec"), registered(*OPPONENTS):
            pass
    assert tuple(METHODS) == METHOD_NAMES
