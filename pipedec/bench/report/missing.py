"""The error of a figure or table whose data was not measured."""

from __future__ import annotations

from pipedec.core import UserError


class NoFigure(UserError):
    """The rows do not contain what a figure or table needs; the message says what is missing."""
