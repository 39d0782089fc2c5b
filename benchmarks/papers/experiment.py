"""An experiment of a paper: the commands that measure it, and the tables that its page shows.

Owns what an experiment is, where one writes, and the file that keeps its result. It knows neither the papers nor their pages.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from benchmarks.output import console
from benchmarks.papers.prompts import described, find_prompts
from pipedec.bench.record import header, key_of
from pipedec.cluster.processes import die_with_parent
from pipedec.core.errors import PipedecError

CHECKOUT = Path(__file__).resolve().parent.parent.parent
Words = list[str]  # a command line after ``python -m``


class Table(Struct, frozen=True):
    """A table of a page; ``note`` is a sentence below it."""

    columns: tuple[str, ...]
    rows: list[list[str]]
    title: str = ""
    note: str = ""


class Result(Struct, frozen=True):
    """The result of an experiment, as its file keeps it. ``asked`` identifies what was asked for: an equal one is a result."""

    name: str
    asked: str
    size: Literal["laptop", "full"]
    prompts: str  # which prompts were answered
    place: str  # the emulated or real cluster
    revision: str
    machine: str
    commands: list[str]
    tables: list[Table]


@dataclass(frozen=True)
class Place:
    """Where experiments measure and write, and which prompts are asked.

    Attributes:
        out: directory of everything that is written; a second run goes on from there.
        data: directory of the papers' data sets (docs/papers/data.md); None for questions about Python's library.
        full: the papers' numbers of prompts and tokens, instead of some that a laptop manages.
        cluster: flags of ``pipedec bench sweep`` that name a real cluster; empty to emulate the papers'.
    """

    out: Path
    data: Path | None = None
    full: bool = False
    cluster: tuple[str, ...] = ()

    @property
    def size(self) -> Literal["laptop", "full"]:
        return "full" if self.full else "laptop"

    def size_flags(self, laptop: int = 1, full: int = 10, tokens: int = 48) -> Words:
        """``--samples`` and ``--max-tokens``: prompts of each set, and tokens of an answer (512 in full)."""
        return ["--samples", str(full if self.full else laptop), "--max-tokens", str(512 if self.full else tokens)]

    def directory(self, name: str) -> Path:
        """The directory of the rows of an experiment, or of several that share them."""
        return self.out / "rows" / name

    def prompts(self, *sets: str) -> Words:
        """``--prompts`` flags of the named sets. Raises UserError if ``data`` has none of them."""
        return [word for source in find_prompts(self.data, sets, self.out) for word in ("--prompts", source)]

    def sweep(self, name: str, *flags: str, presets: Sequence[str] = ("paper-14",)) -> Words:
        """``pipedec bench sweep`` into ``directory(name)``: on a real cluster, or in computed time on emulated ones.

        Rank 0's own work does not count in computed time, so that any machine repeats the figures.
        """
        computed = ["--preset", ",".join(presets), "--clock", "computed", "--no-own-work"]
        where = list(self.cluster) if self.cluster else computed
        return ["pipedec", "bench", "sweep", *where, *flags, "--out", str(self.directory(name))]


@dataclass(frozen=True)
class Experiment:
    """One figure or table of a paper.

    Attributes:
        name: on the command line, such as ``pipedec-fig3``.
        title: the paper's number and subject.
        differs: what is emulated or otherwise not as in the paper, and why; Markdown.
        commands: the command lines that measure it; each resumes what was interrupted.
        tables: its tables, from what the commands wrote.
        trains: whether the commands train models, for hours: only for the asking.
        real: whether it can also measure a real cluster.
        place: where it measures otherwise.
    """

    name: str
    title: str
    differs: str
    commands: Callable[[Place], list[Words]]
    tables: Callable[[Place], list[Table]]
    trains: bool = False
    real: bool = False
    place: str = "emulated"


@dataclass(frozen=True)
class Absent:
    """A figure or table that no command repeats, and why; or where else it is."""

    name: str
    title: str
    reason: str


def measured(experiment: Experiment, place: Place) -> Result:
    """The result of an experiment, which ``place`` keeps; known ones are read. Raises PipedecError if a command fails."""
    commands = [*experiment.commands(place)]
    roots = {f"{place.out}/": "", f"{place.data}/": "DATA/", f"{CHECKOUT}/": ""}
    shown = [reduce(lambda line, root: line.replace(root, roots[root]), roots, " ".join(words)) for words in commands]
    asked = key_of([experiment.name, place.size, shown])
    kept = place.out / "results" / f"{experiment.name}.json"
    if kept.is_file() and (found := read_result(kept)).asked == asked:
        return found
    for number, words in enumerate(commands, start=1):
        done = place.out / "done" / key_of([place.size, shown[number - 1]])  # perhaps by an experiment that shares the rows
        if not done.is_file():
            console.print(f"{experiment.name}, {number} of {len(commands)}: {shown[number - 1]}", markup=False, soft_wrap=True)
            run(words, place.out / "logs" / f"{experiment.name}-{number}.txt")
            done.parent.mkdir(exist_ok=True)
            done.touch()
    made = header("papers", {})
    result = Result(
        experiment.name, asked, place.size, described(shown), " ".join(place.cluster) or experiment.place, made["revision"],
        f"{made['machine']['cpu']}, {made['machine']['cores']} cores", shown, experiment.tables(place),
    )  # fmt: skip
    write_result(kept, result)
    return result


def run(words: Words, log: Path) -> None:
    """Run one command line as a process that ends with this one; ``log`` gets what it prints. Raises PipedecError if it fails."""
    log.parent.mkdir(parents=True, exist_ok=True)
    program = ["pipedec.cli", *words[1:]] if words[0] == "pipedec" else words
    with log.open("w", encoding="utf-8") as file:
        ended = subprocess.run([sys.executable, "-m", *program], stdout=file, check=False, preexec_fn=die_with_parent)
    if ended.returncode:
        raise PipedecError(
            f"{words[0]} ended with status {ended.returncode}: mend what it reports and run this again (log: {log})"
        )


def read_result(path: Path) -> Result:
    """The result in a file. Raises PipedecError if it is unsound."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Result)
    except (OSError, msgspec.MsgspecError) as error:
        raise PipedecError(f"{path} is no result of an experiment ({error}): remove it") from None


def write_result(path: Path, result: Result) -> None:
    """Write a result as a whole, or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    text = msgspec.json.format(msgspec.json.encode(result), indent=1).decode()
    text = re.sub(r"\[\n[^\[\]]+\n +\]", lambda row: re.sub(r"\n +", " ", row[0]), text)  # the cells of a row in one line
    partial.write_text(text + "\n", encoding="utf-8")
    partial.replace(path)
