"""``make gpu-day`` itself: what has passed is not run again, nothing runs longer than it may, and a failure is told."""

from __future__ import annotations

import json
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import day
import pytest
from day import CLEANUP_SECONDS, DAY_SECONDS, Day, Result
from day_figures import Reading
from day_steps import STEPS, Command, Step
from support.checkpoints import save_tiny_llama

from pipedec.config import load_cluster
from pipedec.plan.partition import plan

MACHINE = {"revision": "1", "GPUs": "none"}
WRITE = "import sys; open(sys.argv[1], 'a').write('x')"


def python(program: str, *arguments: str) -> Command:
    return ("{python}", "-c", program.replace("{", "{{").replace("}", "}}"), *arguments)


def step(name: str, *commands: Command, limit_seconds: float = 60, **values: object) -> Step:
    return Step(name, limit_seconds, commands, commands, "the cable", **values)  # type: ignore[arg-type]


def run(
    tmp_path: Path,
    *steps: Step,
    machine: dict[str, str] = MACHINE,
    is_toy: bool = False,
    seconds: float = 600,
    **names: list[str],
) -> list[Result]:
    values = {"python": sys.executable, "count": str(tmp_path / "count")}
    return Day(tmp_path, steps, machine, values, is_toy, seconds).run(**names)


def report(tmp_path: Path) -> str:
    return (tmp_path / "report.md").read_text()


def test_a_day_has_a_time_for_every_step() -> None:
    assert len({one.name for one in STEPS}) == len(STEPS)
    assert sum(one.limit_seconds for one in STEPS) <= DAY_SECONDS
    assert DAY_SECONDS + CLEANUP_SECONDS * sum(len(one.cleanup) for one in STEPS) <= 51 * 60


def test_what_measures_kernels_takes_ten_minutes() -> None:
    assert sum(one.limit_seconds for one in STEPS if one.name in ("layers", "kernels", "draft")) <= 600


def test_the_guide_has_a_line_for_every_step() -> None:
    _, _, table = (day.ROOT / "docs" / "gpu.md").read_text().partition("| step | what it shows |")
    cells = re.findall(r"^\| (`[^|]+) \|", table.partition("\n\n")[0], re.MULTILINE)
    assert re.findall(r"`([^`]+)`", " ".join(cells)) == [one.name for one in STEPS]


def test_at_toy_size_a_step_runs_the_same_commands(tmp_path: Path) -> None:
    def kinds(commands: Sequence[Command]) -> list[tuple[str, ...]]:
        return [tuple(word for word in command[:6] if not word.startswith("--"))[:3] for command in commands]

    for one in STEPS:
        alike = next(other for other in STEPS if other.toy and kinds(other.commands) == kinds(one.commands))
        assert kinds(one.toy or alike.toy) == kinds(one.commands), one.name
    same = Step("same", 60, (python(WRITE, "{count}"),), (), "the cable", read=lambda folder: Reading("read", ""))
    (result,) = run(tmp_path, same, is_toy=True)
    assert result.outcome == "passed" and "another step" in result.note and not (tmp_path / "count").exists()


def test_the_computed_cluster_has_a_card_for_every_rank(tmp_path: Path) -> None:
    save_tiny_llama(tmp_path / "target", layers=24, vocab=300)
    save_tiny_llama(tmp_path / "draft", layers=1, vocab=300)
    for one in (one for one in STEPS if one.files):
        for files in (one.files, one.toy_files):
            (path := tmp_path / "cluster.yaml").write_text(files["cluster.yaml"].format(models=tmp_path, card="h100"))
            planned = plan(load_cluster(path), "all")
            assert planned.problems == () and planned.draft is not None
            assert files is one.toy_files or f"stages-{len(planned.stages)}" == one.name


def test_what_has_passed_is_not_run_again(tmp_path: Path) -> None:
    steps = step("first", python(WRITE, "{count}")), step("second", python(WRITE, "{count}"), python("raise SystemExit(1)"))
    outcomes = [[result.outcome for result in run(tmp_path, *steps)] for _ in range(2)]
    assert outcomes == [["passed", "failed"]] * 2
    assert (tmp_path / "count").read_text() == "xxx"
    run(tmp_path, *steps, only=["first"], again=["first"])
    assert (tmp_path / "count").read_text() == "xxxx"
    run(tmp_path, *steps, only=["first"], machine={"revision": "1", "GPUs": "another"})
    assert (tmp_path / "count").read_text() == "xxxxx"


def test_a_failure_ends_its_step_only(tmp_path: Path) -> None:
    steps = step("bad", python("print('no luck'); raise SystemExit(3)"), python(WRITE, "{count}")), step("good", python(""))
    bad, good = run(tmp_path, *steps)
    assert (bad.outcome, good.outcome) == ("failed", "passed")
    assert "ended with status 3" in bad.note and "the cable" in bad.note
    assert not (tmp_path / "count").exists()
    assert "no luck" in report(tmp_path) and "| good | passed |" in report(tmp_path)


def test_a_step_that_takes_too_long_is_ended_and_cleaned_up(tmp_path: Path) -> None:
    """Here it ends by Ctrl-C, so that it can say where it was."""
    hangs = python("import time\ntry: time.sleep(600)\nexcept KeyboardInterrupt: print('was asleep')")
    (result,) = run(tmp_path, step("hangs", hangs, limit_seconds=2, cleanup=(python(WRITE, "{count}"),)))
    assert result.outcome == "failed" and "took longer than 2 s" in result.note
    assert "was asleep" in report(tmp_path)
    assert (tmp_path / "count").read_text() == "x"


def test_when_the_day_is_over_other_steps_wait_for_the_next_run(tmp_path: Path) -> None:
    (result,) = run(tmp_path, step("late", python(WRITE, "{count}")), seconds=0)
    assert result.outcome == "not run" and not (tmp_path / "count").exists()
    assert [one.outcome for one in run(tmp_path, step("late", python("")))] == ["passed"]


def test_figures_stand_in_the_report_and_must_be_there(tmp_path: Path) -> None:
    def read(folder: Path) -> Reading:
        return Reading("fast", f"{json.loads((folder / 'rows.json').read_text())} ms")

    writes = python("import sys; open(sys.argv[1], 'w').write('12')", "{folder}/rows.json")
    passed, failed = run(tmp_path, step("measured", writes, read=read), step("silent", python(""), read=read))
    assert (passed.outcome, passed.note) == ("passed", "fast") and "12 ms" in report(tmp_path)
    assert failed.outcome == "failed" and "FileNotFoundError" in failed.note


def test_an_interrupted_step_is_run_by_the_next_day(tmp_path: Path) -> None:
    interrupts = python("import os, signal, sys; os.kill(os.getppid(), signal.SIGINT); sys.stdin.read(); signal.pause()")
    usual = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path, step("first", python("")), step("second", interrupts, cleanup=(python(WRITE, "{count}"),)))
    finally:
        signal.signal(signal.SIGINT, usual)
    assert (tmp_path / "count").read_text() == "x"
    assert "| first | passed |" in report(tmp_path) and "| second | not run |" in report(tmp_path)


def test_the_exit_status_says_whether_all_have_passed_and_there_is_a_gpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def ask() -> dict[str, object]:
        return {"gpus": 0, "card": "cpu", "shown": {"GPUs": "none"}}

    for status in (0, 1):
        steps = step("good", python("")), step("other", python(f"raise SystemExit({status})"))
        assert day.main(["--toy", "--device", "cpu", "--out", str(tmp_path / str(status))], steps, ask) == status
    assert day.main(["--out", str(tmp_path)], STEPS, ask) == 2
    assert "--toy --device cpu" in capsys.readouterr().err
    for arguments in (["--device", "cpu"], ["--only", "nothing"]):
        with pytest.raises(SystemExit) as refused:
            day.main(arguments, STEPS, ask)
        assert refused.value.code == 2
