"""Choosing tokens from the target's logits. Knows tensors and sampling parameters, no scheduler and no process."""

from pipedec.sampling.logprobs import Logprobs, PromptLogprobs
from pipedec.sampling.predictor import TokenPredictor
from pipedec.sampling.sampler import Sampler, filtered, greedy

__all__ = ["Logprobs", "PromptLogprobs", "Sampler", "TokenPredictor", "filtered", "greedy"]
