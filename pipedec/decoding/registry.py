"""Creates the method that a request names. The methods themselves are listed in ``pipedec.methods``."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import torch

from pipedec.core import Request
from pipedec.decoding.experience import Experience
from pipedec.decoding.interface import Drafter, Method
from pipedec.decoding.members import Member, Members
from pipedec.decoding.thread_drafter import ForestDrafter, ThreadDrafter
from pipedec.decoding.threaded import Threaded
from pipedec.forest import Forest
from pipedec.methods import MethodEntry, find_method
from pipedec.threads import Sequence


def create_method(
    request: Request,
    drafter: Drafter | None,
    experience: Experience,
    device: torch.device | str = "cpu",
    trained_masks: int = 0,
) -> Method:
    """The method of ``request`` for an answer in one thread.

    Args:
        experience: what earlier answers have taught.
        trained_masks: mask rows that the target's BiTA was trained with; 0 if it has none.

    Raises:
        UserError: the method is unknown, cannot work with its options, or needs a draft model or a BiTA and there is none.
    """
    entry = _checked(request, drafter, trained_masks)
    method: Method = _construct(
        entry.implementation, request=request, drafter=drafter, experience=experience, device=device, trained_masks=trained_masks
    )
    return method


def create_threaded(
    request: Request,
    sequence: Sequence,
    drafter: ForestDrafter | None,
    experience: Experience,
    device: torch.device | str = "cpu",
    trained_masks: int = 0,
) -> Threaded:
    """As ``create_method``, for an answer in several threads.

    Args:
        sequence: the threads, just begun. Only the method replays verdicts into it.
        drafter: reads ``sequence`` and replays nothing.
    """
    entry = _checked(request, drafter, trained_masks)
    forest = Forest(sequence, device)
    shared: dict[str, Any] = {"request": request, "experience": experience, "device": device, "trained_masks": trained_masks}
    if entry.team is not None:
        return Threaded(forest, _construct(entry.team, drafter=drafter, forest=forest, **shared), device)

    def make(thread: int) -> Member:
        own = None if drafter is None else ThreadDrafter(drafter, thread)
        member: Member = _construct(entry.implementation, drafter=own, **shared)
        return member

    return Threaded(forest, Members(forest, make, drafter), device)


def _checked(request: Request, drafter: object | None, trained_masks: int) -> MethodEntry:
    entry = find_method(request.method)
    entry.check_needs(drafter is not None, trained_masks > 0)
    return entry


def _construct(path: str, **available: Any) -> Any:
    """The class at ``path`` with those of the ``available`` arguments that its constructor names."""
    module, _, name = path.partition(":")
    kind = getattr(importlib.import_module(module), name)
    return kind(**{key: value for key, value in available.items() if key in inspect.signature(kind).parameters})
