"""The base class of messages, and the ranges of their numbers."""

from __future__ import annotations

import sys
from typing import Annotated

from msgspec import Meta, Struct

LARGEST = sys.float_info.max  # an integer in JSON may be larger
Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]  # the range of a tensor's integers


class Record(Struct, frozen=True, forbid_unknown_fields=True):
    """A message from another process: an immutable struct that refuses unknown fields."""
