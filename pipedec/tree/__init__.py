"""The dynamic prediction tree (paper §3.3). Knows tensors and token ids; knows no model, no process, no Redis."""

from pipedec.tree.prediction_tree import Advance, Candidates, PredictionTree

__all__ = ["Advance", "Candidates", "PredictionTree"]
