"""The shape of a model from the ``config.json`` of its checkpoint; that of a well-known model by its name.

transformers could read the file, too, but importing it takes every process two seconds. Knows nothing of weights or devices.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta

from pipedec.core import BadValue, UserError
from pipedec.gguf import model_files
from pipedec.hardware import MODEL_SHAPES, SUPPORTED_MODEL_TYPES, ModelShape, OptionalWeights, Size
from pipedec.validation import read_text, shortened, validated

# Of keys that a file leaves out, where a family's defaults are not LLaMA's, which ``ModelJson`` has; all as in transformers.
_QWEN = {"num_key_value_heads": 32, "max_position_embeddings": 32_768, "eos_token_id": None, "sliding_window": 4096}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"num_key_value_heads": 8, "max_position_embeddings": 131_072, "sliding_window": 4096},
    "qwen2": _QWEN,
    "qwen3": {**_QWEN, "head_dim": 128},
}
_DEFAULT_THETA = 10_000.0
LENGTH_DEPENDENT = ("dynamic", "longrope")  # rope types whose keys depend on the length of the prompt
_STRETCHED = ("llama3", "yarn", "longrope")  # rope types with an original context length
_LLAMA3_NUMBERS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


@dataclass(frozen=True)
class ModelJson:
    """The keys of ``config.json`` that describe a model of a supported type, with transformers' defaults.

    Attributes:
        num_key_value_heads, head_dim: None for as many as query heads; for the hidden size over the number of query heads.
        sliding_window, use_sliding_window, max_window_layers, layer_types: see ``sliding_windows``.
        rope_parameters, rope_scaling, rope_theta, partial_rotary_factor, original_max_position_embeddings: see ``rope``.
    """

    model_type: str
    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: Size
    num_attention_heads: Size
    vocab_size: Size
    num_key_value_heads: Size | None = None
    head_dim: Size | None = None
    rms_norm_eps: Annotated[float, Meta(ge=0)] = 1e-6
    hidden_act: str = "silu"
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    max_position_embeddings: Size = 2048
    eos_token_id: int | list[int] | None = 2
    sliding_window: Size | None = None
    use_sliding_window: bool = False
    max_window_layers: int = 28
    layer_types: list[Literal["full_attention", "sliding_attention"]] | None = None
    rope_parameters: dict[str, Any] | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_theta: float = _DEFAULT_THETA
    partial_rotary_factor: float | None = None
    original_max_position_embeddings: Size | None = None
    quantization_config: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.head_dim is None and self.hidden_size % self.num_attention_heads:
            raise BadValue(f"num_attention_heads {self.num_attention_heads} must divide hidden_size {self.hidden_size}")
        if self.num_attention_heads % self.kv_heads:
            raise BadValue(f"num_key_value_heads {self.kv_heads} must divide num_attention_heads {self.num_attention_heads}")
        if self.layer_types is not None and len(self.layer_types) != self.num_hidden_layers:
            raise BadValue(f"layer_types must name {self.num_hidden_layers} layers, not {len(self.layer_types)}")
        numbers = ("rope_theta", *(_LLAMA3_NUMBERS if self.rope["rope_type"] == "llama3" else ()))
        for name in numbers:
            if not isinstance(value := self.rope.get(name), int | float) or value <= 0:
                raise BadValue(f"rope_parameters.{name} must be a positive number")

    @property
    def kv_heads(self) -> int:
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def optional_weights(self) -> OptionalWeights:
        """Not every type obeys these two keys."""
        attention_bias = self.attention_bias and self.model_type in ("llama", "qwen3")
        mlp_bias = self.mlp_bias and self.model_type == "llama"
        return OptionalWeights(
            qkv_bias=attention_bias or self.model_type == "qwen2", output_bias=attention_bias, mlp_bias=mlp_bias,
            qk_norm=self.model_type == "qwen3",
        )  # fmt: skip

    @property
    def sliding_windows(self) -> tuple[int | None, ...]:
        """For each layer, the number of positions that a row sees, its own included; None for all.

        Mistral: one window for all layers. Qwen, if it uses windows at all: for the layers marked as sliding in ``layer_types``,
        or else for those from ``max_window_layers`` on. LLaMA: none.
        """
        layers = range(self.num_hidden_layers)
        if self.model_type == "mistral":
            return (self.sliding_window,) * len(layers)
        if self.model_type == "llama" or not self.use_sliding_window:
            return (None,) * len(layers)
        if self.layer_types is not None:
            return tuple(self.sliding_window if kind == "sliding_attention" else None for kind in self.layer_types)
        return tuple(self.sliding_window if layer >= self.max_window_layers else None for layer in layers)

    @property
    def rope(self) -> Mapping[str, Any]:
        """The parameters of the rotary embedding in transformers' present form: ``rope_type``, ``rope_theta`` and the type's own.

        Older files keep ``rope_theta`` beside them, and the others in ``rope_scaling``.
        """
        rope = dict(self.rope_scaling or self.rope_parameters or {})
        rope.setdefault("rope_theta", self.rope_theta)
        rope.setdefault("rope_type", rope.get("type", "default"))
        if self.partial_rotary_factor is not None:
            rope.setdefault("partial_rotary_factor", self.partial_rotary_factor)
        if rope["rope_type"] in _STRETCHED:
            rope.setdefault("original_max_position_embeddings", self.max_position_embeddings)
            if self.original_max_position_embeddings is not None:
                rope["original_max_position_embeddings"] = self.original_max_position_embeddings
        return rope


def model_json(directory: str | Path) -> ModelJson:
    """Read and check the ``config.json`` of a Hugging Face checkpoint, or its equivalent in a GGUF file.

    UserError for anything else, a size that is missing or impossible, or a model type that is not supported.
    """
    files = model_files(directory)
    if not files.is_dir():
        raise UserError(f"{files} is not a directory: give the folder of a Hugging Face checkpoint")
    path = files / "config.json"
    if not path.is_file():
        raise UserError(f"{path} is missing: give the folder of a Hugging Face checkpoint")
    document = json_object(path)
    model_type = document.get("model_type")
    if model_type not in SUPPORTED_MODEL_TYPES:
        supported = ", ".join(SUPPORTED_MODEL_TYPES)
        raise UserError(f"{path}: model_type {shortened(model_type)!r} is not supported: it must be one of {supported}")
    known = {item.name: document[item.name] for item in fields(ModelJson) if item.name in document}
    return validated(ModelJson, _DEFAULTS[model_type] | known, str(path))


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a LLaMA-family model.

    Attributes:
        attention_bias: whether the query, key and value projections have a bias.
        output_bias, mlp_bias, qk_norm: see ``OptionalWeights``.
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

        Raises UserError as ``model_json``, or if the weights are quantized.
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


def _eos_token_ids(directory: Path, in_config: int | list[int] | None) -> tuple[int, ...]:
    """End tokens, from generation_config.json if it has any, else from config.json. Either may hold an int, a list or null."""
    file = directory / "generation_config.json"
    eos = json_object(file).get("eos_token_id") if file.exists() else None
    eos = in_config if eos is None else eos
    if eos is None:
        return ()
    return tuple(eos) if isinstance(eos, list) else (int(eos),)


def model_shape(name: str) -> ModelShape:
    """The sizes of a known model, or of the checkpoint in directory ``name``. UserError for neither, or as ``model_json``."""
    if name in MODEL_SHAPES:
        return MODEL_SHAPES[name]
    _check_known(name)
    stated = model_json(name)
    optional = asdict(stated.optional_weights)
    own = {item.name: getattr(stated, item.name) for item in fields(ModelShape) if item.name not in optional}
    return ModelShape(**own | optional | {"num_key_value_heads": stated.kv_heads})


def checkpoint_dtype(name: str | Path) -> str:
    """The dtype in which a model was published: the known ones in bfloat16, a checkpoint as its ``config.json`` has it.

    A file that names none counts as float32. So does a GGUF file, whose weights are de-quantised in float32. UserError if there
    is no such model.
    """
    if name in MODEL_SHAPES:
        return "bfloat16"
    _check_known(name)
    document = json_object(model_files(name) / "config.json")
    return str(document.get("dtype") or document.get("torch_dtype") or "float32")


def _check_known(name: str | Path) -> None:
    if not (model_files(name) / "config.json").is_file():
        known_models = ", ".join(MODEL_SHAPES)
        raise UserError(f"{shortened(name)!r} is neither a directory with a config.json nor a known model ({known_models})")


def json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises UserError if it is missing or anything else."""
    try:
        document = json.loads(read_text(path))
    except (ValueError, RecursionError):
        raise UserError(f"{path}: not valid JSON: download it again") from None
    if not isinstance(document, dict):
        raise UserError(f"{path}: not a JSON object: download it again")
    return document


def context_length(directory: Path, max_model_len: int | None = None) -> int:
    """Tokens of a prompt and its answer together: the cluster's own limit, or what the ``config.json`` in ``directory`` has.

    UserError if neither is known.
    """
    try:
        positions = json_object(model_files(directory) / "config.json").get("max_position_embeddings")
    except UserError:
        positions = None
    known = [limit for limit in (max_model_len, positions) if isinstance(limit, int)]
    if not known:
        raise UserError(f"no config.json with max_position_embeddings in {directory}: start the cluster with --max-model-len")
    return min(known)
