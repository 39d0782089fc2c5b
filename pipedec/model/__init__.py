"""The stage model: consecutive layers of a LLaMA-family checkpoint, with a two-level KV cache and tree attention.

Knows tensors and Hugging Face checkpoints, but not the cluster, tokenizers or decoding methods.
"""

from pipedec.model.bita import BitaConfig, BitaWeights, checked_bita, fingerprint
from pipedec.model.cache import KVCache
from pipedec.model.checkpoint import Checkpoint
from pipedec.model.config import ModelConfig
from pipedec.model.stage_model import StageModel

__all__ = [
    "BitaConfig",
    "BitaWeights",
    "Checkpoint",
    "KVCache",
    "ModelConfig",
    "StageModel",
    "checked_bita",
    "fingerprint",
]
