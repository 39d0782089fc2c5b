"""The papers' experiments: their names, prompts, results and pages, and a run that was killed."""

from __future__ import annotations

import gzip
import json
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from support.processes import wait_until
from support.programs import Calls, caller

from benchmarks.papers.__main__ import DOCS, ENTRIES, EXPERIMENTS, PAPERS, SHIPPED, papers
from benchmarks.papers.experiment import Absent, Experiment, Place, Result, Table, measured, read_result
from benchmarks.papers.pages import page
from benchmarks.papers.prompts import SOURCES, find_prompts
from pipedec.bench.record import ROWS_FILE
from pipedec.core.errors import PipedecError, UserError
from pipedec.data import PromptSource
from pipedec.flags import run_command


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Calls:
    return caller(lambda: run_command(papers), monkeypatch, capsys)


def test_every_figure_and_table_has_one_name_and_a_command_or_a_reason(call: Calls) -> None:
    entries = [entry for several in ENTRIES.values() for entry in several]
    assert len({entry.name for entry in entries}) == len({entry.title for entry in entries}) == len(entries)
    assert all(entry.name.startswith(f"{paper}-") for paper, several in ENTRIES.items() for entry in several)
    listed = call("list").out.splitlines()
    assert [line.split()[0] for line in listed] == [entry.name for entry in entries]
    assert all(("(no command)" in line) == isinstance(entry, Absent) for line, entry in zip(listed, entries, strict=True))


def test_names_that_nothing_repeats_are_refused_in_one_line(call: Calls, tmp_path: Path) -> None:
    for words, message in (
        (("pipedec-fig9",), "unknown experiment 'pipedec-fig9': choose one of all, pipedec, "),
        (("pipedec-fig1",), "pipedec-fig1: An illustration."),
        (("pipedec-fig8", "--running"), "pipedec-fig8: these do not measure a real cluster"),
        (("pipedec-fig3", "--partitions", "p7"), "--partitions goes with --launch FILE"),
        (("pipedec-fig3", "--data", str(tmp_path)), f"--data {tmp_path} has no humaneval/HumanEval.jsonl.gz"),
    ):
        assert call(*words, "--out", tmp_path / "out").refused().startswith(message)


def test_prompts_are_those_of_the_directory_or_of_the_library(tmp_path: Path) -> None:
    (tmp_path / "humaneval").mkdir()
    (tmp_path / "humaneval/HumanEval.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": "def one():"}'))
    (tmp_path / "spec_bench").mkdir()
    (tmp_path / "spec_bench/question.jsonl").write_text(json.dumps({"category": "qa", "turns": ["Who?"]}))
    found = find_prompts(tmp_path, ("humaneval", "humaneval-x", "triviaqa"), tmp_path)
    assert [PromptSource.parse(source).read().prompts for source in found] == [("def one():",), ("Who?",)]
    assert [PromptSource.parse(source).name for source in found] == ["humaneval", "triviaqa"], "one source twice is asked once"
    questions = [PromptSource.parse(source).read() for source in find_prompts(None, tuple(SOURCES), tmp_path)]
    assert [one.name for one in questions] == ["lists", "texts"]
    assert all(len(one.prompts) > 20 for one in questions)


def _experiment(out: Path, *further: str) -> Experiment:
    """One that writes the prompts of an agent and counts them."""

    def tables(place: Place) -> list[Table]:
        return [Table(("file", "lines"), [[out.name, str(len(out.read_text().splitlines()))]], "counted")]

    commands = [["benchmarks.agent_prompts", "--out", str(out), *further]]
    return Experiment("pipedec-x", "Figure X", "Nothing differs.", lambda place: commands, tables)


def test_a_result_is_kept_until_something_else_is_asked_and_its_page_shows_it(tmp_path: Path) -> None:
    place, file = Place(tmp_path), tmp_path / "agent.jsonl"
    result = measured(_experiment(file), place)
    assert result.tables == [Table(("file", "lines"), [["agent.jsonl", "100"]], "counted")]
    file.unlink()
    assert measured(_experiment(file), place) == result == read_result(tmp_path / "results/pipedec-x.json")
    assert not file.exists(), "it was not measured again"
    assert measured(_experiment(file), replace(place, full=True)).size == "full"
    assert file.exists()
    shown = page("Papers", "About.", [_experiment(file), Absent("y", "Figure Y", "Why not.")], {"pipedec-x": result})
    assert "| agent.jsonl |   100 |" in shown
    assert shown.endswith("Nothing differs.\n\n## Figure Y\n\nWhy not.\n")
    assert "not run yet" in page("Papers", "About.", [_experiment(file)], {})


def test_a_failed_command_is_named_with_its_log(tmp_path: Path) -> None:
    with pytest.raises(PipedecError, match=r"benchmarks.agent_prompts ended with status 2: .*logs/pipedec-x-1.txt"):
        measured(_experiment(tmp_path / "none/agent.jsonl"), Place(tmp_path))
    (tmp_path / "results").mkdir()
    (tmp_path / "results/pipedec-x.json").write_text("{}")
    with pytest.raises(PipedecError, match="is no result of an experiment"):
        measured(_experiment(tmp_path / "agent.jsonl"), Place(tmp_path))


def test_the_pages_are_those_of_the_shipped_results() -> None:
    results: dict[str, Result] = {path.stem: read_result(path) for path in SHIPPED.glob("*.json")}
    assert results.keys() == EXPERIMENTS.keys()
    for name, module in PAPERS.items():
        written = (DOCS / f"{name}.md").read_text(encoding="utf-8")
        assert written == page(module.TITLE, module.ABOUT, ENTRIES[name], results), f"python -m benchmarks.papers {name} --ship"


def test_an_unknown_set_of_prompts_of_the_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no gsm8k/test.jsonl: docs/papers/data.md has the line that makes it"):
        find_prompts(tmp_path, ("gsm8k",), tmp_path)


@pytest.mark.slow
@pytest.mark.processes
def test_a_killed_run_goes_on_where_it_was(tmp_path: Path, leaves_nothing: None) -> None:
    command = [sys.executable, "-m", "benchmarks.papers", "pipedec-fig3", "--out", str(tmp_path)]
    rows = tmp_path / "rows/pipedec-agreement-short" / ROWS_FILE  # of which a killed run has written some
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as first:
        assert wait_until(lambda: rows.is_file() and rows.stat().st_size > 0, 300)
        first.send_signal(signal.SIGKILL)
    before = rows.read_text().splitlines()
    assert not (tmp_path / "results").exists()
    ended = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert ended.returncode == 0, ended.stderr
    after = rows.read_text().splitlines()
    assert after[: len(before) - 1] == before[:-1]
    assert len({json.loads(line)["key"] for line in after}) == len(after)
    assert "Figure 3" in (tmp_path / "pipedec.md").read_text()
