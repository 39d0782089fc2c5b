"""The bench of threads at toy size: its rows, what it does after an interruption, its summary, and what it refuses."""

from __future__ import annotations

import json
from dataclasses import asdict, fields, replace
from math import prod
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from click.testing import CliRunner
from msgspec import structs
from support.silent_progress import Silent
from support.thread_models import THREAD_DIALECTS, Case, ThreadModels
from support.tiny_pair import Pair

from benchmarks.threads.__main__ import threads
from benchmarks.threads.benchmark import ThreadsConfig, bench_threads, sequential_metrics
from benchmarks.threads.figures import FIGURES
from benchmarks.threads.load import ThreadsLoadConfig, bench_load
from benchmarks.threads.summary import combinations, document, markdown, read_frame, speeds, structures
from pipedec.bench.report.figures import draw_figures
from pipedec.bench.sweep.pipelines import ModelPair as Models
from pipedec.bench.sweep.runners import connected
from pipedec.cluster.local import LocalCluster
from pipedec.config import paper_cluster
from pipedec.core.errors import PipedecError, UserError
from pipedec.core.sampling import SamplingParams
from pipedec.data import PromptSet
from pipedec.threads import measure

pytestmark = pytest.mark.slow

PROMPTS = [PromptSet("first", ("Tell me a story.", "What is a tree?")), PromptSet("second", ("Who sold the clips?",))]
METHODS = ("pp", "pipedec-bestfirst")
STAGES = (1, 2)
CASE = Case("apar", "greedy")


@pytest.fixture(scope="module")
def config(thread_models: ThreadModels, tmp_path_factory: pytest.TempPathFactory) -> ThreadsConfig:
    """Control tokens are likely, and children few and short."""
    file = tmp_path_factory.mktemp("dialects") / "few-children.json"
    file.write_text(THREAD_DIALECTS["apar"].to_json())
    spec = thread_models.spec(CASE.depth, 1)
    sampling = structs.replace(thread_models.sampling(CASE), max_tokens=24)
    return ThreadsConfig(
        paper_cluster(), "paper-14", STAGES, ("none", str(file)), METHODS, samples=2, sampling=sampling, own_work=False,
        pair=Models(spec.target, str(spec.draft)),
    )  # fmt: skip


@pytest.fixture(scope="module")
def whole(config: ThreadsConfig, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """A run that was not interrupted: its directory and rows."""
    out = tmp_path_factory.mktemp("whole")
    progress = Silent()
    rows = bench_threads(config, PROMPTS, out, progress)
    assert len(rows) == progress.rows == progress.total == 2 * 3 * 2 * 2
    return out, rows


def lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "rows.jsonl").read_text().splitlines()]


def test_every_combination_has_one_row(whole: tuple[Path, list[dict[str, Any]]]) -> None:
    out, rows = whole
    assert rows == lines(out) and len({row["key"] for row in rows}) == len(rows)
    places = {(row["cluster"]["stages"], row["dialect"], row["method"], row["prompt_set"], row["prompt_index"]) for row in rows}
    assert len(places) == len(rows) and {place[1] for place in places} == {"none", "apar"}
    frame = read_frame(rows)
    assert len(frame) == len(rows) and (frame["decode_ms"] > 0).all()
    for row in frame.to_dict("records"):
        assert len(row["fill"]) == row["timesteps"] and {len(part) for part in row["fill"]} == {row["stages"]}
        assert 0 < row["busy"] <= row["group_timesteps"] <= row["rows"] + row["group_timesteps"] - row["busy"]
        assert row["tokens"] <= 24 and row["decoded_text"] <= row["text_tokens"]
        assert row["threads"] == 1 or row["dialect"] != "none"
    assert frame["is_forked"].sum() >= len(rows) // 3, "the biases make threads"


def test_an_answer_is_the_references(config: ThreadsConfig, thread_models: ThreadModels, tmp_path: Path) -> None:
    expected = thread_models.known_answer(CASE)
    asked = replace(config, sampling=thread_models.sampling(CASE), methods=("pp",), stages=(1,), dialects=config.dialects[1:2])
    (row,) = bench_threads(asked, [PromptSet("first", (CASE.prompt,))], tmp_path, Silent())
    assert row["metrics"] == asdict(measure(expected)) and row["finish_reason"] == expected.finished
    assert row["prompt_tokens"] == expected.prompt_length and row["metrics"]["threads"] > 1
    assert row["decoded_text"] == sum(not token.is_control for token in expected.document()[1:])


def test_another_answer_of_a_method_is_an_error(
    config: ThreadsConfig, whole: tuple[Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    rows = [dict(row) for row in whole[1]]
    rows[-1]["document"] = "another"
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(PipedecError, match=r"pipedec-bestfirst on 2 stages and pp on 1 stages gave different answers"):
        bench_threads(config, PROMPTS, tmp_path, Silent())


def test_figures_of_the_summary_are_those_of_the_rows(whole: tuple[Path, list[dict[str, Any]]]) -> None:
    frame = read_frame(whole[1])
    rows = {(row["stages"], row["dialect"], row["method"], row["prompt_set"], row["prompt_index"]): row
            for row in frame.to_dict("records")}  # fmt: skip
    questions = list(dict.fromkeys(place[3:] for place in rows))

    def answers(*place: Any) -> list[dict[Any, Any]]:
        return [rows[(*place, *question)] for question in questions]

    found = structures(frame).set_index(["dialect", "prompt_set", "answers"])
    one, threaded = found.loc[("apar", "all", "all")], answers(1, "apar", "pp")
    assert one["count"] == 3 and one["threads"] == fmean(row["threads"] for row in threaded)
    sequential = answers(1, "none", "pp")
    speedups = [base["tokens"] / row["longest_chain"] for base, row in zip(sequential, threaded, strict=True)]
    assert one["theoretical_speedup"] == pytest.approx(prod(speedups) ** (1 / 3))
    assert one["cut_share"] == fmean(row["is_cut"] for row in threaded)
    costs = speeds(frame).set_index(["stages", "dialect", "method", "answers"])
    assert len(costs) == 2 * 2 * (1 + 2)
    for stages in STAGES:
        alone = costs.loc[(stages, "none", "pp", "all")]
        assert alone["occupancy"] == pytest.approx(1 / stages) and alone["rows_per_busy"] == 1 == alone["over_same"]
    both = costs.loc[(2, "apar", METHODS[1], "all")]
    ours, plain = answers(2, "apar", METHODS[1]), answers(2, "none", "pp")
    ratios = [base["decode_ms"] / row["decode_ms"] for base, row in zip(plain, ours, strict=True)]
    assert both["over_pp"] == pytest.approx(prod(ratios) ** (1 / 3))
    assert both["occupancy"] == sum(row["busy"] for row in ours) / sum(row["group_timesteps"] for row in ours)
    assert both["ms_per_token"] == pytest.approx(sum(row["decode_ms"] for row in ours) / sum(row["decoded_text"] for row in ours))
    four = next(one for one in combinations(frame) if (one["stages"], one["dialect"], one["answers"]) == (2, "apar", "all"))
    assert four["speedup_answer"] == {
        "neither": 1.0, "threads": pytest.approx(costs.loc[(2, "apar", "pp", "all")]["over_pp"]),
        "speculation": pytest.approx(costs.loc[(2, "none", "pipedec-bestfirst", "all")]["over_pp"]),
        "both": pytest.approx(both["over_pp"]),
    }  # fmt: skip
    forked = [row for row in threaded if row["threads"] > 1]
    assert costs.loc[(2, "apar", "pp", "forked")]["count"] == len(forked) >= 1


def test_an_answer_in_one_thread_saves_nothing() -> None:
    metrics = sequential_metrics(10, 5, 4)
    assert (metrics.threads, metrics.longest_chain, metrics.parallelism) == (1, 5, 0.8)
    assert metrics.attended_tokens == metrics.attended_tokens_flat == 10 + (0 + 1 + 2 + 3) / 4
    assert metrics.max_cached_tokens == metrics.max_cached_tokens_flat == 14
    assert sequential_metrics(3, 0, 0).parallelism == 0


def test_tables_and_pictures(whole: tuple[Path, list[dict[str, Any]]], tmp_path: Path) -> None:
    frame = read_frame(whole[1])
    text = markdown(frame)
    assert text.startswith("Preset paper-14, llama-3.1-70b. Emulated")
    for heading in ("## Answers in threads", "## What they cost", "## Threads, speculation, both"):
        table = [line for line in text.split(heading)[1].split("\n##")[0].splitlines() if line.startswith("|")]
        assert len(table) > 3 and len({len(line) for line in table}) == 1, "aligned"
    assert set(json.loads(document(frame))) == {"structure", "speed", "combinations", "anomalies"}
    drawn = draw_figures({"": frame}, tmp_path, FIGURES)
    assert [file.name for file in drawn.files] == [
        f"{name}.{kind}" for name in ("pipeline-fill", "threads-speedup") for kind in ("png", "svg")
    ]  # fmt: skip
    assert not drawn.left_out and all(file.stat().st_size > 5000 for file in drawn.files)
    alone = draw_figures({"": read_frame(row for row in whole[1] if row["dialect"] != "none")}, tmp_path / "alone", FIGURES)
    assert not alone.files and len(alone.left_out) == 2


def test_a_running_cluster_gives_the_answers_that_are_computed(
    config: ThreadsConfig, thread_models: ThreadModels, tmp_path: Path, leaves_nothing: None
) -> None:
    computed = bench_threads(replace(config, stages=(2,), samples=1), PROMPTS[:1], tmp_path / "computed", Silent())
    with LocalCluster(thread_models.spec(CASE.depth, 2).replaced(bita=None)) as cluster:
        running = connected(cluster)
        asked = replace(config, preset=None, samples=1, running=running)
        measured = bench_threads(asked, PROMPTS[:1], tmp_path / "measured", Silent())
        described = structs.replace(running.description, emulation="paper-14")
        with pytest.raises(UserError, match="emulates paper-14"):
            replace(asked, running=replace(running, description=described))
    same = ("dialect", "method", "prompt_index", "document", "finish_reason", "decoded_text", "metrics", "prompt_tokens")
    for one, other in zip(computed, measured, strict=True):
        assert {name: one[name] for name in same} == {name: other[name] for name in same}
        assert other["preset"] is None and other["decode_ms"] > 0 and other["fill"] == []
    assert max(row["metrics"]["threads"] for row in measured) > 1
    text = markdown(read_frame(measured))
    assert "Measured on a running cluster" in text and "Emulated" not in text
    assert speeds(read_frame(measured))[["occupancy", "rows_per_busy"]].isna().all(axis=None), "only the cluster knows them"


def test_loads_of_threads_wait_for_memory_and_give_the_same_answers(config: ThreadsConfig, tmp_path: Path) -> None:
    asked = {one.name: getattr(config, one.name) for one in fields(ThreadsConfig)}
    loads = ThreadsLoadConfig(**asked | {"stages": (1,), "methods": ("pp",)}, concurrency=(1, 8), kv_tokens=(164, 4096))
    rows = bench_load(loads, PROMPTS, tmp_path, Silent())
    assert [(row["kv_tokens"], row["dialect"], row["concurrency"]) for row in rows] == [
        (limit, dialect, count) for limit in (164, 4096) for dialect in ("none", "apar") for count in (1, 8)
    ]
    for scarce, ample in zip(rows[:4], rows[4:], strict=True):
        assert all(one in (None, other) for one, other in zip(scarce["documents"], ample["documents"], strict=True))
    assert rows[1]["timesteps"] > rows[5]["timesteps"] == rows[4]["timesteps"], "where memory is scarce, requests wait"
    assert rows[7]["threads"] > 1 == rows[5]["threads"]
    assert bench_load(loads, PROMPTS, tmp_path, Silent()) == rows
    with pytest.raises(UserError, match="--kv-tokens must be at least 16, one block, not 10"):
        bench_load(replace(loads, kv_tokens=(10,)), PROMPTS, tmp_path, Silent())


def test_command_writes_everything_and_measures_nothing_twice(pair: Pair, tmp_path: Path) -> None:
    """The tiny pair has no control tokens: it answers in one thread alone."""
    flags = ["--preset", "paper-14", "--stages", "1,2", "--dialects", "none", "--prompt", "Who?"]
    flags += ["--target", str(pair.target), "--draft", str(pair.draft), "--max-tokens", "4", "--out", str(tmp_path)]
    outputs = []
    for _ in range(2):
        done = CliRunner().invoke(threads, flags)
        assert done.exit_code == 0, (done.output, done.exception)
        outputs.append(done.stdout)
    assert outputs[0] == outputs[1] and "one thread" in outputs[0]
    assert len(lines(tmp_path)) == 4 and {path.name for path in tmp_path.iterdir()} == {
        "rows.jsonl", "summary.md", "summary.json"
    }  # fmt: skip
    assert (tmp_path / "summary.md").read_text() == outputs[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dialects": ("none", "esperanto")}, "unknown dialect 'esperanto'"),
        ({"dialects": ("apar", "apar")}, "--dialects names a dialect twice"),
        ({"samples": 0}, r"samples: must be an integer \(at least 1\)"),
    ],
)
def test_refuses_what_cannot_work(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        replace(ThreadsConfig(paper_cluster(), "paper-14"), **changes)


def test_refuses_a_target_without_control_tokens_and_rows_of_a_sweep(pair: Pair, tmp_path: Path) -> None:
    asked = ThreadsConfig(
        paper_cluster(), "paper-14", (1,), ("apar",), sampling=SamplingParams(max_tokens=4),
        pair=Models(pair.target, str(pair.draft)),
    )  # fmt: skip
    with pytest.raises(UserError, match=r"\[Fork\]"):
        bench_threads(asked, PROMPTS, tmp_path / "empty", Silent())
    (tmp_path / "rows.jsonl").write_text('{"schema": "pipedec.sweep/1"}\n')
    message = r"line 1: schema pipedec.sweep/1, not pipedec.threads/2"
    with pytest.raises(UserError, match=message):
        bench_threads(asked, PROMPTS, tmp_path, Silent())
