"""The size of draft that a plan's timestep pays for, and the lines of ``pipedec plan`` that say so."""

import io
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console
from support.clusters import clustered
from support.refusals import refusal

from pipedec.cli.launch import plan as command
from pipedec.config import ClusterConfig, ServerConfig, load_cluster
from pipedec.core.errors import UserError
from pipedec.families import KNOWN_MODELS
from pipedec.hardware import WeightFormat
from pipedec.plan.curves import SizeCurve, timesteps_per_token
from pipedec.plan.draft_size import DraftSizing
from pipedec.plan.partition import Plan, plan
from pipedec.plan.table import plan_table

PAPER = Path(__file__).resolve().parents[2] / "cluster.yaml"
LLAMA_1B = KNOWN_MODELS["llama-3.2-1b"].parameters / KNOWN_MODELS["llama-3.1-70b"].parameters


@pytest.fixture
def paper(monkeypatch: pytest.MonkeyPatch) -> ClusterConfig:
    monkeypatch.delenv("PIPEDEC_REDIS_URL", raising=False)
    return load_cluster(PAPER)


def drafts(planned: Plan, top1: float | None = None) -> list[str]:
    """The lines about drafts."""
    output = io.StringIO()
    Console(width=100, file=output).print(plan_table(planned, top1))
    lines = [line.rstrip() for line in output.getvalue().splitlines()]
    first = next((place for place, line in enumerate(lines) if line.startswith("Drafts on")), len(lines))
    return lines[first:]


def qwen(**keys: object) -> ClusterConfig:
    servers = (ServerConfig("a", {"rtx3090": 5}),)
    device = {"host": "a", "device": "rtx3090"}
    return clustered(servers, {"only": {"stages": 4, "draft_device": device}}, target="qwen3-32b", dtype="bfloat16", **keys)


@pytest.mark.parametrize(
    ("share", "top1"),
    [(0.1e9 / 137e9, 0.61), (8e9 / 137e9, 0.75), (893568 / 10233024, 0.79)],
)
def test_the_curve_is_near_what_was_published_and_measured(share: float, top1: float) -> None:
    assert SizeCurve().top1(share) == pytest.approx(top1, abs=0.06)


def test_a_measured_draft_moves_the_curve() -> None:
    curve = SizeCurve.through(LLAMA_1B, 0.6)
    assert curve.top1(LLAMA_1B) == pytest.approx(0.6)
    assert 0.6 < curve.top1(4 * LLAMA_1B) < SizeCurve().top1(4 * LLAMA_1B)
    assert SizeCurve.through(LLAMA_1B, 0.01).top1(LLAMA_1B / 100) == 0


@pytest.mark.parametrize(
    ("top1", "forwards", "groups", "replayed"),
    [
        (0.259, 3, 14, 4.12), (0.686, 1, 14, 2.49), (0.865, 3, 14, 1.55), (0.69, 7, 7, 1.13), (0.69, 2, 21, 3.28),
    ],
)  # fmt: skip
def test_timesteps_are_near_those_of_replays(top1: float, forwards: int, groups: int, replayed: float) -> None:
    assert timesteps_per_token(top1, forwards, groups) == pytest.approx(replayed, rel=0.1)


def test_one_forward_drafts_one_level() -> None:
    assert timesteps_per_token(0.99, 1, 4) == 1
    assert timesteps_per_token(0.99, 4, 4) < 0.4


def test_a_larger_draft_pays_where_a_timestep_has_time(paper: ClusterConfig) -> None:
    sizing = DraftSizing(plan(paper, "paper-14"))
    present, known = sizing.present, {one.name: one for one in sizing.known()}
    assert (present.pace.forwards, round(present.forward_ms, 1), present.weights) == (3, 6.0, WeightFormat("float32"))
    assert list(known) == ["llama-3.2-1b", "llama-3.2-3b", "llama-3.1-8b"]
    assert known["llama-3.2-1b"].pace.forwards > known["llama-3.2-3b"].pace.forwards > known["llama-3.1-8b"].pace.forwards == 1
    assert known["llama-3.2-1b"].top1 < known["llama-3.2-3b"].top1 < known["llama-3.1-8b"].top1
    assert min(known.values(), key=lambda one: one.pace.ms_per_token).pace.ms_per_token < present.pace.ms_per_token
    for one in known.values():
        assert one.pace.timestep_ms == pytest.approx(max(24.0, one.pace.forwards * one.forward_ms), rel=0.15)


def test_forwards_that_do_not_fit_lengthen_the_timestep(paper: ClusterConfig) -> None:
    planned = plan(paper, "paper-14")
    assert planned.timestep_drafting(0) == planned.timestep_drafting(20) == planned.timestep_with(planned.room)
    assert planned.timestep_drafting(60) - planned.timestep_drafting(50) == pytest.approx(10)


def test_a_draft_that_does_not_fit_is_left_out(paper: ClusterConfig) -> None:
    assert {one.name for one in DraftSizing(plan(paper, "home-4x3090")).known()} == {"llama-3.2-3b", "llama-3.1-8b"}
    beside_nine_layers = paper.for_partition("7x2-3090", {"layers": (6,) * 10 + (4, 4, 3, 9)})
    assert {one.name for one in DraftSizing(plan(beside_nine_layers)).known()} == {"llama-3.2-3b"}


def test_drafts_have_the_vocabulary_of_the_target() -> None:
    names = [one.name for one in DraftSizing(plan(qwen(draft="qwen3-0.6b", quantize="int4"))).known()]
    assert names[:2] == ["qwen3-1.7b", "qwen3-4b"] and all(name.startswith("qwen3") for name in names)


def test_the_plan_says_how_large_a_draft_pays(paper: ClusterConfig) -> None:
    title, headings, present, *known, conclusion = drafts(plan(paper, "paper-14"))
    assert title == "Drafts on l40 #3 of server-4; top-1 and all after it are estimates by size:"
    assert headings.split()[:4] == ["draft", "weights", "GB", "forward"] and headings.endswith("  top-1  timesteps  ms per token")
    assert present.split()[:9] == ["the", "plan's", "float32", "4.9", "6.0", "ms", "3", "73%", present.split()[8]]
    assert [line.split()[0] for line in known] == ["llama-3.2-1b", "llama-3.2-3b", "llama-3.1-8b"]
    assert conclusion.endswith("% less time per token.") and conclusion.split()[0].startswith("llama")
    assert max(map(len, (title, headings, present, *known, conclusion))) <= 100
    assert "55%" in drafts(plan(paper, "paper-14"), 0.55)[2], "a measured accuracy is that of the plan's draft"
    slow = "  With any of them a token takes longer than without speculation."
    assert drafts(plan(paper, "home-2x3090"))[-1] == slow, "on a processor, for two fast GPUs"


def test_a_plan_without_a_draft_has_no_such_lines() -> None:
    planned = plan(qwen())
    assert drafts(planned) == []
    with pytest.raises(UserError, match=r"^partition only has no draft: name one \(draft:\)"):
        plan_table(planned, 0.5)


@pytest.mark.parametrize("share", ["0", "1"])
def test_a_share_is_between_0_and_1(share: str) -> None:
    result = CliRunner().invoke(command, [str(PAPER), "--partition", "paper-14", "--draft-top1", share])
    assert "--draft-top1" in refusal(result)
