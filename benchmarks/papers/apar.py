"""The experiments of the APAR paper."""

from __future__ import annotations

from benchmarks.papers.experiment import Absent, Experiment

TITLE = "The APAR paper"
ABOUT = ""
ENTRIES: tuple[Experiment | Absent, ...] = ()
