"""The expected speed of the default method: a draft's accuracy by its size, and the timesteps and the time that follow."""

import io
import re
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console
from support.clusters import clustered
from support.refusals import refusal

from pipedec.cli.launch import plan as command
from pipedec.config import ClusterConfig, ServerConfig, load_cluster
from pipedec.core.errors import UserError
from pipedec.plan.curves import expected_top1, timesteps_per_token
from pipedec.plan.partition import Plan, plan
from pipedec.plan.table import plan_table

PAPER = Path(__file__).resolve().parents[2] / "cluster.yaml"


@pytest.fixture
def paper(monkeypatch: pytest.MonkeyPatch) -> ClusterConfig:
    monkeypatch.delenv("PIPEDEC_REDIS_URL", raising=False)
    return load_cluster(PAPER)


def default_method(planned: Plan, top1: float | None = None) -> list[float]:
    """Its milliseconds per token in the table, if it is there."""
    output = io.StringIO()
    Console(width=100, file=output).print(plan_table(planned, top1))
    return [float(ms) for ms in re.findall(r"default method +([\d.]+) ms +per token, estimated", output.getvalue())]


@pytest.mark.parametrize(
    ("share", "top1"),
    [(0.1e9 / 137e9, 0.61), (8e9 / 137e9, 0.75), (893568 / 10233024, 0.79)],
)
def test_the_curve_is_near_what_was_published_and_measured(share: float, top1: float) -> None:
    assert expected_top1(share) == pytest.approx(top1, abs=0.06)


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


def test_forwards_that_do_not_fit_lengthen_the_timestep(paper: ClusterConfig) -> None:
    planned = plan(paper, "paper-14")
    assert planned.timestep_drafting(0) == planned.timestep_drafting(20) == planned.timestep_with(planned.room)
    assert planned.timestep_drafting(60) - planned.timestep_drafting(50) == pytest.approx(10)
    assert planned.speculating_ms(0.7, 6.0) < planned.speculating_ms(0.7, 60.0)


def test_a_better_draft_takes_less_time_per_token(paper: ClusterConfig) -> None:
    planned = plan(paper, "paper-14")
    [by_size], [worse], [better] = default_method(planned), default_method(planned, 0.5), default_method(planned, 0.9)
    assert better < by_size < worse
    assert 0.7 < planned.top1 < 0.8


def test_a_plan_without_a_draft_has_no_such_line() -> None:
    planned = plan(clustered((ServerConfig("a", {"rtx3090": 4}),), {"only": {"stages": 4}}, target="qwen3-32b", dtype="bfloat16"))
    assert default_method(planned) == []
    with pytest.raises(UserError, match=r"^partition only has no draft: name one \(draft:\)"):
        plan_table(planned, 0.5)


@pytest.mark.parametrize("share", ["0", "1"])
def test_a_share_is_between_0_and_1(share: str) -> None:
    result = CliRunner().invoke(command, [str(PAPER), "--partition", "paper-14", "--draft-top1", share])
    assert "--draft-top1" in refusal(result)
