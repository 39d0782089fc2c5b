"""Creates the method that a request names. The methods themselves are listed in ``pipedec.methods``."""

from __future__ import annotations

import importlib

import torch

from pipedec.core import Request
from pipedec.decoding.context import MethodContext
from pipedec.decoding.drafter import Drafter, RequestDrafter
from pipedec.decoding.experience import Experience
from pipedec.decoding.interface import Policy
from pipedec.decoding.members import Members
from pipedec.decoding.method import Method
from pipedec.methods import find_method
from pipedec.threads import Sequence


def create_method(
    request: Request,
    sequence: Sequence,
    drafter: Drafter | None,
    experience: Experience,
    device: torch.device | str = "cpu",
    trained_masks: int = 0,
) -> Method:
    """The method of ``request``.

    Args:
        sequence: the answer's threads, just begun. Only the method passes accepted tokens to it.
        drafter: None without a draft model.
        experience: what earlier answers have taught.
        trained_masks: mask rows that the target's BiTA was trained with; 0 if it has none.

    Raises:
        UserError: the method is unknown, cannot work with its options, or needs a draft model or a BiTA and there is none.
    """
    entry = find_method(request.method)
    entry.check_needs(drafter is not None, trained_masks > 0)
    of_request = None if drafter is None or entry.draft == "none" else RequestDrafter(drafter, request.number)
    context = MethodContext(request, sequence, of_request, experience, device, trained_masks)
    module, _, name = entry.implementation.partition(":")
    kind = getattr(importlib.import_module(module), name)
    policy: Policy = kind(context) if entry.compares_threads else Members(context, kind)
    return Method(sequence, policy, device)
