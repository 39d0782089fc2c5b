"""Answers in several decode threads (APAR, PASTA). Knows token ids and texts; knows no model, process or Redis, and no torch."""

from pipedec.threads.dialect import DIALECTS, BoundDialect, Dialect, bind, load_dialect
from pipedec.threads.metrics import ThreadMetrics, measure
from pipedec.threads.sequence import (
    Anomaly,
    Context,
    DecodeThread,
    DocumentToken,
    NewSequence,
    ReorderBuffer,
    Sequence,
    Start,
    State,
    replay,
)
from pipedec.threads.threaded import ThreadedSequence

__all__ = [
    "DIALECTS", "Anomaly", "BoundDialect", "Context", "DecodeThread", "Dialect", "DocumentToken", "NewSequence",
    "ReorderBuffer", "Sequence", "Start", "State", "ThreadMetrics", "ThreadedSequence", "bind", "load_dialect", "measure",
    "replay",
]  # fmt: skip
