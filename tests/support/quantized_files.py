"""Quantized checkpoints, written from the published layouts of their formats. Shares no code with what reads them.

``WRITERS`` round a matrix to the nearest numbers of a format; each returns the tensors of the file and the float32 matrix that is
meant. ``QUANTIZATION`` has the ``quantization_config`` of a checkpoint of such matrices. ``write_quantized_checkpoint`` makes one
of an ordinary checkpoint.

Shape legend: N outputs, K inputs, G groups of inputs.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from pipedec.checkpoints import LayerSpan, span_shapes
from pipedec.families import model_config
from pipedec.formats import PLAIN
from pipedec.gguf import model_files
from pipedec.model import Checkpoint, WidenedMatrix
from support import quantized_float_files

GROUP = 32
LINEAR = r"\.\d+\..*_proj\.weight$|\.experts\.\w+_proj$"  # matrices that a checkpoint has quantized, and stacks of them
AWQ_OUTPUTS = (0, 2, 4, 6, 1, 3, 5, 7)  # the output in each 4 bits of a word, lowest first

Tensors = dict[str, torch.Tensor]
Writer = Callable[..., tuple[Tensors, torch.Tensor]]
Integers = NDArray[np.int64]


class Rounded:
    """A matrix rounded to integers.

    Attributes:
        codes: [N, K], from 0 on.
        zeros: [N, G], the integer that stands for 0.
        scales: [N, G].
        groups: [K], the group of each input.
        dense: float32 [N, K].
    """

    def __init__(
        self, weight: torch.Tensor, groups: Integers, bits: int, symmetric: bool, dtype: torch.dtype, is_single: bool = False
    ) -> None:
        values, top = weight.float().numpy().astype(np.float64), 2**bits - 1
        outputs, count = len(values), int(groups.max()) + 1
        low, high = np.zeros((outputs, count)), np.zeros((outputs, count))
        for group in range(count):
            inside = values[:, groups == group]
            low[:, group], high[:, group] = inside.min(1).clip(max=0), inside.max(1).clip(min=0)
        if is_single:
            low[:], high[:] = low.min(), high.max()
        spread = 2 * np.maximum(-low, high) if symmetric else high - low
        self.scales = torch.from_numpy(np.maximum(spread / top, 1e-4)).to(dtype)
        scales = self.scales.double().numpy()
        self.zeros = (
            np.full(low.shape, 2 ** (bits - 1)) if symmetric else np.clip(np.round(-low / scales), 0, top).astype(np.int64)
        )
        codes = np.round(values / scales[:, groups]) + self.zeros[:, groups]
        self.codes: Integers = np.clip(codes, 0, top).astype(np.int64)
        self.groups = groups
        steps = torch.from_numpy(self.codes - self.zeros[:, groups]).float()
        self.dense = steps * self.scales.float()[:, torch.from_numpy(groups)]


def natural_groups(inputs: int, group: int) -> Integers:
    """[K], for groups of consecutive inputs; 0 for one group."""
    return np.arange(inputs) // (group or inputs)


def shuffled_groups(inputs: int, group: int, rng: np.random.Generator) -> Integers:
    """[K], as inputs that were sorted by activations have them."""
    return rng.permutation(natural_groups(inputs, group))


def words(numbers: Integers, bits: int, fields: tuple[int, ...] | None = None) -> torch.Tensor:
    """int32, with 32 / bits numbers of the last axis in each word; ``fields``: which of them, lowest bits first."""
    per_word = 32 // bits
    *lead, size = numbers.shape
    found = np.zeros((*lead, -(-size // per_word)), np.uint64)
    for word in range(found.shape[-1]):
        for place in range(per_word):
            number = word * per_word + (fields[place] if fields else place)
            if number < size:
                found[..., word] += numbers[..., number].astype(np.uint64) << np.uint64(bits * place)
    return torch.from_numpy(found.astype(np.uint32).view(np.int32).copy())


def gptq(
    weight: torch.Tensor,
    rng: np.random.Generator,
    bits: int = 4,
    group: int = GROUP,
    symmetric: bool = True,
    version: int = 1,
    ordered: bool = False,
    dtype: torch.dtype = torch.float16,
) -> tuple[Tensors, torch.Tensor]:
    """AutoGPTQ's and GPTQModel's tensors; ``version`` 1 stores zero points less 1, which may wrap."""
    inputs = weight.shape[1]
    groups = shuffled_groups(inputs, group, rng) if ordered else natural_groups(inputs, group)
    found = Rounded(weight, groups, bits, symmetric, dtype)
    stored_zeros = (found.zeros - (version == 1)) % 2**bits
    tensors = {
        "qweight": words(found.codes, bits).T.contiguous(),
        "qzeros": words(stored_zeros.T, bits),
        "scales": found.scales.T.contiguous(),
        "g_idx": torch.from_numpy(groups).int(),
    }
    return tensors, found.dense


def awq(
    weight: torch.Tensor, rng: np.random.Generator, group: int = GROUP, dtype: torch.dtype = torch.float16
) -> tuple[Tensors, torch.Tensor]:
    """AutoAWQ's tensors of version ``gemm``."""
    found = Rounded(weight, natural_groups(weight.shape[1], group), 4, False, dtype)
    tensors = {
        "qweight": words(found.codes.T, 4, AWQ_OUTPUTS),
        "qzeros": words(found.zeros.T, 4, AWQ_OUTPUTS),
        "scales": found.scales.T.contiguous(),
    }
    return tensors, found.dense


def compressed_tensors(
    weight: torch.Tensor,
    rng: np.random.Generator,
    bits: int = 4,
    group: int = GROUP,
    symmetric: bool = True,
    packed: bool = True,
    is_single: bool = False,
    ordered: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[Tensors, torch.Tensor]:
    """llm-compressor's tensors: ``pack-quantized``, or a byte for each number; ``is_single``: one scale for the matrix."""
    outputs, inputs = weight.shape
    groups = shuffled_groups(inputs, group, rng) if ordered else natural_groups(inputs, group)
    found, middle = Rounded(weight, groups, bits, symmetric, dtype, is_single), 2 ** (bits - 1)
    tensors = {"weight_scale": found.scales[0, :1].clone() if is_single else found.scales}
    if packed:
        tensors |= {"weight_packed": words(found.codes, bits), "weight_shape": torch.tensor([outputs, inputs])}
    else:
        tensors["weight"] = torch.from_numpy(found.codes - middle).to(torch.int8)
    if not symmetric:
        signed = torch.from_numpy(found.zeros - middle).to(torch.int8)
        tensors["weight_zero_point"] = words(found.zeros.T, bits).T.contiguous() if packed else signed
    if ordered:
        tensors["weight_g_idx"] = torch.from_numpy(groups).int()
    return tensors, found.dense


def _scheme(kind: str, bits: int, group: int | None, symmetric: bool = True, **more: Any) -> dict[str, Any]:
    """``quantization_config`` of compressed-tensors with one scheme; ``group``: -1 for a scale per output, None for one."""
    strategy = {None: "tensor", -1: "channel"}.get(group, "group")
    weights = {
        "num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": strategy, "dynamic": False,
        "group_size": group if strategy == "group" else None, "actorder": None, "block_structure": None, **more,
    }  # fmt: skip
    scheme = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": kind, "quantization_status": "compressed", "ignore": ["lm_head"],
        "config_groups": {"group_0": scheme}, "kv_cache_scheme": None,
    }  # fmt: skip


_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True, "desc_act": False, "checkpoint_format": "gptq"}
_AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
_AUTOROUND = {
    "quant_method": "auto-round", "bits": 4, "group_size": GROUP, "sym": True, "data_type": "int",
    "packing_format": "auto_round:auto_gptq",
}  # fmt: skip


def _nearest(
    writer: quantized_float_files.Writer, weight: torch.Tensor, rng: np.random.Generator
) -> tuple[Tensors, torch.Tensor]:
    del rng
    return writer(weight, None)


WRITERS: dict[str, Writer] = {
    "gptq": gptq,
    "gptq-tagged-v1-but-v2": partial(gptq, version=2),
    "gptq-asymmetric": partial(gptq, symmetric=False),
    "gptq-v2-asymmetric": partial(gptq, symmetric=False, version=2),
    "gptq-ordered": partial(gptq, ordered=True),
    "gptq-ordered-asymmetric": partial(gptq, ordered=True, symmetric=False),
    "gptq-per-output": partial(gptq, group=0),
    "gptq-8bit": partial(gptq, bits=8),
    "gptq-8bit-v2": partial(gptq, bits=8, version=2, dtype=torch.bfloat16),
    "gptq-8bit-asymmetric": partial(gptq, bits=8, symmetric=False),
    "awq": awq,
    "autoround": gptq,
    "autoround-awq": awq,
    "ct-int4": compressed_tensors,
    "ct-int4-asymmetric": partial(compressed_tensors, symmetric=False),
    "ct-int4-per-output": partial(compressed_tensors, group=0, dtype=torch.float32),
    "ct-int4-ordered": partial(compressed_tensors, ordered=True),
    "ct-int8": partial(compressed_tensors, bits=8),
    "ct-int8-asymmetric": partial(compressed_tensors, bits=8, symmetric=False),
    "ct-w8a8": partial(compressed_tensors, bits=8, group=0, packed=False),
    "ct-w8-asymmetric": partial(compressed_tensors, bits=8, group=0, packed=False, symmetric=False),
    "ct-w8-single": partial(compressed_tensors, bits=8, group=0, packed=False, is_single=True),
}
QUANTIZATION: dict[str, dict[str, Any]] = {
    "gptq": _GPTQ,
    "gptq-tagged-v1-but-v2": _GPTQ,
    "gptq-asymmetric": {**_GPTQ, "sym": False},
    "gptq-v2-asymmetric": {**_GPTQ, "sym": False, "checkpoint_format": "gptq_v2"},
    "gptq-ordered": {**_GPTQ, "desc_act": True},
    "gptq-ordered-asymmetric": {**_GPTQ, "desc_act": True, "sym": False},
    "gptq-per-output": {**_GPTQ, "group_size": -1, "desc_act": True},
    "gptq-8bit": {**_GPTQ, "bits": 8},
    "gptq-8bit-v2": {**_GPTQ, "bits": 8},
    "gptq-8bit-asymmetric": {**_GPTQ, "bits": 8, "sym": False},
    "awq": _AWQ,
    "autoround": _AUTOROUND,
    "autoround-awq": {**_AUTOROUND, "sym": False, "packing_format": "auto_round:auto_awq"},
    "ct-int4": _scheme("pack-quantized", 4, GROUP),
    "ct-int4-asymmetric": _scheme("pack-quantized", 4, GROUP, symmetric=False),
    "ct-int4-per-output": _scheme("pack-quantized", 4, -1),
    "ct-int4-ordered": _scheme("pack-quantized", 4, GROUP, actorder="group"),
    "ct-int8": _scheme("pack-quantized", 8, GROUP),
    "ct-int8-asymmetric": _scheme("pack-quantized", 8, GROUP, symmetric=False),
    "ct-w8a8": _scheme("int-quantized", 8, -1),
    "ct-w8-asymmetric": _scheme("naive-quantized", 8, -1, symmetric=False),
    "ct-w8-single": _scheme("int-quantized", 8, None),
}
WRITERS |= {name: partial(_nearest, writer) for name, writer in quantized_float_files.WRITERS.items()}
QUANTIZATION |= quantized_float_files.QUANTIZATION
QUANTIZATION["ct-w8a8"]["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8, "type": "int", "dynamic": True}


def write_quantized_checkpoint(
    source: Path,
    out: Path,
    format_name: str,
    rng: np.random.Generator | None = None,
    *,
    dense: Path | None = None,
    others: Mapping[str, str | None] | None = None,
    quantization: Mapping[str, Any] | None = None,
    has_inputs_first: bool = False,
) -> Tensors:
    """Quantize the linear maps of the layers of a checkpoint; everything else is copied.

    Args:
        dense: where a checkpoint is written with the same weights as float32 numbers.
        others: formats of modules whose names a regular expression finds; None for those that stay as they are. The first counts.
        quantization: replaces keys of ``quantization_config``; those with None are left out.
        has_inputs_first: whether stacks of matrices of experts in ``source`` have inputs before outputs, unlike quantized ones.

    Returns:
        All weights of ``dense``.
    """
    tensors = {name: tensor for file in sorted(source.glob("*.safetensors")) for name, tensor in load_file(file).items()}
    written: Tensors = {}
    plain, rng = dict(tensors), rng or np.random.default_rng(0)
    for name, weight in tensors.items():
        chosen = next((one for found, one in (others or {}).items() if re.search(found, name)), format_name)
        is_linear = re.search(LINEAR, name) or any(re.search(found, name) for found in others or {})
        if not is_linear or chosen is None:
            written[name] = weight
            continue
        if weight.dim() == 2:
            parts, plain[name] = WRITERS[chosen](weight, rng)
            written |= {name.removesuffix("weight") + suffix: tensor for suffix, tensor in parts.items()}
            continue
        stack = weight.mT if has_inputs_first else weight
        matrices, dense_matrices = zip(*(WRITERS[chosen](matrix.contiguous(), rng) for matrix in stack), strict=True)
        plain[name] = torch.stack(dense_matrices).mT if has_inputs_first else torch.stack(dense_matrices)
        for suffix in matrices[0]:
            written[name + suffix.removeprefix("weight")] = torch.stack([parts[suffix] for parts in matrices])
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    changed = quantization or {}
    described = {
        key: value for key, value in {**QUANTIZATION[format_name], **changed}.items() if changed.get(key, "") is not None
    }
    _write(source, out, written, {**config, "quantization_config": described})
    if dense is not None:
        _write(source, dense, plain, config)
    return plain


def write_dense_checkpoint(model: str | Path, out: Path) -> None:
    """Any model that pipedec reads, in float32."""
    config, checkpoint = model_config(model), Checkpoint(model)
    span = LayerSpan(range(config.num_hidden_layers), first=True, last=True)
    tensors = {name: torch.empty(shape) for name, shape in span_shapes(config, span, checkpoint.names).items()}
    formats = {name: checkpoint.format_of(config, name, tuple(tensor.shape)) for name, tensor in tensors.items()}
    checkpoint.read_into(
        {
            name: tensor if formats[name] is PLAIN else WidenedMatrix(tensor, [(formats[name], len(tensor))])
            for name, tensor in tensors.items()
        }
    )
    source = model_files(model)
    stated = json.loads((source / "config.json").read_text(encoding="utf-8"))
    _write(source, out, tensors, {key: value for key, value in stated.items() if key != "quantization_config"})
    (out / "gguf.json").unlink(missing_ok=True)


def _write(source: Path, out: Path, tensors: Tensors, config: Mapping[str, Any]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.is_file() and not file.name.startswith("model.safetensors") and file.suffix != ".safetensors":
            shutil.copy(file, out / file.name)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, out / "model.safetensors", {"format": "pt"})
    (out / "config.json").write_text(json.dumps(config), encoding="utf-8")


def main() -> None:
    """Write a model, quantized anew: MODEL FORMAT OUT."""
    model, name, out = sys.argv[1:]
    if name not in WRITERS:
        raise SystemExit(f"no format {name!r}: give one of {', '.join(WRITERS)}")
    with tempfile.TemporaryDirectory() as folder:
        write_dense_checkpoint(model, Path(folder))
        write_quantized_checkpoint(Path(folder), Path(out), name)


if __name__ == "__main__":
    main()
