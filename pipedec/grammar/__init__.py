"""Structured outputs: which tokens may follow the tokens of an answer. Knows token ids and texts; knows no model and no process.

Importing this package does not import torch; only its module ``masks`` needs it.
"""

from pipedec.grammar.grammar import MAX_FORCED, NOTHING, Bitmask, Grammar
from pipedec.grammar.structures import TOO_DEEP, Vocabulary, check, new_grammar, without_annotations

__all__ = ["MAX_FORCED", "NOTHING", "TOO_DEEP", "Bitmask", "Grammar", "Vocabulary", "check", "new_grammar", "without_annotations"]
