"""``pipedec doctor``: what can go wrong on this host, or on the hosts of a cluster.yaml, and what to do about it."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pipedec.cli.options import Json
from pipedec.cli.show import console as progress
from pipedec.cluster.doctor.comparison import compare
from pipedec.cluster.doctor.findings import Finding, Level
from pipedec.cluster.doctor.host import HostDoctor, Questions
from pipedec.cluster.survey import Survey
from pipedec.config import load_cluster
from pipedec.config.redis import redis_config
from pipedec.core.errors import PipedecError, UserError
from pipedec.flags import Help, own_options

Findings = Mapping[str, Finding]  # by name

_STYLES = {"ok": "", "note": "yellow", "problem": "bold red"}
_MARKS = {"ok": "", "note": "! ", "problem": "✗ "}
_NAME_WIDTH = 28
_PAPER = 100  # columns of a table that is not printed to a terminal


@click.command()
@own_options
def doctor(
    cluster: Annotated[Path | None, Help("Examine all hosts of a cluster.yaml over ssh.", "FILE")] = None,
    partition: Annotated[
        str | None, Help("With --cluster: partition to check the hosts for (default: the default of the file).", "NAME")
    ] = None,
    as_json: Json = False,
) -> None:
    """Examine this host: packages, GPUs, network, memory, Redis, directories, programs.

    With --cluster, examine the hosts of the file side by side, compare them with each other, with the file and with the plan of
    a partition: free memory, parts of checkpoints, links between hosts, which are measured. Pairs of GPUs that will use NCCL send
    each other a message. Every problem comes with its mend.
    Exits with status 1 if something prevents a start.
    """
    if partition is not None and cluster is None:
        raise UserError("--partition needs the file: give --cluster cluster.yaml, too")
    if cluster is None:
        redis_url = redis_config().connection_url
        with progress.status("Examining this host"):
            report = HostDoctor().examine(Questions(redis_url, starts_redis=redis_url is None))
        table: Mapping[str, Findings] = {socket.gethostname(): {finding.name: finding for finding in report.findings}}
    else:
        config = load_cluster(cluster)
        with progress.status(f"Examining {len(config.servers)} hosts"), Survey(config, partition) as survey:
            table = compare(config, survey.answers(), survey.unplanned)
    if as_json:
        print(json.dumps({host: [asdict(finding) for finding in findings.values()] for host, findings in table.items()}))
    else:
        show(table, Console(width=None if Console().is_terminal else _PAPER, highlight=False))
    if ill := [host for host, findings in table.items() if any(one.level == "problem" for one in findings.values())]:
        raise PipedecError(f"there are problems on {', '.join(ill)}")


def show(table: Mapping[str, Findings], console: Console) -> None:
    """Print a column per host, a row per finding, and then what to do."""
    shown = Table(box=None, padding=(0, 2, 0, 0))
    shown.add_column("", overflow="fold", max_width=_NAME_WIDTH)
    for host in table:
        shown.add_column(host, overflow="fold")
    for name in dict.fromkeys(name for findings in table.values() for name in findings):
        cells = [name]
        for finding in (findings.get(name) for findings in table.values()):
            text = "" if finding is None else escape(_MARKS[finding.level] + finding.value)
            style = "" if finding is None else _STYLES[finding.level]
            cells.append(f"[{style}]{text}[/]" if style else text)
        shown.add_row(*cells)
    console.print(shown)
    mends: dict[tuple[Level, str, str], list[str]] = {}  # with the hosts on which they are to be done
    for host, findings in table.items():
        for finding in findings.values():
            if finding.mend is not None:
                mends.setdefault((finding.level, finding.name, finding.mend), []).append(host)
    for (level, name, mend), hosts in mends.items():
        line = f"{_MARKS[level]}{', '.join(hosts)}: {name}: {mend}"
        console.print(line, style=_STYLES[level], markup=False, soft_wrap=True)
    levels = [finding.level for findings in table.values() for finding in findings.values()]
    counts = {"host": len(table), "problem": levels.count("problem"), "note": levels.count("note")}
    console.print(", ".join(f"{count} {noun}{'s' if count != 1 else ''}" for noun, count in counts.items()))
