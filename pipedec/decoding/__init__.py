"""Decoding methods: which rows enter the pipeline, and when. Methods never see processes, transports or Redis."""

from pipedec.decoding.controller import TimestepTiming
from pipedec.decoding.experience import Experience
from pipedec.decoding.interface import Drafter, Method
from pipedec.decoding.registry import create_method, create_threaded
from pipedec.decoding.thread_drafter import ForestDrafter
from pipedec.decoding.threaded import Threaded

__all__ = [
    "Drafter", "Experience", "ForestDrafter", "Method", "Threaded", "TimestepTiming", "create_method", "create_threaded",
]  # fmt: skip
