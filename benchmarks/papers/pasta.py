"""The experiments of the PASTA paper."""

from __future__ import annotations

from benchmarks.papers.experiment import Absent, Experiment

TITLE = "The PASTA paper"
ABOUT = ""
ENTRIES: tuple[Experiment | Absent, ...] = ()
