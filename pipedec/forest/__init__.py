"""The prediction trees of an answer's decode threads, in one cache. Knows trees and threads; knows no model and no process."""

from pipedec.forest.forest import Forest, paths, place
from pipedec.forest.slots import Slots
from pipedec.forest.turn import Rest, Start, Turn, follow

__all__ = ["Forest", "Rest", "Slots", "Start", "Turn", "follow", "paths", "place"]
