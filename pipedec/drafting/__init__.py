"""Draft models, which predict candidates for rows of prediction trees. Knows neither methods nor stages nor processes."""

from pipedec.drafting.draft_model import DraftModel

__all__ = ["DraftModel"]
