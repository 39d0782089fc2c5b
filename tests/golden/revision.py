"""Make the record of another revision: with its own recorder, in a temporary working tree."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from golden.record import Cases, read

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = Path("tests") / "golden"
SECONDS = 1800.0


class NoRecord(Exception):
    """One line: the revision does not exist, or cannot make a record."""


@contextmanager
def worktree(revision: str, root: Path = ROOT) -> Iterator[Path]:
    """The files of a revision, which are gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="golden-") as directory:
        tree = Path(directory) / "tree"
        try:
            _git(root, "worktree", "add", "--quiet", "--detach", str(tree), revision)
            yield tree
        finally:
            subprocess.run(["git", "-C", root, "worktree", "remove", "--force", tree], capture_output=True)


def parts_of(tree: Path, parts: Sequence[str]) -> tuple[str, ...]:
    """Those of ``parts`` that the revision can make."""
    if not (tree / GOLDEN / "__main__.py").exists():
        raise NoRecord(f"the revision has no {GOLDEN}: it was made before there was a record")
    return tuple(part for part in parts if (tree / GOLDEN / f"{part}.py").exists())


def made_in(tree: Path, parts: Sequence[str], folder: Path) -> dict[str, Cases]:
    """The records of the files in ``tree``, by its own recorder, which writes them to ``folder``."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(tree / "tests"), str(tree)))}
    command = [sys.executable, "-m", "golden", "--into", str(folder), *parts]
    if subprocess.run(command, cwd=tree, env=environment, timeout=SECONDS, stdout=subprocess.DEVNULL).returncode:
        raise NoRecord(f"the recorder of {tree} has failed")
    return {part: read(part, folder) for part in parts}


def _git(root: Path, *arguments: str) -> None:
    done = subprocess.run(["git", "-C", root, *arguments], capture_output=True, text=True)
    if done.returncode:
        raise NoRecord(done.stderr.strip().splitlines()[-1])
