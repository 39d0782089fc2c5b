"""``python -m benchmarks.papers``: the figures and tables of PipeDec, BiTA, APAR and PASTA, each by its name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import click

from benchmarks.output import check_known
from benchmarks.papers import apar, bita, pasta, pipedec
from benchmarks.papers.experiment import CHECKOUT, Absent, Experiment, Place, Result, measured, read_result, write_result
from benchmarks.papers.pages import page
from pipedec.cli.benchmarks.shared import make_directory, print_files
from pipedec.cli.options import RunningFlags, running_options
from pipedec.core.errors import UserError
from pipedec.flags import Help, options_of, own_options, run_command

ALL = "all"
PAPERS = {"pipedec": pipedec, "bita": bita, "apar": apar, "pasta": pasta}
ENTRIES: dict[str, Sequence[Experiment | Absent]] = {name: module.ENTRIES for name, module in PAPERS.items()}
EXPERIMENTS = {one.name: one for entries in ENTRIES.values() for one in entries if isinstance(one, Experiment)}
ABSENT = {one.name: one for entries in ENTRIES.values() for one in entries if isinstance(one, Absent)}
SHIPPED, DOCS = Path(__file__).parent / "results", CHECKOUT / "docs" / "papers"


@dataclass(frozen=True)
class ClusterFlags:
    """The cluster.yaml whose partitions are launched and measured."""

    launch: Annotated[Path | None, Help("Measure the partitions of this cluster.yaml on their hosts.", "FILE")] = None
    partitions: Annotated[tuple[str, ...], Help("With --launch: the partitions, like p7,p14,p21.")] = ()

    def words(self, running: RunningFlags) -> tuple[str, ...]:
        """Flags of ``pipedec bench sweep`` for the real cluster that is named; none if there is none."""
        if self.launch is not None:
            named = ("--partitions", ",".join(self.partitions)) if self.partitions else ()
            return ("--launch", str(self.launch), *named)
        if self.partitions:
            raise UserError("--partitions goes with --launch FILE")
        if not running.are_given:
            return ()
        given = {"--redis": running.redis, "--run": running.run}
        return ("--running", *(word for flag, value in given.items() if value for word in (flag, value)))


@click.command()
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@running_options
@options_of(ClusterFlags, "launching")
@own_options
def papers(
    names: tuple[str, ...],
    place: RunningFlags,
    launching: ClusterFlags,
    out: Annotated[Path, Help("Directory of rows, results and pages; a second run goes on from there.", "DIR")] = Path("papers"),
    data: Annotated[
        Path | None,
        Help(
            "Directory of the papers' data sets, as docs/papers/data.md lays it out (default: questions about Python's library).",
            "DIR",
        ),
    ] = None,
    full: Annotated[bool, Help("The papers' numbers of prompts and tokens, instead of a laptop's.")] = False,
    train: Annotated[bool, Help("With `all` or a paper: also experiments that train models, for hours.")] = False,
    ship: Annotated[bool, Help("Write results and pages into this checkout, too.")] = False,
) -> None:
    """Repeat figures and tables of the papers by NAME, such as pipedec-fig3: one, several, those of a paper, or `all`.

    `list` prints the names. Times are computed for the papers' clusters, unless --redis, --run or --running names a cluster
    that is running, or --launch one to start. What OUT already has is not measured again. Afterwards OUT/PAPER.md shows each
    figure of the paper beside ours.
    """
    if names == ("list",):
        for entry in (one for entries in ENTRIES.values() for one in entries):
            absent = "  (no command)" if isinstance(entry, Absent) else "  (trains)" if entry.trains else ""
            click.echo(f"{entry.name:24} {entry.title}{absent}")
        return
    chosen = _chosen(names, train)
    where = Place(out.absolute(), data, full, launching.words(place))
    if where.cluster and (computed := [one.name for one in chosen if not one.real]):
        raise UserError(f"{', '.join(computed)}: these do not measure a real cluster: leave them, or the cluster's flags, out")
    make_directory(where.out)
    for experiment in chosen:
        experiment.commands(where)  # raises, before anything is measured, if prompts are missing
    for experiment in chosen:
        result = measured(experiment, where)
        if ship:
            write_result(SHIPPED / f"{experiment.name}.json", result)
    print_files(
        *(path for directory in (where.out, DOCS) if directory == where.out or ship for path in _pages(directory, where.out))
    )


def _chosen(names: Sequence[str], train: bool) -> list[Experiment]:
    """The experiments of these names, each once. Raises UserError for an unknown name, or one that no command repeats."""
    chosen: dict[str, Experiment] = {}
    for name in names:
        if name in ABSENT:
            raise UserError(f"{name}: {ABSENT[name].reason}")
        check_known("experiment", name, [ALL, *PAPERS, *EXPERIMENTS])
        if name in EXPERIMENTS:
            chosen[name] = EXPERIMENTS[name]
            continue
        entries = [one for paper in (PAPERS if name == ALL else (name,)) for one in ENTRIES[paper]]
        chosen |= {one.name: one for one in entries if isinstance(one, Experiment) and (train or not one.trains)}
    return list(chosen.values())


def _pages(directory: Path, out: Path) -> list[Path]:
    """Write the page of each paper: from the results of ``out``, and those that ship where it has none."""
    results: dict[str, Result] = {}
    for source in (SHIPPED, out / "results"):
        results |= {path.stem: read_result(path) for path in sorted(source.glob("*.json"))}
    return [_page(name, directory, results) for name in PAPERS]


def _page(name: str, directory: Path, results: Mapping[str, Result]) -> Path:
    path = directory / f"{name}.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(PAPERS[name].TITLE, PAPERS[name].ABOUT, ENTRIES[name], results), encoding="utf-8")

    return path


if __name__ == "__main__":
    run_command(papers)
