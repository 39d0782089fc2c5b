"""Creates the policy of the method that a request names. The methods themselves are listed in ``pipedec.methods``."""

from __future__ import annotations

import importlib
from dataclasses import replace

from pipedec.decoding.context import MethodContext
from pipedec.decoding.interface import Policy
from pipedec.decoding.members import Members
from pipedec.methods import find_method


def create_policy(context: MethodContext) -> Policy:
    """The policy of the method of the context's request.

    Raises:
        UserError: the method is unknown, cannot work with its options, or needs a draft model or a BiTA and there is none.
    """
    entry = find_method(context.request.method)
    entry.check_needs(context.drafter is not None, context.trained_masks > 0)
    if entry.draft == "none":
        context = replace(context, drafter=None)
    module, _, name = entry.implementation.partition(":")
    kind = getattr(importlib.import_module(module), name)
    policy: Policy = kind(context) if entry.compares_threads else Members(context, kind)
    return policy
