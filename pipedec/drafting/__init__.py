"""Draft models, which predict candidates for rows of prediction trees. Knows no method, stage or process."""

from pipedec.drafting.draft_model import DraftModel

__all__ = ["DraftModel"]
