"""The sweep at toy size: its rows, resuming after an interruption, and what it refuses."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from msgspec import structs
from support.silent_progress import Silent
from support.tiny_pair import Pair

from benchmarks.reports.compared import greedy_and_stochastic
from pipedec.bench.report.frames import read_answers, studies, variants
from pipedec.bench.sweep.benchmark import sweep
from pipedec.bench.sweep.config import SweepConfig
from pipedec.bench.sweep.pipelines import ModelPair as Models
from pipedec.bench.sweep.rows import read_rows
from pipedec.bench.sweep.runners import MeasuredAnswer, OneProcess
from pipedec.cli.main import program
from pipedec.config import paper_cluster
from pipedec.core.errors import PipedecError, UserError
from pipedec.core.sampling import SamplingParams
from pipedec.data import PromptSet
from pipedec.messages.request import PromptRequest
from pipedec.plan.spec import PipelineSpec
from pipedec.verify.divergence import TIE_BOUNDS

PROMPTS = [PromptSet("first", ("The pipeline", "Natalia sold", "Größe")), PromptSet("second", ("at every timestep",))]


def config(pair: Pair, **changes: Any) -> SweepConfig:
    made = SweepConfig(
        paper_cluster(),
        stages=(1, 3),
        presets=("paper-14",),
        samples=2,
        sampling=SamplingParams(max_tokens=6, ignore_eos=True),
        clock="computed",
        pair=Models(pair.target, str(pair.draft)),
    )
    return replace(made, **changes)


def lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "rows.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_every_combination_has_one_row_and_all_methods_agree(pair: Pair, tmp_path: Path) -> None:
    progress = Silent()
    methods = ("pp", "stpp:rows=8", "pipedec:width=4", "pipedec:width=8", "bita:shape=full,depth=2", "bita")
    models = Models(pair.target, str(pair.draft), pair.bita)
    rows = sweep(replace(config(pair, methods=methods), pair=models), PROMPTS, tmp_path, progress)
    assert len(rows) == progress.rows == progress.total == 2 * 3 * 6
    assert len({row["key"] for row in rows}) == len(rows)
    assert rows == lines(tmp_path)
    assert read_rows([tmp_path]), "the schema of the readers"
    for row in rows:
        assert row["emulated"] and row["clock"] == "computed" and row["output_tokens"] == 6
        assert row["ms_per_token"] == row["computed_ms_per_token"] > 0
        assert row["cluster"]["model"] == "llama-3.1-70b"
    answers = {(row["prompt_set"], row["prompt_index"], row["answer"]) for row in rows}
    assert len(answers) == 3
    trees = [row["tree"] for row in rows[:6]]
    assert trees[0] is None and trees[1]["rows"] == 8 and [tree["width"] for tree in trees[2:4]] == [4, 8]
    assert trees[4] == {"shape": "full", "depth": 2, "children": 2, "rows": None}
    assert trees[5] == {"shape": "likeliest", "depth": 3, "children": 16, "rows": 64}, "all masks, and the usual candidates"
    assert {row["bita"]["name"] for row in rows if row["method"] == "bita"} == {"bita"}


def test_pp_of_the_paper_takes_what_the_plan_says(pair: Pair, tmp_path: Path) -> None:
    shipped = replace(config(pair, methods=("pp",), stages=()), pair=Models())
    rows = sweep(shipped, PROMPTS, tmp_path, Silent())
    assert rows[0]["ms_per_token"] == pytest.approx(298, abs=12)  # the work of this process, about 2 ms, is in it


@pytest.mark.slow
def test_real_processes_are_measured_by_both_dispatches(pair: Pair, tmp_path: Path, leaves_nothing: None) -> None:
    chosen = config(pair, methods=("pp", "pipedec"), stages=(2,), clock="measured", slow_motion=0.1)
    windows = sweep(chosen, PROMPTS[1:], tmp_path / "windows", Silent())
    assert len({row["answer"] for row in windows}) == 1 and all(row["breakdown"] for row in windows)
    for row in windows:
        assert row["clock"] == "measured" and row["slow_motion"] == 0.1 and 0 <= row["overran"] <= 1
        assert row["computed_ms_per_token"] is None
    tasks = sweep(replace(chosen, dispatch="tasks"), PROMPTS[1:], tmp_path / "tasks", Silent())
    assert [row["answer"] for row in tasks] == [row["answer"] for row in windows]
    assert {row["cluster"].get("dispatch") for row in windows} == {None}
    assert {row.pipeline.name for row in read_rows([tmp_path / "tasks"])} == {"paper-14, 2 stages, single tasks"}


@pytest.mark.slow
def test_computed_times_follow_the_order_of_the_dispatch(pair: Pair, tmp_path: Path) -> None:
    chosen = config(pair, stages=(3,), methods=("pp", "pipedec"), own_work=False)
    windows = sweep(chosen, PROMPTS, tmp_path / "windows", Silent())
    tasks = sweep(replace(chosen, dispatch="tasks"), PROMPTS, tmp_path / "tasks", Silent())
    for travelling, at_once in zip(windows, tasks, strict=True):
        assert all(travelling[name] == at_once[name] for name in ("answer", "timesteps", "hits", "misses"))
        assert travelling["decode_ms"] >= at_once["decode_ms"], "rows of rejected branches are computed to the end"
    assert sum(row["decode_ms"] for row in windows) > sum(row["decode_ms"] for row in tasks)


def test_with_a_temperature_every_repeat_has_a_seed_of_its_own_and_all_methods_agree(pair: Pair, tmp_path: Path) -> None:
    sampling = SamplingParams(1.0, top_k=80, top_p=0.9, max_tokens=6, ignore_eos=True)
    chosen = config(pair, sampling=sampling, seed=5, repeats=2, methods=("pp", "stpp", "pipedec"), stages=(2,))
    rows = sweep(chosen, PROMPTS[:1], tmp_path, Silent())
    assert {(row["repeat"], row["sampling"]["seed"]) for row in rows} == {(0, 5), (1, 6)}
    assert {row["sampling"]["temperature"] for row in rows} == {1.0}
    by_case: dict[tuple[int, int], set[str]] = {}
    for row in rows:
        by_case.setdefault((row["prompt_index"], row["repeat"]), set()).add(row["answer"])
    assert all(len(answers) == 1 for answers in by_case.values())
    assert len(set.union(*by_case.values())) == len(by_case) == 4, "another seed, another answer"
    assert len(read_rows([tmp_path])) == len(rows)
    assert sweep(chosen, PROMPTS[:1], tmp_path, Silent()) == rows == lines(tmp_path)


@pytest.mark.slow
def test_greedy_and_stochastic_rows_share_a_directory_and_go_on(pair: Pair, tmp_path: Path) -> None:
    greedy = config(pair, methods=("stpp", "pipedec"), stages=(2,), seed=5)
    drawn = replace(greedy, repeats=3, sampling=SamplingParams(1.0, top_k=80, top_p=0.9, max_tokens=6, ignore_eos=True))
    first = sweep(greedy, PROMPTS, tmp_path, Silent())
    second = sweep(drawn, PROMPTS, tmp_path, Silent())
    assert (len(first), len(second)) == (6, 18) and lines(tmp_path) == first + second
    assert {(row["prompt_set"], row["prompt_index"]) for row in first} == {
        (row["prompt_set"], row["prompt_index"]) for row in second
    }
    assert sweep(greedy, PROMPTS, tmp_path, Silent()) == first and sweep(drawn, PROMPTS, tmp_path, Silent()) == second
    assert lines(tmp_path) == first + second
    both = greedy_and_stochastic(studies(read_answers([tmp_path]))["computed"])
    assert both.methods == [one.method for one in variants(both.stochastic)] == ["stpp", "pipedec"]
    assert (len(both.greedy), len(both.stochastic)) == (2 * 3, 2 * 9)


class SecondBest(OneProcess):
    """A pipeline in this process whose ``stpp`` takes the second best third token."""

    def __init__(self, spec: PipelineSpec, margins: list[float]) -> None:
        super().__init__(spec)
        self._margins = margins

    def answer(self, asked: PromptRequest) -> MeasuredAnswer:
        measured = super().answer(asked)
        if asked.method != "stpp":
            return measured
        sampling = structs.replace(asked.sampling, logprobs=2)
        logprobs = super().answer(structs.replace(asked, method="pp", options={}, sampling=sampling)).logprobs
        assert logprobs is not None
        (_, best), (token, other) = logprobs[2].items()
        self._margins.append(best - other)
        return replace(measured, token_ids=(*measured.token_ids[:2], token, *measured.token_ids[3:]))


def test_a_sweep_here_judges_a_difference_by_its_margin(pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    margins: list[float] = []
    chosen = config(pair, methods=("pp", "stpp"), stages=(2,))

    def run(bound: float, out: Path) -> dict[str, Any]:
        monkeypatch.setitem(TIE_BOUNDS, "float32", bound)
        sweep(chosen, PROMPTS[1:], out, Silent(), lambda shape, clock: nullcontext(SecondBest(shape.spec, margins)))
        found: dict[str, Any] = lines(out)[1]["divergence"]
        return found

    found = run(1e3, tmp_path / "tie")
    assert found["position"] == 2 and found["near_tie"] and found["margin"] == pytest.approx(margins[-1])
    for _ in range(2):  # a row with a difference is not passed over
        with pytest.raises(PipedecError, match="stpp and pp gave different answers to prompt 0 of second: output token 2 is"):
            run(1e-3, tmp_path / "defect")
    assert [row["method"] for row in lines(tmp_path / "defect")] == ["pp", "stpp"]
    assert not lines(tmp_path / "defect")[1]["divergence"]["near_tie"]


@pytest.mark.slow
def test_this_machine_itself_is_measured_by_what_it_can_decode_with(pair: Pair, tmp_path: Path, leaves_nothing: None) -> None:
    chosen = replace(config(pair, presets=(), stages=(1,), clock="measured"), pair=Models(pair.target, "none"))
    progress = Silent()
    rows = sweep(chosen, PROMPTS[1:], tmp_path / "out", progress)
    assert [row["method"] for row in rows] == ["pp", "pipedec-bestfirst"] and progress.total == progress.rows == 2
    assert not rows[0]["emulated"] and rows[0]["preset"] is None and rows[0]["computed_ms_per_token"] is None
    assert rows[0]["pair"]["target"] == str(pair.target)


def test_command_takes_methods_with_options(pair: Pair, tmp_path: Path) -> None:
    flags = ["--preset", "paper-14", "--stages", "2", "--clock", "computed", "--prompt", "Who?"]
    flags += ["--methods", "pp,stpp", "--methods", "bita:shape=full,depth=1,children=2", "--bita", str(pair.bita)]
    flags += ["--target", str(pair.target), "--draft", str(pair.draft), "--max-tokens", "4", "--out", str(tmp_path)]
    done = CliRunner().invoke(program, ["bench", "sweep", *flags])
    assert done.exit_code == 0, (done.output, done.exception)
    assert "shape full" in done.stdout
    assert [row["method"] for row in lines(tmp_path)] == ["pp", "stpp", "bita"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"methods": ("warp",)}, "--methods warp: unknown method 'warp': choose one of pp, "),
        ({"methods": ("pipedec:width=0",)}, "--methods pipedec:width=0: width: must be an integer"),
        ({"clock": "sundial"}, "clock: must be one of measured, computed"),
        ({"presets": ("paper-15",)}, "paper-15"),
        ({"presets": ()}, "without --preset nothing is emulated"),
        ({"samples": 0}, "samples: must be an integer"),
    ],
)
def test_refuses_what_cannot_work(pair: Pair, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        config(pair, **changes)


def test_methods_that_a_pipeline_cannot_run_are_refused_before_anything_is_measured(pair: Pair, tmp_path: Path) -> None:
    for models, methods, message in (
        (Models(pair.target, "none"), ("pp", "stpp"), "method stpp needs a draft model"),
        (Models(pair.target, str(pair.draft)), ("pp", "bita"), "give --bita DIR"),
    ):
        with pytest.raises(UserError, match=message):
            sweep(replace(config(pair, methods=methods, stages=(2,)), pair=models), PROMPTS, tmp_path, Silent())
    assert not (tmp_path / "rows.jsonl").exists()


def test_refuses_rows_of_another_schema_and_prompts_that_do_not_fit(pair: Pair, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"schema": "pipedec.sweep/0"}\n')
    with pytest.raises(UserError, match=r"rows.jsonl, line 1: schema pipedec.sweep/0"):
        sweep(config(pair), PROMPTS, tmp_path, Silent())
    with pytest.raises(UserError, match="no prompt of long fits"):
        sweep(config(pair), [PromptSet("long", ("word " * 4000,))], tmp_path / "other", Silent())
