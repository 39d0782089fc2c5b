"""Which dtype ``auto`` stands for: 16 bits where the devices compute them fast; and whether weights keep their formats.

The target's dtype changes what is computed, so every rank must have the same one; the draft's changes only how fast answers come.
Knows what a device can do by its ``Arithmetic`` alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from pipedec.config import AUTO
from pipedec.core.errors import UserError
from pipedec.families import ModelConfig
from pipedec.formats import ALL_PLAIN, Formats
from pipedec.hardware import DEVICES
from pipedec.messages.run import Choice

_16_BITS = ("bfloat16", "float16")
GIVEN = "as given"


@dataclass(frozen=True)
class Arithmetic:
    """Whether a device has instructions for 16-bit formats. All GPUs have float16, which is not used on processors."""

    is_gpu: bool
    has_bfloat16: bool

    @classmethod
    def planned(cls, device: str) -> Arithmetic:
        """The arithmetic of a kind of device in a plan, which does not know the processor: without bfloat16 instructions."""
        return cls(DEVICES[device].is_gpu, DEVICES[device].is_gpu)


def target_dtype(given: str, checkpoint: str, stages: Iterable[Arithmetic]) -> Choice:
    """The dtype of the target on all of its ``stages``: as ``given``, unless that is ``auto``.

    On GPUs it is the checkpoint's, or float16 if one of them has no bfloat16. With a stage on a CPU it is float32, in which all
    methods give the same tokens on every processor.
    """
    devices = list(stages)
    if given != AUTO:
        return Choice(given, GIVEN)
    if not all(device.is_gpu for device in devices):
        return Choice("float32", "the target runs on a CPU: --dtype bfloat16 takes half the memory")
    if checkpoint not in _16_BITS:
        return Choice("float32", "the checkpoint has no 16 bits: --dtype bfloat16 takes half the memory")
    if checkpoint == "bfloat16" and not all(device.has_bfloat16 for device in devices):
        return Choice("float16", "a GPU has no bfloat16 instructions")
    return Choice(checkpoint, "the checkpoint's own")


def draft_dtype(given: str, target: str, device: Arithmetic) -> Choice:
    """The dtype of the draft: as ``given``; for ``auto`` 16 bits where its device computes them, as the target's if it has 16."""
    if given != AUTO:
        return Choice(given, GIVEN)
    if not device.is_gpu:
        if device.has_bfloat16:
            return Choice("bfloat16", "this processor has bfloat16 instructions")
        return Choice("float32", "this processor has no bfloat16 instructions")
    if target == "float16" or not device.has_bfloat16:
        return Choice("float16", "as the target" if target == "float16" else "the GPU has no bfloat16 instructions")
    return Choice("bfloat16", "a GPU computes 16 bits faster")


def kept_formats(dequantize: str) -> Formats | None:
    """The formats of weights in memory by the setting ``dequantize``; None for those of the checkpoint. A CPU that widens some of
    them by itself has the memory for it.
    """
    return ALL_PLAIN if dequantize == "always" else None


def check_quantize(name: str, quantize: str | None, model: str | Path, config: ModelConfig) -> None:
    """Raises UserError if weights that a model has in fewer bits were to be rounded once more, as the setting ``name`` says."""
    if quantize is not None and config.formats is not ALL_PLAIN:
        raise UserError(
            f"{name} is {quantize}, but the weights of {model} are quantized already ({config.formats.title}): leave it out, or "
            "give the unquantized checkpoint"
        )
