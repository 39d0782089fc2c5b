"""The prediction trees of an answer's decode threads, sharing one KV cache. Knows trees and threads, no model and no process."""

from pipedec.forest.forest import (
    Forest,
    Remaining,
    Start,
    ThreadChanges,
    ThreadedForest,
    apply_verdict,
    forest_of,
    position_root,
)
from pipedec.forest.slots import Slots

__all__ = [
    "Forest", "Remaining", "Slots", "Start", "ThreadChanges", "ThreadedForest", "apply_verdict", "forest_of", "position_root",
]  # fmt: skip
