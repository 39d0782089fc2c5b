"""The shape of a model, read from a checkpoint's config.json into one frozen dataclass. Knows nothing of weights or devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipedec.config.model import json_object, model_json
from pipedec.core import UserError
from pipedec.gguf import model_files

LENGTH_DEPENDENT = ("dynamic", "longrope")  # rope types whose keys depend on the length of the prompt


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
        rope: parameters of the rotary embedding, as ``rope_parameters`` of transformers.
        directory: of ``config.json``.
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
    rope: Mapping[str, Any] = field(hash=False)
    directory: Path = field(compare=False, repr=False)

    @classmethod
    def from_directory(cls, path: str | Path) -> ModelConfig:
        """Read ``config.json`` (and ``generation_config.json``) of a Hugging Face checkpoint directory, or of a GGUF file.

        Raises:
            UserError: as ``model_json``, or the weights are quantized.
        """
        stated = model_json(path)
        if stated.quantization_config:
            raise UserError(
                f"{path} holds weights quantized by {stated.quantization_config.get('quant_method')}, which are not supported: "
                "give the unquantized checkpoint and --quantize int8 or int4"
            )
        optional = stated.optional_weights
        return cls(
            model_type=stated.model_type,
            vocab_size=stated.vocab_size,
            hidden_size=stated.hidden_size,
            intermediate_size=stated.intermediate_size,
            num_layers=stated.num_hidden_layers,
            num_heads=stated.num_attention_heads,
            num_kv_heads=stated.kv_heads,
            head_dim=stated.head_dim or stated.hidden_size // stated.num_attention_heads,
            rms_norm_eps=stated.rms_norm_eps,
            hidden_act=stated.hidden_act,
            tie_word_embeddings=stated.tie_word_embeddings,
            attention_bias=optional.qkv_bias,
            output_bias=optional.output_bias,
            mlp_bias=optional.mlp_bias,
            qk_norm=optional.qk_norm,
            max_positions=stated.max_position_embeddings,
            eos_token_ids=_eos_token_ids(model_files(path), stated.eos_token_id),
            sliding_windows=stated.sliding_windows,
            rope=stated.rope,
            directory=model_files(path),
        )

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


def _eos_token_ids(directory: Path, in_config: int | list[int] | None) -> tuple[int, ...]:
    """End tokens, from generation_config.json if it has any, else from config.json. Either may hold an int, a list or null."""
    file = directory / "generation_config.json"
    eos = json_object(file).get("eos_token_id") if file.exists() else None
    if eos is None:
        eos = in_config
    if eos is None:
        return ()
    return tuple(eos) if isinstance(eos, list) else (int(eos),)
