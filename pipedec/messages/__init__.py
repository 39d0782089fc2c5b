"""Messages between processes as JSON, through Redis and in the heads of stage messages: requests, events of answers, runs.

The one place that knows these formats, by subject. Messages that another program may have sent (requests, events, descriptions)
are checked when they are read.
"""

from pipedec.messages.encoding import to_json
from pipedec.messages.events import (
    AbortEvent,
    CacheSlotsEvent,
    CancelledEvent,
    CompletionEvent,
    ErrorEvent,
    Event,
    LogprobsEvent,
    OverranEvent,
    PausedEvent,
    PromptLogprobsEvent,
    ResumedEvent,
    ThreadNews,
    TokensEvent,
    TraceEvents,
    TraceRow,
    event_from_json,
)
from pipedec.messages.heads import StageMessageHead, TensorHead, UpdateHead
from pipedec.messages.liveness import ActivityReport, Recovery
from pipedec.messages.meeting import AddressEvent, CardEvent, LoadedEvent
from pipedec.messages.requests import PromptRequest
from pipedec.messages.run import (
    BitaDescription,
    Choice,
    Histogram,
    KVUsage,
    RankDescription,
    RunDescription,
    RunStats,
    StageStats,
)

__all__ = [
    "AbortEvent",
    "ActivityReport",
    "AddressEvent",
    "BitaDescription",
    "CacheSlotsEvent",
    "CancelledEvent",
    "CardEvent",
    "Choice",
    "CompletionEvent",
    "ErrorEvent",
    "Event",
    "Histogram",
    "KVUsage",
    "LoadedEvent",
    "LogprobsEvent",
    "OverranEvent",
    "PausedEvent",
    "PromptLogprobsEvent",
    "PromptRequest",
    "RankDescription",
    "Recovery",
    "ResumedEvent",
    "RunDescription",
    "RunStats",
    "StageMessageHead",
    "StageStats",
    "TensorHead",
    "ThreadNews",
    "TokensEvent",
    "TraceEvents",
    "TraceRow",
    "UpdateHead",
    "event_from_json",
    "to_json",
]
