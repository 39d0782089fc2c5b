"""The files of a trained BiTA: learned prompt keys and values for every layer of a target, and one embedding per mask.

Knows the file format and which target a file belongs to. Knows nothing of how the tensors are used. Shapes: L layers, K key-value
heads, Q prompt tokens, D head size, M masks, E hidden size.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from pipedec.core import UserError
from pipedec.model.checkpoint import SINGLE_FILE, Checkpoint
from pipedec.model.config import ModelConfig

MAX_MASKS = 16
PROMPTINGS = ("deep", "shallow", "none")
_FORMAT = "pipedec-bita-1"


@dataclass(frozen=True)
class BitaConfig:
    """What ``config.json`` of a BiTA directory says.

    Attributes:
        target: ``fingerprint`` of the target it was trained for.
        num_masks: M.
        num_prompt_tokens: Q; 0 without a prompt.
        prompting: how the prompt was learned: ``deep`` (keys and values of every layer), ``shallow`` (input embeddings, of which
            the layers made these keys and values), ``none`` (BiTA Table 3).
    """

    target: str
    num_masks: int
    num_prompt_tokens: int
    prompting: str = "deep"

    @classmethod
    def from_directory(cls, directory: Path) -> BitaConfig:
        """Raises UserError if there is no such file, or it is not of this format."""
        path = directory / "config.json"
        try:
            raw: Any = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            raise UserError(f"{path} cannot be read: give a directory that pipedec train bita wrote") from None
        if not isinstance(raw, dict) or raw.pop("format", None) != _FORMAT:
            raise UserError(f"{path} is not of format {_FORMAT}: give a directory that pipedec train bita wrote")
        try:
            config: BitaConfig | None = cls(**raw)
        except TypeError:
            config = None
        if config is None or not config._is_sound():
            raise UserError(f"{path} is damaged: train again, or copy it again")
        return config

    def _is_sound(self) -> bool:
        kinds = [type(value) for value in (self.target, self.num_masks, self.num_prompt_tokens, self.prompting)]
        if kinds != [str, int, int, str]:
            return False
        return 1 <= self.num_masks <= MAX_MASKS and self.num_prompt_tokens >= 0 and self.prompting in PROMPTINGS


@dataclass(frozen=True)
class BitaWeights:
    """What the layers of one stage need.

    Attributes:
        prompt: [L, 2, K, Q, D], keys and values of the learned prompt; keys are not rotated, for it takes no positions.
        masks: [M, E], embeddings; the first stage needs them.
    """

    prompt: Tensor
    masks: Tensor

    @classmethod
    def load(cls, directory: Path, config: ModelConfig, layers: range, dtype: torch.dtype, device: torch.device) -> BitaWeights:
        """Those of ``layers`` alone.

        Raises:
            UserError: the file is missing, truncated, or of other shapes than its config and the target say.
        """
        described = BitaConfig.from_directory(directory)
        path = directory / SINGLE_FILE
        expected = _shapes(described, config)
        try:
            with safe_open(str(path), framework="pt") as file:
                slices = {name: file.get_slice(name) for name in expected if name in file.keys()}  # noqa: SIM118
                for name, shape in expected.items():
                    found = list(slices[name].get_shape()) if name in slices else None
                    if found != list(shape):
                        said = "is missing" if found is None else f"has shape {found}"
                        raise UserError(f"{path}: tensor {name} {said}, but config.json and the target ask for {list(shape)}")
                prompt, masks = slices["prompt"][layers.start : layers.stop], slices["masks"][:]
        except (SafetensorError, OSError) as error:
            reason = " ".join(str(error).split())
            raise UserError(f"{path} is not a whole safetensors file ({reason}): train again, or copy it again") from None
        return cls(prompt.to(device, dtype), masks.to(device, dtype))

    def save(self, directory: Path, config: BitaConfig) -> None:
        """Write both files, from tensors of all layers."""
        directory.mkdir(parents=True, exist_ok=True)
        tensors = {"prompt": self.prompt, "masks": self.masks}
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, directory / SINGLE_FILE)
        document = {"format": _FORMAT, **asdict(config)}
        (directory / "config.json").write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")

    @property
    def num_masks(self) -> int:
        return len(self.masks)

    @property
    def num_parameters(self) -> int:
        return self.prompt.numel() + self.masks.numel()


def checked_bita(directory: Path, target: Path) -> BitaConfig:
    """The config of a BiTA that was trained for ``target``.

    Raises:
        UserError: it cannot be read, or belongs to another target.
    """
    config = BitaConfig.from_directory(directory)
    model = ModelConfig.from_directory(target)
    BitaWeights.load(directory, model, range(1), torch.float32, torch.device("cpu"))
    if config.target != fingerprint(target):
        raise UserError(f"{directory} was trained for another target than {target}: train one for it (pipedec train bita)")
    return config


def fingerprint(target: Path) -> str:
    """A name for a target's weights that is quick to find: the SHA-256 of every tensor's name, shape and first row."""
    total = hashlib.sha256()
    for name, shape, first_row in Checkpoint(target).first_rows():
        total.update(f"{name} {list(shape)}".encode())
        total.update(first_row.contiguous().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()[:16]


def _shapes(described: BitaConfig, config: ModelConfig) -> dict[str, tuple[int, ...]]:
    prompt = (config.num_layers, 2, config.num_kv_heads, described.num_prompt_tokens, config.head_dim)
    return {"prompt": prompt, "masks": (described.num_masks, config.hidden_size)}
