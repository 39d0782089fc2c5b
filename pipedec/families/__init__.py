"""Model families: the keys of ``config.json``, and the formula of a layer.

Knows neither weights nor devices, and no torch.
"""

from pipedec.families.base import DecoderConfig, ModelConfig
from pipedec.families.parts import Activation, Decoder, Heads, Linear, Part, RMSNorm
from pipedec.families.registry import (
    FAMILIES,
    KNOWN_MODELS,
    QUANTIZATION_FILES,
    ModelImpl,
    checkpoint_dtype,
    context_length,
    is_known,
    json_object,
    model_by_name,
    model_config,
)
from pipedec.families.shapes import ExpertsShape, KVShape, Layer, LayerShape, Reach, RecurrentShape, Shape, StateCounts
from pipedec.families.transformers import TransformersConfig

__all__ = [
    "FAMILIES", "KNOWN_MODELS", "QUANTIZATION_FILES", "Activation", "Decoder", "DecoderConfig", "ExpertsShape", "Heads",
    "KVShape", "Layer", "LayerShape", "Linear", "ModelConfig", "ModelImpl", "Part", "RMSNorm", "Reach", "RecurrentShape",
    "Shape", "StateCounts", "TransformersConfig", "checkpoint_dtype", "context_length", "is_known", "json_object",
    "model_by_name", "model_config",
]  # fmt: skip
