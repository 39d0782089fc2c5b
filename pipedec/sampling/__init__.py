"""Choosing tokens from the target's logits. Knows tensors and sampling parameters, no scheduler and no process."""

from pipedec.sampling.logprobs import Logprobs
from pipedec.sampling.sampler import Sampler, filtered, greedy, seeded

__all__ = ["Logprobs", "Sampler", "filtered", "greedy", "seeded"]
