"""The stage model: some layers of a LLaMA-family checkpoint, with a two-level cache and tree attention.

Knows tensors and Hugging Face checkpoints; knows neither the cluster, nor tokenizers, nor the decoding method.
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
