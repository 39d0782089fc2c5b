"""The files of a trained BiTA: keys and values of a learned prompt for every layer of a target, one embedding per mask and, if it
was trained, a Markov table.

Owns the file format, and the check of which target a file belongs to. Does not know how the tensors are used. Shapes: L layers,
K key-value heads, Q prompt tokens, D head size, M masks, E hidden size.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal

import torch
from msgspec import Meta, ValidationError, convert
from msgspec.structs import asdict
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from pipedec.checkpoints import SINGLE_FILE, check_trained_for
from pipedec.core.errors import UserError
from pipedec.core.records import Record
from pipedec.families import ModelConfig, model_config
from pipedec.model.markov import MarkovTable

MAX_MASKS = 16
_FORMAT = "pipedec-bita-1"


class BitaConfig(Record, frozen=True):
    """``config.json`` of a BiTA directory.

    ``prompting`` is how the prompt was learned (BiTA Table 3): ``deep`` (keys and values of every layer), ``shallow`` (input
    embeddings, from which the layers computed the keys and values) or ``none``.
    """

    target: str  # ``fingerprint`` of the target it was trained for
    num_masks: Annotated[int, Meta(ge=1, le=MAX_MASKS)]  # M
    num_prompt_tokens: Annotated[int, Meta(ge=0)]  # Q; 0 without a prompt
    prompting: Literal["deep", "shallow", "none"] = "deep"
    markov_rank: Annotated[int, Meta(ge=0)] = 0  # the rank of the Markov table; 0 without one

    @classmethod
    def from_directory(cls, directory: Path) -> BitaConfig:
        """Read the config. Raises UserError if the file is missing, damaged or not in this format."""
        path = directory / "config.json"
        try:
            raw: Any = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            raise UserError(f"{path} cannot be read: give a directory that pipedec train bita wrote") from None
        if not isinstance(raw, dict) or raw.pop("format", None) != _FORMAT:
            raise UserError(f"{path} is not of format {_FORMAT}: give a directory that pipedec train bita wrote")
        try:
            return convert(raw, cls)
        except ValidationError:
            raise UserError(f"{path} is damaged: train again, or copy it again") from None


@dataclass(frozen=True)
class BitaWeights:
    """The tensors that the layers of one stage need. The prompt has no positions, so its keys are not rotated."""

    prompt: Tensor  # [L, 2, K, Q, D], keys and values of the learned prompt
    masks: Tensor  # [M, E], embeddings of the masks; used by the first stage

    @classmethod
    def load(cls, directory: Path, config: ModelConfig, layers: range, dtype: torch.dtype, device: torch.device) -> BitaWeights:
        """Read the tensors of ``layers`` only. ``config``: of the target. Raises UserError if the file is missing or truncated,
        or a shape does not match the BiTA's config and the target.
        """
        with _checked_tensors(directory, config) as slices:
            prompt, masks = slices["prompt"][layers.start : layers.stop], slices["masks"][:]
        return cls(prompt.to(device, dtype), masks.to(device, dtype))

    def save(self, directory: Path, config: BitaConfig, markov: Mapping[str, Tensor] = MappingProxyType({})) -> None:
        """Write both files. These weights must be those of all layers; ``markov``: the tensors of a Markov table, by name."""
        directory.mkdir(parents=True, exist_ok=True)
        tensors = {"prompt": self.prompt, "masks": self.masks, **markov}
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, directory / SINGLE_FILE)
        document = {"format": _FORMAT, **asdict(config)}
        (directory / "config.json").write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")

    @property
    def num_masks(self) -> int:
        return len(self.masks)


def load_markov(directory: Path, config: ModelConfig) -> MarkovTable | None:
    """The BiTA's Markov table; None if it has none. ``config``: of the target. Raises UserError as ``BitaWeights.load``."""
    with _checked_tensors(directory, config) as slices:
        names = slices.keys() - {"prompt", "masks"}
        return MarkovTable.of({name: slices[name][:] for name in names}) if names else None


def check_attention(config: ModelConfig, advice: str) -> None:
    """Raises UserError, which ends with ``advice``, for a target with layers that no mask and no learned prompt can enter."""
    if config.is_recurrent:
        raise UserError(f"a BiTA needs attention in all layers: some of {config.model_type} keep a recurrent state: {advice}")


@contextmanager
def _checked_tensors(directory: Path, config: ModelConfig) -> Iterator[dict[str, Any]]:
    """Slices of the tensors by name, of the right shapes."""
    path = directory / SINGLE_FILE
    bita = BitaConfig.from_directory(directory)
    check_attention(config, "use --bita none")
    cached = {layer.cached for layer in config.layers}
    if len(cached) > 1 or any(one.key_dim != one.value_dim for one in cached):
        raise UserError(
            f"{directory}: a BiTA needs a target whose layers all cache keys and values of one shape: use --bita none"
        )
    (of_layer,) = cached
    expected = {
        "prompt": (config.num_hidden_layers, 2, of_layer.num_heads, bita.num_prompt_tokens, of_layer.key_dim),
        "masks": (bita.num_masks, config.hidden_size),
        **MarkovTable.shapes(config.vocab_size, bita.num_masks, bita.markov_rank),
    }
    try:
        with safe_open(str(path), framework="pt") as file:
            slices = {name: file.get_slice(name) for name in expected if name in file.keys()}  # noqa: SIM118
            for name, shape in expected.items():
                found = list(slices[name].get_shape()) if name in slices else None
                if found != list(shape):
                    problem = "is missing" if found is None else f"has shape {found}"
                    raise UserError(f"{path}: tensor {name} {problem}, but config.json and the target ask for {list(shape)}")
            yield slices
    except (SafetensorError, OSError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{path} is not a whole safetensors file ({reason}): train again, or copy it again") from None


def checked_bita(directory: Path, target: Path) -> BitaConfig:
    """Read a BiTA's config and check that its tensors fit and, if all of the target is here, that it was trained for ``target``.
    Raises UserError if it cannot be read, or was trained for another target.
    """
    config = BitaConfig.from_directory(directory)
    BitaWeights.load(directory, model_config(target), range(1), torch.float32, torch.device("cpu"))
    check_trained_for(directory, target)
    return config
