"""Decoding methods: who proposes rows, and when. Methods never see processes, transports or Redis."""

from pipedec.decoding.controller import TimestepTiming
from pipedec.decoding.experience import Experience
from pipedec.decoding.method import DEFAULT_METHOD, METHODS, Drafter, Method, create_method, create_threaded
from pipedec.decoding.thread_drafter import ForestDrafter
from pipedec.decoding.threaded import Threaded

__all__ = [
    "DEFAULT_METHOD", "METHODS", "Drafter", "Experience", "ForestDrafter", "Method", "Threaded", "TimestepTiming",
    "create_method", "create_threaded",
]  # fmt: skip
