"""``python -m support.one_process < LINES`` runs command lines of the program and of modules in one process, one after the other.

Importing torch takes longer than most commands at toy size do, so it happens once, and ranks come from one fork server. A line is
``pipedec …`` or ``python -m MODULE …``, as a shell would read it; ``> FILE`` at its end takes what it prints. Each line is
printed before it runs, with the seconds it took afterwards. The first one that fails ends the run with its exit status.

A line that begins with ``K:`` is of quarter K: with a quarter as an argument, those of the others are left out.
"""

from __future__ import annotations

import os
import runpy
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from pipedec.cli.main import main as pipedec


def run(words: Sequence[str]) -> int:
    """The exit status of one command line."""
    usual = sys.argv
    try:
        if words[0] == "pipedec":
            sys.argv = list(words)
            pipedec()
        else:
            assert tuple(words[:2]) == ("python", "-m"), words
            sys.argv = list(words[2:])
            runpy.run_module(words[2], run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    finally:
        sys.argv = usual
    return 0


@contextmanager
def printing_to(file: str | None) -> Iterator[None]:
    """What this process and its children print goes to ``file``; where it always goes without one."""
    sys.stdout.flush()
    if file is None:
        yield
        return
    usual = os.dup(1)
    with open(file, "wb") as out:
        os.dup2(out.fileno(), 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(usual, 1)
        os.close(usual)


def main() -> None:
    quarters = [f"{quarter}:" for quarter in sys.argv[1:] or "0123"]
    for line in sys.stdin:
        words = shlex.split(line, comments=True)
        if words and words[0].endswith(":"):
            words = words[1:] if words[0] in quarters else []
        if not words:
            continue
        file = words[-1] if words[-2:-1] == [">"] else None
        print(f"$ {line.strip()}", flush=True)
        began = time.monotonic()
        with printing_to(file):
            status = run(words[:-2] if file else words)
        if status:
            sys.exit(status)
        print(f"  {time.monotonic() - began:.1f} s", flush=True)


if __name__ == "__main__":
    main()
