"""Decoding methods: which rows enter the pipeline, and when. They know no process, transport or Redis."""

from pipedec.decoding.batch import Batch
from pipedec.decoding.controller import TimestepTiming
from pipedec.decoding.experience import Experience
from pipedec.decoding.memory import LaneSizes
from pipedec.decoding.method import Drafter
from pipedec.decoding.request_state import RequestState

__all__ = ["Batch", "Drafter", "Experience", "LaneSizes", "RequestState", "TimestepTiming"]
