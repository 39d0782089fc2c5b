"""Which token the target's logits mean. Pure functions on logits; knows nothing of trees, requests under way or processes."""

from pipedec.sampling.logprobs import Logprobs
from pipedec.sampling.sampler import Sampler, filtered, greedy, seeded

__all__ = ["Logprobs", "Sampler", "filtered", "greedy", "seeded"]
