"""Decoding methods: who proposes rows, and when. Methods never see processes, transports or Redis."""

from pipedec.decoding.method import METHODS, Drafter, Method, create_method

__all__ = ["METHODS", "Drafter", "Method", "create_method"]
