"""The shape of a model, read from a checkpoint's config.json into one frozen dataclass.

Owns the list of supported families and how their configs differ. Knows nothing of weights or devices.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipedec.core import UserError
from pipedec.gguf import model_files
from pipedec.hardware import SUPPORTED_MODEL_TYPES, optional_weights


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a LLaMA-family model.

    Attributes:
        attention_bias: whether the query, key and value projections have a bias.
        output_bias: whether the attention's output projection has a bias.
        mlp_bias: whether the three projections of the MLP have a bias.
        qk_norm: whether the queries and keys of each head pass an RMS norm.
        max_positions: the model's context length.
        eos_token_ids: tokens that end an answer; generation_config.json takes precedence over config.json.
        sliding_windows: for each layer, the number of positions that a row sees, its own included; None for all.
        hf: the transformers config object, for the rotary embedding.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    hidden_act: str
    tie_word_embeddings: bool
    attention_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    max_positions: int
    eos_token_ids: tuple[int, ...]
    sliding_windows: tuple[int | None, ...]
    hf: Any = field(compare=False, repr=False)

    @classmethod
    def from_directory(cls, path: str | Path) -> ModelConfig:
        """Read ``config.json`` (and ``generation_config.json``) of a Hugging Face checkpoint directory, or of a GGUF file.

        Raises:
            UserError: the directory or file does not exist, is not valid JSON, describes an unsupported family or quantized
                weights, or is refused by transformers.
        """
        directory = model_files(path)
        if not directory.is_dir():
            raise UserError(f"{directory} is not a directory: give the folder of a Hugging Face checkpoint")
        raw = _read_json(directory / "config.json")
        model_type = raw.get("model_type")
        if model_type not in SUPPORTED_MODEL_TYPES:
            raise UserError(
                f"{directory / 'config.json'}: model_type {model_type!r} is not supported; "
                f"use one of {', '.join(SUPPORTED_MODEL_TYPES)}"
            )
        if raw.get("quantization_config"):
            method = dict(raw["quantization_config"]).get("quant_method")
            raise UserError(
                f"{directory} holds weights quantized by {method}, which are not supported: give the unquantized checkpoint and "
                "--quantize int8 or int4"
            )
        hf = _transformers_config(directory)
        return _from_hf(hf, _eos_token_ids(directory, hf))

    @property
    def queries_per_kv_head(self) -> int:
        """G: number of query heads that share one key-value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def num_layer_parameters(self) -> int:
        """Parameters of one transformer layer."""
        hidden, inner = self.hidden_size, self.intermediate_size
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        weights = hidden * (2 * queries + 2 * keys + 3 * inner) + 2 * hidden
        biases = (queries + 2 * keys) * self.attention_bias + hidden * self.output_bias + (2 * inner + hidden) * self.mlp_bias
        return weights + biases + 2 * self.head_dim * self.qk_norm

    @property
    def num_embedding_parameters(self) -> int:
        """Parameters of the token embedding, held by the first stage."""
        return self.vocab_size * self.hidden_size

    @property
    def num_head_parameters(self) -> int:
        """Parameters of the final norm and the head, held by the last stage."""
        return self.vocab_size * self.hidden_size + self.hidden_size

    @property
    def num_cache_elements_per_row(self) -> int:
        """Elements of one row in the KV cache of one layer: a key and a value for every key-value head."""
        return 2 * self.num_kv_heads * self.head_dim

    def num_stage_parameters(self, layers: range) -> int:
        """Parameters of a stage with these layers. A tied head shares the embedding if the stage holds both."""
        first, last = layers.start == 0, layers.stop == self.num_layers
        count = len(layers) * self.num_layer_parameters
        count += self.num_embedding_parameters if first else 0
        if last:
            shared = self.num_embedding_parameters if first and self.tie_word_embeddings else 0
            count += self.num_head_parameters - shared
        return count


def _read_json(file: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises UserError if it is missing or anything else."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{file} is missing: give the folder of a Hugging Face checkpoint") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(f"{file} cannot be read as JSON ({error}); download it again") from None
    if not isinstance(content, dict):
        raise UserError(f"{file} does not hold a JSON object; download it again")
    return content


def _transformers_config(directory: Path) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(directory, local_files_only=True)
    except Exception as error:  # transformers validates with many exception types of its own
        reason = " ".join(str(error).split())
        raise UserError(f"{directory / 'config.json'} is refused by transformers: {reason}") from None


def _eos_token_ids(directory: Path, hf: Any) -> tuple[int, ...]:
    """End tokens, from generation_config.json if it has any, else from the config. Either may hold an int, a list or null."""
    file = directory / "generation_config.json"
    eos = _read_json(file).get("eos_token_id") if file.exists() else None
    if eos is None:
        eos = getattr(hf, "eos_token_id", None)
    if eos is None:
        return ()
    return tuple(eos) if isinstance(eos, list | tuple) else (int(eos),)


def _sliding_windows(hf: Any) -> tuple[int | None, ...]:
    """Mistral: one window for all layers. Qwen: for the layers marked as sliding in ``layer_types``. LLaMA: none."""
    layers: int = hf.num_hidden_layers
    window: int | None = getattr(hf, "sliding_window", None)
    if hf.model_type == "mistral":
        return (window,) * layers
    if hf.model_type in ("qwen2", "qwen3"):
        return tuple(window if kind == "sliding_attention" else None for kind in hf.layer_types)
    return (None,) * layers


def _from_hf(hf: Any, eos_token_ids: tuple[int, ...]) -> ModelConfig:
    optional = optional_weights(hf.model_type, bool(getattr(hf, "attention_bias", False)), bool(getattr(hf, "mlp_bias", False)))
    return ModelConfig(
        model_type=hf.model_type,
        vocab_size=hf.vocab_size,
        hidden_size=hf.hidden_size,
        intermediate_size=hf.intermediate_size,
        num_layers=hf.num_hidden_layers,
        num_heads=hf.num_attention_heads,
        num_kv_heads=hf.num_key_value_heads,
        head_dim=getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads,
        rms_norm_eps=hf.rms_norm_eps,
        hidden_act=hf.hidden_act,
        tie_word_embeddings=bool(hf.tie_word_embeddings),
        attention_bias=optional.qkv_bias,
        output_bias=optional.output_bias,
        mlp_bias=optional.mlp_bias,
        qk_norm=optional.qk_norm,
        max_positions=hf.max_position_embeddings,
        eos_token_ids=eos_token_ids,
        sliding_windows=_sliding_windows(hf),
        hf=hf,
    )
