"""Decoding methods and the scheduler of requests: which rows enter the pipeline, and when. They know no process, transport or
Redis.
"""

from pipedec.decoding.controller import TimestepTiming
from pipedec.decoding.experience import Experience
from pipedec.decoding.memory import LaneSizes
from pipedec.decoding.method import Drafter, Resources
from pipedec.decoding.request import Phase, Request
from pipedec.decoding.scheduler import Scheduler

__all__ = ["Drafter", "Experience", "LaneSizes", "Phase", "Request", "Resources", "Scheduler", "TimestepTiming"]
