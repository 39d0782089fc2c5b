"""Decoding methods: which rows enter the pipeline, and when. Methods never see processes, transports or Redis."""

from pipedec.decoding.company import Company
from pipedec.decoding.controller import TimestepTiming
from pipedec.decoding.drafter import Drafter
from pipedec.decoding.experience import Experience
from pipedec.decoding.memory import LaneSizes
from pipedec.decoding.request_state import RequestState

__all__ = ["Company", "Drafter", "Experience", "LaneSizes", "RequestState", "TimestepTiming"]
