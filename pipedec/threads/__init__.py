"""Answers in several decode threads (APAR, PASTA). Knows token ids and texts; knows no model, no process, no Redis.

Importing this package does not import torch.
"""

from pipedec.threads.dialect import DIALECTS, NO_DIALECT, BoundDialect, Dialect, bind, load_dialect
from pipedec.threads.metrics import ThreadMetrics, measure
from pipedec.threads.sequence import DocumentToken, NewSequence, ReorderBuffer, Sequence, replay
from pipedec.threads.thread import Anomaly, Context, DecodeThread, Start, State
from pipedec.threads.threaded import ThreadedSequence

__all__ = [
    "DIALECTS", "NO_DIALECT", "Anomaly", "BoundDialect", "Context", "DecodeThread", "Dialect", "DocumentToken", "NewSequence",
    "ReorderBuffer", "Sequence", "Start", "State", "ThreadMetrics", "ThreadedSequence", "bind", "load_dialect", "measure",
    "replay",
]  # fmt: skip
