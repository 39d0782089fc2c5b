"""``python -m golden``: makes the record, compares with it, or compares two revisions."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import click

from golden.record import PARTS, RECORDS, REPORT, differences, is_of_another_processor, make, read, write
from golden.revision import ROOT, NoRecord, made_in, parts_of, worktree


@click.command(no_args_is_help=False)
@click.argument("parts", nargs=-1, type=click.Choice(PARTS))
@click.option("--check", is_flag=True, help="Only compare with the files; exit with 1 if anything differs.")
@click.option("--against", metavar="REVISION", help="Make REVISION's record as well, on this machine, and compare with that.")
@click.option("--into", type=click.Path(file_okay=False, path_type=Path), default=RECORDS, help="Write to another folder.")
def main(parts: tuple[str, ...], check: bool, against: str | None, into: Path) -> None:
    """Make the record of behaviour, or some PARTS of it, and say what has changed."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that what is temporary goes
    os.environ["PIPEDEC_TARGET"] = "reference-pair"  # of answers without --target
    chosen = parts or PARTS
    if against is not None:
        found = differences_from(against, chosen)
    else:
        found = [line for part in chosen for line in made(part, into, is_kept=not check)]
    for line in found:
        print(line)
    sys.exit(bool(found) and (check or against is not None))


def made(part: str, folder: Path, is_kept: bool) -> list[str]:
    """Makes a part, and writes it if it ``is_kept``; what differs from the file."""
    with tempfile.TemporaryDirectory(prefix="golden-") as scratch:
        cases = make(part, Path(scratch))
    recorded = read(part, folder)
    found, is_elsewhere = differences(part, recorded, cases), is_of_another_processor(recorded, cases)
    for name in (name for name in cases if name.startswith(REPORT)):
        print(f"{part}, {name}: {cases[name]}")
    if is_kept and (found or is_elsewhere):
        write(part, cases, folder)
    elif is_elsewhere:
        print(f"{part}: cases that another kind of processor rounds otherwise are not compared", file=sys.stderr)
    return found


def differences_from(revision: str, parts: Sequence[str]) -> list[str]:
    """Make the record of ``revision`` and of this tree, on this machine, and return how they differ."""
    try:
        with worktree(revision) as tree, tempfile.TemporaryDirectory(prefix="golden-") as scratch:
            shared = parts_of(tree, parts)
            for part in sorted({*parts} - {*shared}):
                print(f"{revision} has no part {part}")
            theirs = made_in(tree, shared, Path(scratch) / "theirs")
            ours = made_in(ROOT, shared, Path(scratch) / "ours")
    except NoRecord as why:
        sys.exit(f"Error: {why}")
    return [line for part in shared for line in differences(part, theirs[part], ours[part])]


if __name__ == "__main__":
    main()
