"""Faults of single requests: what raises while a rank works for a request ends that request, and neither the rank nor others.

Faults of the machine (memory, a device, a link) are no request's, and end the rank.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TypeVar

import torch

from pipedec.core.errors import PipedecError, UserError

logger = logging.getLogger(__name__)

_MAX_REASON = 300  # characters
_NO_HOST_MEMORY = "DefaultCPUAllocator"  # in the RuntimeError that torch raises where it finds no memory on a host
_T = TypeVar("_T")


def is_of_machine(error: Exception) -> bool:
    """Whether an error is no request's fault, and ends the rank."""
    if isinstance(error, PipedecError):
        return not isinstance(error, UserError)
    if isinstance(error, MemoryError | OSError | torch.OutOfMemoryError | torch.AcceleratorError):
        return True
    return isinstance(error, RuntimeError) and _NO_HOST_MEMORY in str(error)


def failure_of(where: str, error: Exception) -> str:
    """One line for the client of a request: the rank and the reason."""
    reason = " ".join(str(error).split())
    if not isinstance(error, UserError):
        reason = f"{type(error).__name__}: {reason}" if reason else type(error).__name__
    return f"{where} cannot answer this request: {reason[:_MAX_REASON]}"


class RequestFaults:
    """The requests that have failed on a rank since ``take``.

    Args:
        where: the rank, for messages.
        drop: called once with each request that fails.
    """

    def __init__(self, where: str, drop: Callable[[int], None] = lambda number: None) -> None:
        self._where = where
        self._drop = drop
        self._found: dict[int, str] = {}

    def __contains__(self, number: int) -> bool:
        return number in self._found

    def of(self, number: int) -> AbstractContextManager[None, bool]:
        """Context of work for one request: an exception there is its fault. Errors of the machine are raised."""
        return _Work(self, number)

    def record_failure(self, number: int, error: Exception) -> None:
        failure = failure_of(self._where, error)
        logger.warning("request %d has failed: %s", number, failure, exc_info=None if isinstance(error, UserError) else error)
        if number not in self._found:
            self._found[number] = failure
            self._drop(number)

    def apart(self, numbers: Sequence[int], compute: Callable[[Sequence[int]], _T]) -> list[_T]:
        """The result of ``compute`` for all requests together; if that raises, its results for each alone, without those for
        which it raises again: they have failed. ``compute`` must change nothing before it raises.
        """
        try:
            return [compute(numbers)]
        except Exception as error:
            if is_of_machine(error):
                raise
        results: list[_T] = []
        for number in numbers:
            with self.of(number):
                results.append(compute([number]))
        return results

    def pop_failures(self) -> dict[int, str]:
        """The failures by request, each once."""
        found, self._found = self._found, {}
        return found


class _Work:
    """See ``RequestFaults.of``: entered many times per timestep, and so no generator."""

    __slots__ = ("_faults", "_number")

    def __init__(self, faults: RequestFaults, number: int) -> None:
        self._faults, self._number = faults, number

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> bool:
        if not isinstance(error, Exception) or is_of_machine(error):
            return False
        self._faults.record_failure(self._number, error)
        return True
