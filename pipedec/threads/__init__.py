"""Answers in several decode threads (APAR, PASTA). Knows token ids and texts; knows no model, no process, no Redis.

Importing this package does not import torch.
"""

from pipedec.threads.anomalies import ANOMALIES
from pipedec.threads.bound import NO_DIALECT, BoundDialect, bind
from pipedec.threads.dialect import DIALECTS, Dialect, load_dialect
from pipedec.threads.document import DocumentToken, ReorderBuffer
from pipedec.threads.events import Event, Finished, Joined, ThreadEnded, ThreadOpened, Waiting
from pipedec.threads.metrics import ThreadMetrics, measure
from pipedec.threads.replay import replay
from pipedec.threads.sequence import NewSequence, Sequence
from pipedec.threads.thread import Context, DecodeThread, State
from pipedec.threads.threaded import ThreadedSequence

__all__ = [
    "ANOMALIES",
    "DIALECTS",
    "NO_DIALECT",
    "BoundDialect",
    "Context",
    "DecodeThread",
    "Dialect",
    "DocumentToken",
    "Event",
    "Finished",
    "Joined",
    "NewSequence",
    "ReorderBuffer",
    "Sequence",
    "State",
    "ThreadEnded",
    "ThreadMetrics",
    "ThreadOpened",
    "ThreadedSequence",
    "Waiting",
    "bind",
    "load_dialect",
    "measure",
    "replay",
]  # fmt: skip
