"""The experiments of the BITA paper."""

from __future__ import annotations

from benchmarks.papers.experiment import Absent, Experiment

TITLE = "The BITA paper"
ABOUT = ""
ENTRIES: tuple[Experiment | Absent, ...] = ()
