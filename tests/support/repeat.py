"""``python -m support.repeat N COMMAND…`` runs tests N times beside two busy loops, and prints which failed and how often.

Tests that start processes wait for each other; one that fails only now and then fails sooner where the processor is taken.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

LOOPS = 2
LOOP = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: pass"  # ends with whoever started it
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+(?:\[.*?\])?)", re.MULTILINE)


@contextmanager
def busy() -> Iterator[None]:
    """As many processes as the machine of the tests has cores do nothing else than compute."""
    loops = [subprocess.Popen([sys.executable, "-c", LOOP]) for _ in range(LOOPS)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def main(count: str, *command: str) -> int:
    """Returns 1 if a test failed in one of the runs or ``count`` is no number, and 2 if a run could not be made."""
    if not count.isdecimal():
        sys.exit(f"N={count}: give a number of runs")
    failed: Counter[str] = Counter()
    with busy():
        for number in range(int(count)):
            print(f"Run {number + 1} of {count}", flush=True)
            status, output = run([*command, "-rfE"])
            failed.update(set(FAILED.findall(output)))
            if status not in (0, 1):  # neither passed nor failed
                return 2
    for name, times in failed.most_common():
        print(f"{times} of {count}  {name}")
    print(f"{len(failed)} tests failed in {count} runs beside {LOOPS} busy loops")
    return int(bool(failed))


def run(command: Sequence[str]) -> tuple[int, str]:
    """Its exit status, and its output, which is shown as it comes."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        print(line, end="", flush=True)
        lines.append(line)
    return process.wait(), "".join(lines)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
