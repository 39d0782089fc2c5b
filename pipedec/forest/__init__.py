"""The prediction trees of an answer's decode threads, sharing one KV cache. Knows trees and threads, no model and no process."""

from pipedec.forest.changes import Remaining, Start, ThreadChanges, apply_verdict
from pipedec.forest.forest import Forest, ThreadedForest, forest_of, position_root
from pipedec.forest.slots import Slots

__all__ = [
    "Forest", "Remaining", "Slots", "Start", "ThreadChanges", "ThreadedForest", "apply_verdict", "forest_of", "position_root",
]  # fmt: skip
