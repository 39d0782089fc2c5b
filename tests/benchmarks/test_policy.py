"""The study of policies at toy size: beside a sweep, after an interruption, and what it refuses."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from support.silent_progress import Silent
from support.tiny_pair import Pair

from benchmarks.load.offered import Policy
from benchmarks.policy.study import PolicyAnswer, PolicyConfig, PolicyFigures, Study, compare, document
from pipedec.bench.sweep.benchmark import sweep
from pipedec.bench.sweep.config import SweepConfig
from pipedec.bench.sweep.pipelines import ModelPair as Models
from pipedec.config import load_cluster, paper_cluster
from pipedec.core.errors import UserError
from pipedec.core.sampling import SamplingParams
from pipedec.data import PromptSet
from pipedec.engine.local import LocalPipeline

PROMPTS = [
    PromptSet("first", ("The pipeline", "Natalia sold", "word " * 4000, "Größe")),
    PromptSet("second", ("at every timestep",)),
]
POLICIES = ("pp", "pipedec:width=8,children=4", "pipedec-bestfirst:width=8,children=4")
STAGES = 3
MIXTURE = """
target: qwen3-30b-a3b:awq
draft: qwen3-0.6b
servers: [{host: one, devices: {rtx3090: 4}}]
partitions: {three: {stages: 3, draft_device: {host: one, device: rtx3090}}}
"""


def config(made_by: Pair, *policies: str, **changes: Any) -> PolicyConfig:
    made = PolicyConfig(
        paper_cluster(),
        "paper-14",
        tuple(map(Policy.parse, policies or POLICIES)),
        stages=STAGES,
        samples=1,
        own_work=False,
        sampling=SamplingParams(max_tokens=5, ignore_eos=True),
        pair=Models(made_by.target, str(made_by.draft)),
    )
    return replace(made, **changes)


def study(chosen: PolicyConfig, prompt_sets: list[PromptSet], directory: Path, progress: Silent) -> list[PolicyAnswer]:
    return list(Study(chosen, prompt_sets, directory).run(progress))


def swept(pair: Pair, out: Path, **changes: Any) -> list[dict[str, Any]]:
    made = SweepConfig(
        paper_cluster(), ("paper-14",), (STAGES,), POLICIES,
        samples=1, sampling=SamplingParams(max_tokens=5, ignore_eos=True), clock="computed", dispatch="tasks", own_work=False,
        pair=Models(pair.target, str(pair.draft)),
    )  # fmt: skip
    return sweep(replace(made, **changes), PROMPTS, out, Silent())


def costs(answers: list[PolicyAnswer]) -> list[tuple[object, ...]]:
    return [(one.policy.name, one.prompt.prompt_set, one.prompt.index, one.replayed) for one in answers]


def never(*arguments: object, **keywords: object) -> None:
    pytest.fail("a model was loaded")


@dataclass(frozen=True)
class Whole:
    """A study of all policies that was not interrupted, and its recording."""

    answers: list[PolicyAnswer]
    recording: Path


@pytest.fixture(scope="module")
def whole(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    recording = tmp_path_factory.mktemp("whole")
    return Whole(study(config(pair), PROMPTS, recording, Silent()), recording)


def test_what_is_recorded_is_not_computed_again(pair: Pair, whole: Whole, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = {path: path.read_bytes() for path in whole.recording.iterdir()}
    assert len(recorded) == 1 + 2, "the answers, and what the draft said below each of two prompts"
    monkeypatch.setattr(LocalPipeline, "load", never)
    monkeypatch.setattr("benchmarks.policy.study.load_drafter", never)
    assert costs(study(config(pair), PROMPTS, whole.recording, Silent())) == costs(whole.answers)
    assert {path: path.read_bytes() for path in whole.recording.iterdir()} == recorded


def test_without_a_draft_the_text_alone_proposes(pair: Pair, tmp_path: Path) -> None:
    alone = Models(pair.target, "none")
    answers = study(config(pair, "pp", "pipedec-bestfirst", pair=alone), PROMPTS[1:], tmp_path, Silent())
    assert len(answers) == 2 and list(tmp_path.glob("draft-*")) == []
    with pytest.raises(UserError, match="method pipedec needs a draft model"):
        study(config(pair, "pipedec", pair=alone), PROMPTS[1:], tmp_path / "other", Silent())
    with pytest.raises(UserError, match="no prompt of long fits"):
        study(config(pair, "pp"), [PromptSet("long", ("word " * 4000,))], tmp_path / "other", Silent())
    with pytest.raises(UserError, match="--policy pipedec:width=32 was given twice"):
        config(pair, "pipedec", "pipedec:width=32")
    assert not (tmp_path / "other").exists(), "found before anything was recorded"


def test_shared_suffixes_are_used_only_if_they_are_asked_for(pair: Pair, tmp_path: Path) -> None:
    """A prompt that comes twice, with a target that repeats itself."""
    twice = [PromptSet("first", PROMPTS[0].prompts[:1]), PromptSet("again", PROMPTS[0].prompts[:1])]
    alone, sampling = Models(pair.target, "none"), SamplingParams(1.5, max_tokens=20, ignore_eos=True)
    timesteps = {}
    for shares in (False, True):
        chosen = config(pair, "pipedec-bestfirst", pair=alone, sampling=sampling, shared_suffixes=shares)
        answers = study(chosen, twice, tmp_path, Silent())
        timesteps[shares] = [one.replayed.timesteps for one in answers]
        written = document(chosen, PolicyFigures.of(answers), compare(chosen, answers, []))
        assert written["config"]["shared_suffixes"] == shares
    assert timesteps[True][0] == timesteps[False][0] and timesteps[True][1] < timesteps[False][1] / 1.5


def test_rows_cost_what_a_mixture_reads_for_them(pair: Pair, tmp_path: Path) -> None:
    """The answers are those of the dense pair, at the costs of a mixture: chains are slower if rows share no experts."""
    path = tmp_path / "cluster.yaml"
    path.write_text(MIXTURE)
    chosen = config(pair, "pp", "stpp:width=1,depth=4", cluster=load_cluster(path), preset="three", stages=None)
    costs = {}
    for overlap in (0.5, 0.0):
        answers = study(replace(chosen, expert_overlap=overlap), PROMPTS[1:], tmp_path / "recording", Silent())
        figures = PolicyFigures.of(answers)
        costs[overlap] = figures.means["ms_per_token"].to_dict()
        written = document(replace(chosen, expert_overlap=overlap), figures, compare(chosen, answers, []))
        assert written["config"]["expert_overlap"] == overlap
    assert costs[0.5]["pp"] == pytest.approx(costs[0.0]["pp"])
    assert 1.1 * costs[0.5]["stpp:width=1,depth=4"] < costs[0.0]["stpp:width=1,depth=4"]
    with pytest.raises(UserError, match="expert_overlap: must be a number"):
        replace(chosen, expert_overlap=1.0)


def test_figures_add_up(pair: Pair, whole: Whole) -> None:
    figures = PolicyFigures.of(whole.answers)
    means = figures.means.to_dict("index")
    assert list(means) == list(POLICIES)
    for name, one in means.items():
        causes = figures.causes_per_token.loc[name].drop("together")
        assert causes.sum() == pytest.approx(one["timesteps_per_token"])
        assert figures.totals.loc[name]["tokens"].to_dict() == {"first": 4, "second": 4}
    plain, paper = means["pp"], means[POLICIES[1]]
    assert (plain["timesteps_per_token"], plain["hit_rate"]) == (STAGES, 0)
    assert plain["speedup"] == 1 and paper["speedup"] == pytest.approx(plain["ms_per_token"] / paper["ms_per_token"])
    written = json.loads(json.dumps(document(config(pair), figures, compare(config(pair), whole.answers, []))))
    assert written["schema"] == "pipedec.policy/1" and written["benchmark"] == "policy"
    plain, paper, best_first = (row["limits"] for row in written["policies"])
    assert plain == {} and paper == {"width": 8, "children": 4}
    assert best_first == {"width": 8, "children": 4, "forwards": None, "proposers": ["draft", "ngrams"]}
    for row in written["policies"]:
        for totals in row["sets"].values():
            assert sum(totals["timesteps_by_cause"].values()) - totals["timesteps_by_cause"]["together"] == totals["timesteps"]


def test_refuses_another_recording(pair: Pair, whole: Whole, tmp_path: Path) -> None:
    for changes, message in (
        ({"sampling": SamplingParams(max_tokens=7, ignore_eos=True)}, r"recorded with another max_tokens \(5, not 7\): give"),
        ({"pair": Models(pair.target, "none")}, r"recorded with another pair \("),
    ):
        with pytest.raises(UserError, match=message):
            Study(config(pair, "pp", **changes), PROMPTS, whole.recording)
    path, recorded = tmp_path / "recording.json", (whole.recording / "recording.json").read_text()
    path.write_text(recorded.replace("pipedec.recording/1", "pipedec.recording/0"))
    with pytest.raises(UserError, match=r"another schema \(pipedec.recording/0, not pipedec.recording/1\)"):
        Study(config(pair, "pp"), PROMPTS, tmp_path)
    starts = "[1.5, ", "[null, ", "[-1, ", '[], "was": ['
    answers = [recorded.replace('"token_ids": [', f'"token_ids": {start}') for start in starts]
    for text in (recorded[:-9], "[]", '{"schema": "pipedec.recording/1"}', recorded.replace("token_ids", "ids"), *answers):
        path.write_text(text)
        with pytest.raises(UserError, match=r"recording.json is no recording"):
            Study(config(pair, "pp"), PROMPTS, tmp_path)
    with pytest.raises(UserError, match="not a directory"):
        Study(config(pair, "pp"), PROMPTS, path)


def test_rows_of_anything_else_are_not_compared(pair: Pair, whole: Whole, tmp_path: Path) -> None:
    rows = swept(pair, tmp_path / "sweep", methods=POLICIES[:2])
    chosen = config(pair)
    answers = [one for one in whole.answers if one.policy.method == "pipedec"]
    slower = [{**row, "clock": "measured", "slow_motion": 2.0, "decode_ms": 2 * row["decode_ms"]} for row in rows]
    both = compare(chosen, answers, [*slower, *rows])
    found = both[["policy", "clock", "slow_motion", "answers"]].values.tolist()
    assert found == [[POLICIES[1], "computed", 1, 2], [POLICIES[1], "measured", 2, 2]]
    assert both["ratio"].tolist() == pytest.approx([1, 0.5], abs=1e-3)
    for change in (
        {"preset": "paper-7"}, {"prompt_index": 99}, {"prompt_set": "third"}, {"output_tokens": 4}, {"prompt_tokens": 4},
        {"method": "bita"}, {"tree": {"width": 8, "children": 5}}, {"pair": {"digest": "0"}}, {"sampling": {}}, {"cluster": {}},
    ):  # fmt: skip
        assert compare(chosen, answers, [{**row, **change} for row in rows]).empty
