"""The sweep at toy size: its rows, resuming after an interruption, and what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from msgspec import structs
from support.bita_files import save_random_bita
from support.silent_progress import Silent
from support.tiny_pair import Pair

from benchmarks.reports.compared import greedy_and_stochastic
from pipedec.bench.report.frames import read_answers, studies, variants
from pipedec.bench.sweep.benchmark import sweep
from pipedec.bench.sweep.config import SweepConfig, TreeGrid, TuningGrid
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
GRID = TuningGrid(layer_depths=(1, 2), depths=(2, 3), rows=(4, 8))


def config(pair: Pair, **changes: Any) -> SweepConfig:
    made = SweepConfig(
        paper_cluster(),
        stages=(1, 3),
        presets=("paper-14",),
        samples=2,
        sampling=SamplingParams(max_tokens=6, ignore_eos=True),
        clock="computed",
        pair=Models(pair.target, str(pair.draft)),
        grid=GRID,
    )
    return replace(made, **changes)


def lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "rows.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_every_combination_has_one_row_and_all_methods_agree(pair: Pair, tmp_path: Path) -> None:
    progress = Silent()
    methods = ("pp", "stpp", "stpp-tuned", "pipedec", "slm")
    rows = sweep(config(pair, methods=methods, trees=TreeGrid((4, 8))), PROMPTS, tmp_path, progress)
    # Two pipelines × three prompts × (pp + three methods with two trees), and slm on its own pipeline.
    assert len(rows) == progress.rows == progress.total == 2 * 3 * 7 + 3
    assert len({row["key"] for row in rows}) == len(rows)
    assert rows == lines(tmp_path)
    assert read_rows([tmp_path]), "the schema of the readers"
    for row in rows:
        assert row["emulated"] and row["clock"] == "computed" and row["output_tokens"] == 6
        assert row["ms_per_token"] == row["computed_ms_per_token"] > 0
        assert row["cluster"]["model"] == ("llama-3.1-8b" if row["method"] == "slm" else "llama-3.1-70b")
    answers = {(row["prompt_set"], row["prompt_index"], row["answer"]) for row in rows if row["method"] != "slm"}
    assert len(answers) == 3
    for row in rows:
        if row["method"] == "stpp-tuned":
            assert row["tree"]["rows"] in GRID.rows


def test_pp_of_the_paper_takes_what_the_plan_says(pair: Pair, tmp_path: Path) -> None:
    shipped = replace(config(pair, methods=("pp",), stages=()), pair=Models())
    rows = sweep(shipped, PROMPTS, tmp_path, Silent())
    assert rows[0]["ms_per_token"] == pytest.approx(298, abs=12)  # the work of this process, about 2 ms, is in it


@pytest.mark.slow
def test_real_processes_are_measured_by_both_dispatches_with_every_bita(
    pair: Pair, wide_bita: Path, tmp_path: Path, leaves_nothing: None
) -> None:
    chosen = config(pair, methods=("pp", "bita"), stages=(2,), clock="measured", slow_motion=0.1, bita=(pair.bita, wide_bita))
    windows = sweep(chosen, PROMPTS[1:], tmp_path / "windows", Silent())
    names = [(row["method"], row["bita"] and row["bita"]["name"]) for row in windows]
    assert names == [("pp", None), ("bita", "bita"), ("bita", "wide")]
    assert len({row["answer"] for row in windows}) == 1 and all(row["breakdown"] for row in windows)
    for row in windows:
        assert row["clock"] == "measured" and row["slow_motion"] == 0.1 and 0 <= row["overran"] <= 1
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
    greedy = config(pair, methods=("stpp", "stpp-tuned", "pipedec"), stages=(2,), seed=5)
    drawn = replace(greedy, repeats=3, sampling=SamplingParams(1.0, top_k=80, top_p=0.9, max_tokens=6, ignore_eos=True))
    first = sweep(greedy, PROMPTS, tmp_path, Silent())
    second = sweep(drawn, PROMPTS, tmp_path, Silent())
    assert (len(first), len(second)) == (9, 27) and lines(tmp_path) == first + second
    assert {(row["prompt_set"], row["prompt_index"]) for row in first} == {
        (row["prompt_set"], row["prompt_index"]) for row in second
    }
    tuned = json.loads((tmp_path / "trees.json").read_text())
    assert len(tuned) == 4, "two static trees, chosen for each way to decode"
    assert sweep(greedy, PROMPTS, tmp_path, Silent()) == first and sweep(drawn, PROMPTS, tmp_path, Silent()) == second
    assert lines(tmp_path) == first + second and json.loads((tmp_path / "trees.json").read_text()) == tuned
    both = greedy_and_stochastic(studies(read_answers([tmp_path]))["computed"])
    assert both.methods == [one.method for one in variants(both.stochastic)] == ["stpp", "stpp-tuned", "pipedec"]
    assert (len(both.greedy), len(both.stochastic)) == (3 * 3, 3 * 9)


class SecondBest(OneProcess):
    """A pipeline in this process whose ``stpp`` takes the second best third token."""

    def __init__(self, spec: PipelineSpec, margins: list[float]) -> None:
        super().__init__(spec)
        self._margins = margins

    def answer(self, asked: PromptRequest) -> MeasuredAnswer:
        measured = super().answer(asked)
        if asked.method != "stpp":
            return measured
        logprobs = self.reference(structs.replace(asked, sampling=structs.replace(asked.sampling, logprobs=2))).logprobs
        assert logprobs is not None
        (_, best), (token, other) = logprobs[2].items()
        self._margins.append(best - other)
        return replace(measured, token_ids=(*measured.token_ids[:2], token, *measured.token_ids[3:]))


def test_a_sweep_here_judges_a_difference_by_its_margin(pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    margins: list[float] = []
    chosen = config(pair, methods=("pp", "stpp"), stages=(2,))

    def run(bound: float, out: Path) -> dict[str, Any]:
        monkeypatch.setitem(TIE_BOUNDS, "float32", bound)
        sweep(chosen, PROMPTS[1:], out, Silent(), lambda shape, clock, prompts: SecondBest(shape.spec, margins))
        found: dict[str, Any] = lines(out)[1]["divergence"]
        return found

    found = run(1e3, tmp_path / "tie")
    assert found["position"] == 2 and found["near_tie"] and found["margin"] == pytest.approx(margins[-1])
    for _ in range(2):  # a row with a difference is not passed over
        with pytest.raises(PipedecError, match="stpp and pp gave different answers to prompt 0 of second: output token 2 is"):
            run(1e-3, tmp_path / "defect")
    assert [row["method"] for row in lines(tmp_path / "defect")] == ["pp", "stpp"]
    assert not lines(tmp_path / "defect")[1]["divergence"]["near_tie"]


class Listening(OneProcess):
    """A pipeline in this process that notes the seeds of what it is asked by a static tree."""

    def __init__(self, spec: PipelineSpec, seeds: list[int | None]) -> None:
        super().__init__(spec)
        self._seeds = seeds

    def answer(self, asked: PromptRequest) -> MeasuredAnswer:
        if asked.method == "stpp":
            self._seeds.append(asked.sampling.seed)
        return super().answer(asked)


def test_static_trees_are_the_best_over_all_draws(pair: Pair, tmp_path: Path) -> None:
    chosen = config(pair, methods=("stpp",), stages=(2,), seed=5, repeats=2, samples=1, grid=TuningGrid((1,), (2,), (4,)))
    drawn = SamplingParams(1.0, max_tokens=6, ignore_eos=True)
    for each, expected in ((chosen, [None, None]), (replace(chosen, sampling=drawn), [5, 6, 5, 6])):
        seeds: list[int | None] = []
        sweep(each, PROMPTS, tmp_path, Silent(), lambda shape, clock, prompts, seeds=seeds: Listening(shape.spec, seeds))
        num_trees = (len(seeds) - 2 * 2) // len(expected)  # what is not asked for the four rows
        assert num_trees >= 1 and seeds[: num_trees * len(expected)] == expected * num_trees


@pytest.mark.slow
def test_a_target_without_a_draft_is_not_taken_for_the_small_model(pair: Pair, tmp_path: Path, leaves_nothing: None) -> None:
    chosen = replace(
        config(pair, presets=(), stages=(1,), methods=("pp", "slm"), clock="measured"),
        pair=Models(pair.target, "none", pair.draft),
    )
    progress = Silent()
    rows = sweep(chosen, PROMPTS[1:], tmp_path / "out", progress)
    assert [row["method"] for row in rows] == ["pp", "slm"] and progress.total == progress.rows == 2
    assert not rows[0]["emulated"] and rows[0]["preset"] is None and rows[0]["computed_ms_per_token"] is None
    assert rows[0]["pair"]["target"] == str(pair.target) and rows[1]["pair"]["target"] == str(pair.draft)


@pytest.fixture(scope="module")
def wide_bita(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another BiTA of the target: two masks, nine prompt tokens."""
    directory = tmp_path_factory.mktemp("bita") / "wide"
    save_random_bita(directory, pair.target, num_masks=2, num_prompt_tokens=9, seed=1)
    return directory


@pytest.mark.slow
def test_every_bita_decodes_with_every_tree_it_can_and_other_methods_run_once(
    pair: Pair, wide_bita: Path, tmp_path: Path
) -> None:
    shapes = ("efficient", "straightforward", "full", "likeliest")
    trees = TreeGrid(shapes=shapes, children=(1, 2), depths=(1, 2), rows=(8, 16))
    chosen = config(pair, methods=("pp", "bita", "slm"), stages=(2,), bita=(pair.bita, wide_bita), trees=trees)
    progress = Silent()
    rows = sweep(chosen, PROMPTS[1:], tmp_path, progress)
    of_bita = [row for row in rows if row["method"] == "bita"]
    assert [row["method"] for row in rows if row["method"] != "bita"] == ["pp", "slm"]
    assert [row["bita"] for row in rows if row["method"] != "bita"] == [None, None]
    whole = [("efficient", 2, None), ("efficient", 1, None), ("straightforward", 1, None), ("full", 1, None), ("full", 2, None)]
    kept = [("likeliest", children, rows) for children in (1, 2) for rows in (8, 16)]
    expected = {(name, depth, *tree) for name in ("bita", "wide") for tree in whole + kept for depth in (1, 2)}
    found = [(row["bita"]["name"], *(row["tree"][name] for name in ("depth", "shape", "children", "rows"))) for row in of_bita]
    assert set(found) == expected and len(found) == len(expected), "a mask of the straightforward tree names one token"
    wide = next(row["bita"] for row in of_bita if row["bita"]["name"] == "wide")
    assert (wide["prompting"], wide["masks"], wide["prompt_tokens"]) == ("deep", 2, 9)
    assert len({row["bita"]["digest"] for row in of_bita}) == 2
    assert len({row["key"] for row in rows}) == len(rows) == progress.rows == progress.total
    assert len({row["answer"] for row in rows if row["method"] != "slm"}) == 1
    assert len(read_rows([tmp_path])) == len(rows)
    assert sweep(chosen, PROMPTS[1:], tmp_path, Silent()) == rows == lines(tmp_path)


def test_bita_uses_all_its_masks_and_its_rows_do_not_change_those_of_others(pair: Pair, tmp_path: Path) -> None:
    first = sweep(config(pair, methods=("pp", "pipedec-bestfirst"), stages=(2,)), PROMPTS[1:], tmp_path, Silent())
    both = config(pair, methods=("pp", "bita", "pipedec-bestfirst"), stages=(2,), bita=(pair.bita,))
    rows = sweep(both, PROMPTS[1:], tmp_path, Silent())
    assert [row for row in rows if row["method"] != "bita"] == first
    assert rows[1]["tree"] == {"shape": "likeliest", "depth": 3, "children": 16, "rows": 64}
    assert "shape" not in first[1]["tree"], "a limit of bita alone"


def test_command_takes_several_bita_with_shapes_and_depths(pair: Pair, wide_bita: Path, tmp_path: Path) -> None:
    flags = ["--preset", "paper-14", "--stages", "2", "--clock", "computed", "--methods", "pp,bita", "--prompt", "Who?"]
    flags += ["--target", str(pair.target), "--draft", str(pair.draft), "--max-tokens", "4", "--out", str(tmp_path)]
    flags += ["--bita", str(pair.bita), "--bita", str(wide_bita), "--shapes", "straightforward,full", "--depths", "1,2"]
    done = CliRunner().invoke(program, ["bench", "sweep", *flags, "--children", "2"])
    assert done.exit_code == 0, (done.output, done.exception)
    assert "wide: full" in done.stdout
    found = [(row["bita"]["name"], row["tree"]["shape"], row["tree"]["depth"]) for row in lines(tmp_path) if row["bita"]]
    assert found == [
        (name, shape, depth) for name in ("bita", "wide") for shape in ("straightforward", "full") for depth in (1, 2)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"methods": ("warp",)}, "unknown method 'warp': choose one of pp, "),
        ({"clock": "sundial"}, "clock: must be one of measured, computed, not 'sundial'"),
        ({"presets": ("paper-15",)}, "paper-15"),
        ({"presets": ()}, "without --preset nothing is emulated"),
        ({"bita": (Path("bita"),)}, "--bita needs the method bita: add it to --methods"),
        ({"samples": 0}, r"samples: must be an integer \(at least 1\)"),
    ],
)
def test_refuses_what_cannot_work(pair: Pair, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        config(pair, **changes)


def test_trees_that_a_bita_cannot_have_are_refused_before_anything_is_measured(
    pair: Pair, wide_bita: Path, tmp_path: Path
) -> None:
    chosen = config(pair, methods=("pp", "bita"), stages=(2,), bita=(pair.bita, wide_bita))
    for changes, message in (
        ({"trees": TreeGrid(depths=(1, 3))}, "depth 3, but this BiTA was trained with 2 masks"),
        ({"trees": TreeGrid(shapes=("efficient", "full"), children=(20,))}, "a tree of 33684 rows is more than 512"),
        ({"bita": ()}, "give --bita DIR"),
    ):
        with pytest.raises(UserError, match=message):
            sweep(replace(chosen, **changes), PROMPTS, tmp_path, Silent())
    assert not (tmp_path / "rows.jsonl").exists()
    for limits, message in (
        ({"widths": (0,)}, r"widths\[0\]: must be an integer \(at least 1\)"),
        ({"forwards": 0}, r"forwards: must be an integer \(1 to 8\)"),
    ):
        with pytest.raises(UserError, match=message):
            TreeGrid(**limits)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"shapes\[1\]: must be one of likeliest, efficient, straightforward, full, not 'round'"):
        TreeGrid(shapes=("efficient", "round"))


def test_refuses_rows_of_another_schema_and_prompts_that_do_not_fit(pair: Pair, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"schema": "pipedec.sweep/0"}\n')
    with pytest.raises(UserError, match=r"rows.jsonl, line 1: schema pipedec.sweep/0"):
        sweep(config(pair), PROMPTS, tmp_path, Silent())
    with pytest.raises(UserError, match="no prompt of long fits"):
        sweep(config(pair), [PromptSet("long", ("word " * 4000,))], tmp_path / "other", Silent())
