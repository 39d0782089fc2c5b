"""``make gpu-day``: all that a GPU has to show, one step after the other within 51 minutes, and a report.

Owns order, deadlines, results and the report. Steps that have passed are not run again for the same revision on the same machine,
so that a day that was interrupted, or that had a failure, goes on where it stopped. Knows no step (``day_steps``) and no figures
(``day_figures``). It loads no torch and makes no CUDA context: what it must know of the GPUs another process tells.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from day_figures import LOG, Reading, table, tail
from day_steps import STEPS, Step

ROOT = Path(__file__).resolve().parents[2]
DAY_SECONDS = 50 * 60.0  # of all commands; a minute is left to clean up
CLEANUP_SECONDS = 20.0
_FACTS_SECONDS = 120.0
_END_SECONDS = 10.0  # from Ctrl-C to the end of a command that has taken too long
RESULT = "result.json"
FINAL = "passed"  # such a step is not run again

FACTS = """
import json, platform, torch
from importlib.metadata import PackageNotFoundError, version
from benchmarks.kernels.layers import DATA_SHEETS, driver
from pipedec.bench.record import machine
has_gpu = torch.cuda.is_available()
names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())] if has_gpu else []
def installed(name):
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
print(json.dumps({
    "gpus": len(names), "card": DATA_SHEETS.get(names[0], "h100") if names else "cpu",
    "shown": {
        "GPUs": ", ".join(names) or "none",
        "GPU memory": ", ".join(f"{torch.cuda.mem_get_info(i)[1] / 1e9:.1f} GB" for i in range(len(names))) or "none",
        "compute capability": ", ".join("%d.%d" % torch.cuda.get_device_capability(i) for i in range(len(names))) or "none",
        "computed clock": "by the data sheet of " + (
            DATA_SHEETS[names[0]] if names and names[0] in DATA_SHEETS else "h100: this card has none" if names else "cpu"),
        "driver": driver() or "none", "CUDA of torch": torch.version.cuda or "none",
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())) if has_gpu else "none",
        "torch": torch.__version__, "flash-attn": installed("flash-attn"), "transformers": installed("transformers"),
        **{name: str(value) for name, value in machine().items() if name in ("cpu", "cores", "platform", "python")},
        "host": platform.node(),
    },
}))
"""
SMI = "nvidia-smi --format=csv --query-gpu=memory.free,power.limit,clocks.max.sm,clocks.max.mem,pcie.link.width.max,compute_mode"


@dataclass(frozen=True)
class Result:
    """What has become of a step."""

    name: str
    outcome: str  # ``passed``, ``failed``, or ``not run``, for want of time
    machine: Mapping[str, str]  # on which it ran
    seconds: float = 0.0
    note: str = ""  # for the overview
    text: str = ""  # its figures in Markdown
    date: str = ""


class Day:
    """A run of the steps, whose results are in a folder for every step beside ``report.md``.

    Results from another ``machine`` do not count. ``values`` are those of the placeholders of commands.
    """

    def __init__(
        self, folder: Path, steps: Sequence[Step], machine: Mapping[str, str], values: Mapping[str, str], is_toy: bool,
        seconds: float = DAY_SECONDS, remarks: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        self._folder = folder
        self._steps = steps
        self._machine = dict(machine)
        self._values = values
        self._is_toy = is_toy
        self._remarks = dict(remarks or {})
        self._ends_at = time.monotonic() + seconds

    def run(self, only: Sequence[str] = (), again: Sequence[str] = ()) -> list[Result]:
        """Run the steps named in ``only``, by default all, that have not passed yet or are named in ``again``.

        The report, of all steps, is written after each.
        """
        results = {step.name: self._known(step) for step in self._steps}
        wanted = [step for step in self._steps if step.name in (only or results)]
        with state_directory() as environment:
            for step in wanted:
                if results[step.name].outcome == FINAL and step.name not in again:
                    print(f"{step.name}: has passed before", flush=True)
                    continue
                results[step.name] = result = self._run_step(step, environment)
                print(f"{step.name}: {result.outcome}, {result.seconds:.0f} s. {result.note}", flush=True)
                self._write_report(results.values())
        self._write_report(results.values())
        return [results[step.name] for step in wanted]

    @property
    def report(self) -> Path:
        return self._folder / "report.md"

    def _known(self, step: Step) -> Result:
        """What an earlier run on this machine has found."""
        with suppress(OSError, ValueError, TypeError):
            found = Result(**json.loads((self._folder / step.name / RESULT).read_text()))
            if found.machine == self._machine:
                return found
        return Result(step.name, "not run", self._machine)

    def _run_step(self, step: Step, environment: Mapping[str, str]) -> Result:
        if not self._lines(step):
            return Result(step.name, FINAL, self._machine, note="nothing at toy size: another step runs the same commands")
        seconds = min(step.limit_seconds, self._ends_at - time.monotonic())
        if seconds <= 0:
            return Result(step.name, "not run", self._machine, note="the time for all steps is over: run it again to go on")
        folder = self._folder / step.name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        print(f"{step.name} (at most {seconds:.0f} s) ...", flush=True)
        values = {**self._values, "folder": str(folder)}

        def filled(line: Sequence[str]) -> list[str]:
            return [word.format(**values) for word in line]

        for name, text in (step.toy_files if self._is_toy else step.files).items():
            (folder / name).write_text(text.format(**values))
        began = time.monotonic()
        try:
            with (folder / LOG).open("w") as log:
                problem = run_commands([filled(line) for line in self._lines(step)], log, seconds, environment)
        finally:
            with (folder / "cleanup.txt").open("w") as log:
                for line in step.cleanup:
                    run_command(filled(line), log, CLEANUP_SECONDS, environment)
        reading = Reading("", "")
        try:
            reading = step.read(folder)
        except Exception as error:  # figures of a step that has passed must be there
            problem = problem or f"its figures cannot be read: {type(error).__name__}: {error}"
        note = "; ".join(part for part in (problem, reading.note, f"look at: {step.if_fails}" if problem else "") if part)
        text = reading.text if problem is None else f"{reading.text}\n\n```text\n{tail(folder / LOG)}\n```"
        result = Result(
            step.name, FINAL if problem is None else "failed", self._machine, time.monotonic() - began, note, text, now()
        )
        write(folder / RESULT, json.dumps(asdict(result), indent=1))
        return result

    def _lines(self, step: Step) -> Sequence[Sequence[str]]:
        return step.toy if self._is_toy else step.commands

    def _write_report(self, results: Iterable[Result]) -> None:
        shown = list(results)
        overview = [(result.name, result.outcome, f"{result.seconds:.0f}", result.note) for result in shown]
        parts = [
            f"# GPU day{', at toy size' if self._is_toy else ''}",
            f"Written {now()}. Logs are beside this file, in a folder for each step.",
            table(("machine", ""), (self._machine | self._remarks).items()),
            table(("step", "result", "s", "what to look at"), overview),
            *(f"## {result.name}: {result.outcome}\n\n{result.text.strip()}" for result in shown if result.text.strip()),
        ]
        write(self.report, "\n\n".join(parts) + "\n")


def run_commands(lines: Sequence[Sequence[str]], log: IO[str], seconds: float, environment: Mapping[str, str]) -> str | None:
    """Run them in turn until one fails or the time is over. Returns what went wrong."""
    ends_at = time.monotonic() + seconds
    for line in lines:
        status = run_command(line, log, ends_at - time.monotonic(), environment)
        if status != 0:
            what = f"took longer than {seconds:.0f} s" if status is None else f"ended with status {status}"
            return f"`{shlex.join([Path(line[0]).name, *line[1:]])}` {what}"
    return None


def run_command(line: Sequence[str], log: IO[str], seconds: float, environment: Mapping[str, str]) -> int | None:
    """Its exit status; None if it was ended because it took longer."""
    print(f"$ {shlex.join(line)}", file=log, flush=True)
    process = subprocess.Popen(
        line, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT, env={**os.environ, **environment},
        start_new_session=True,
    )  # fmt: skip
    try:
        return process.wait(max(0.0, seconds))
    except subprocess.TimeoutExpired:
        return None
    finally:
        end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    """As Ctrl-C does, so that it says where it was and ends what it has started; if that does not help, at once."""
    for number in (signal.SIGINT, signal.SIGKILL):
        if process.poll() is not None:
            return
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_END_SECONDS)


@contextmanager
def state_directory() -> Iterator[dict[str, str]]:
    """The environment of all commands: clusters of their own, which no other cluster of this user meets."""
    with tempfile.TemporaryDirectory(prefix="gpu-day-", ignore_cleanup_errors=True) as directory:
        threads = os.environ.get("OMP_NUM_THREADS", "1")
        own = {"PIPEDEC_STATE_DIR": directory, "PIPEDEC_TARGET": "reference-pair"}
        yield {**own, "OMP_NUM_THREADS": threads, "COLUMNS": "140", "PYTHONUNBUFFERED": "1"}


def write(path: Path, text: str) -> None:
    """As a whole or not at all."""
    partial = path.with_suffix(".partial")
    partial.write_text(text)
    partial.replace(path)


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def revision() -> str:
    """The commit of this checkout, and a digest of what differs from it; ``unknown`` without git."""
    try:
        commit, changes = (
            subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, check=True).stdout
            for arguments in (("rev-parse", "--short=12", "HEAD"), ("diff", "HEAD"))
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    name = commit.decode().strip()
    return f"{name}-changed-{hashlib.sha256(changes).hexdigest()[:8]}" if changes else name


def facts() -> dict[str, Any]:
    """Of the machine. Raises SystemExit if torch does not work here."""
    done = subprocess.run(
        [sys.executable, "-c", FACTS], cwd=ROOT, capture_output=True, text=True, timeout=_FACTS_SECONDS, check=False
    )
    if done.returncode != 0:
        sys.exit(f"gpu-day: torch cannot be asked what this machine has: {done.stderr.strip().splitlines()[-1]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def remarks() -> dict[str, str]:
    """What the driver says of the GPUs, which may change from hour to hour."""
    if shutil.which("nvidia-smi") is None:
        return {}
    smi = subprocess.run(SMI.split(), capture_output=True, text=True, timeout=_FACTS_SECONDS, check=False)
    return {"nvidia-smi": "; ".join((smi.stdout or smi.stderr).splitlines())}


def _names(text: str) -> list[str]:
    return text.split(",")


def main(
    arguments: Sequence[str] | None = None, steps: Sequence[Step] = STEPS, ask: Callable[[], Mapping[str, Any]] = facts
) -> int:
    """Returns 0 if all steps have passed, 1 if one failed or was not run, 2 if there is no GPU, 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(prog="make gpu-day GPU_DAY_ARGS=…", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "gpu-day", help="directory of the results, by revision")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--toy", action="store_true", help="every step at toy size")
    parser.add_argument("--only", type=_names, default=(), metavar="NAME,…", help="these steps only")
    parser.add_argument("--again", type=_names, default=(), metavar="NAME,…", help="run these also if they have passed")
    given = parser.parse_args(arguments)
    if given.device == "cpu" and not given.toy:
        parser.error("on the CPU give --toy: the steps themselves need a GPU")
    known = [step.name for step in steps]
    if unknown := [name for name in (*given.only, *given.again) if name not in known]:
        parser.error(f"there is no step {unknown[0]!r}: choose from {', '.join(known)}")
    found, at = ask(), revision()
    if given.device == "cuda" and not found["gpus"]:
        print("gpu-day: torch sees no GPU here; --toy --device cpu runs every step at toy size", file=sys.stderr)
        return 2
    values = {
        "python": sys.executable, "pipedec": str(Path(sys.executable).parent / "pipedec"), "device": given.device,
        "card": found["card"] if given.device == "cuda" else "cpu",
        "models": str(ROOT / "models" / "pipedec_models" / "reference_pair"),
    }  # fmt: skip
    folder = (given.out / f"{at}-{given.device}{'-toy' * given.toy}").resolve()
    day = Day(folder, steps, {"revision": at, **found["shown"]}, values, given.toy, remarks=remarks())
    try:
        results = day.run(given.only, given.again)
    except KeyboardInterrupt:
        print(f"gpu-day: interrupted: run it again to go on; so far: {day.report}", file=sys.stderr)
        return 130
    bad = [result.name for result in results if result.outcome != FINAL]
    failed = f": not {', '.join(bad)}" if bad else ""
    print(f"{len(results) - len(bad)} of {len(results)} steps have passed{failed}: {day.report}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
