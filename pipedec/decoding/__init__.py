"""Decoding methods: who proposes rows, and when. Methods never see processes, transports or Redis."""

from pipedec.decoding.controller import Beat
from pipedec.decoding.experience import Experience
from pipedec.decoding.method import DEFAULT_METHOD, METHODS, Drafter, Method, create_method

__all__ = ["DEFAULT_METHOD", "METHODS", "Beat", "Drafter", "Experience", "Method", "create_method"]
