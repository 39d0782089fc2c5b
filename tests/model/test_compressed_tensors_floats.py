"""8-bit floating-point numbers of llm-compressor, beside what the package compressed-tensors makes of the same files."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints import save_tiny
from support.quantized_files import LINEAR
from support.stage_chain import StageChain

from pipedec.families import model_config
from pipedec.model.formats import QuantizedMatrix, empty_matrix
from pipedec.model.weights import Checkpoint

LARGEST = 448.0  # of E4M3
BLOCK = (32, 16)


def block_scales(weight: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    blocks = weight.abs().unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
    return blocks.amax((1, 3)) / LARGEST


SCALES = {
    "tensor": lambda weight: weight.abs().max().view(1) / LARGEST,
    "channel": lambda weight: weight.abs().amax(1, keepdim=True) / LARGEST,
    "block": lambda weight: block_scales(weight, *BLOCK),
}


@pytest.mark.parametrize("kind", ["float-quantized", "naive-quantized"])
@pytest.mark.parametrize("strategy", SCALES)
def test_matrices_and_logits_are_those_of_the_package(tmp_path: Path, strategy: str, kind: str) -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.naive_quantized import FloatQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    more: dict[str, Any] = {"block_structure": list(BLOCK)} if strategy == "block" else {}
    scheme = QuantizationScheme(
        targets=["Linear"], weights=QuantizationArgs(num_bits=8, type="float", strategy=strategy, symmetric=True, **more)
    )
    save_tiny("llama", tmp_path / "dense", hidden=64, layers=2)
    dense, written = load_file(tmp_path / "dense" / "model.safetensors"), {}
    for name, weight in dense.items():
        if not re.search(LINEAR, name):
            written[name] = weight
            continue
        stored = FloatQuantizationCompressor.compress({"weight": weight, "weight_scale": SCALES[strategy](weight)}, scheme)
        dense[name] = FloatQuantizationCompressor.decompress(dict(stored), scheme)["weight"]
        written |= {name.removesuffix("weight") + suffix: tensor for suffix, tensor in stored.items()}
    config = json.loads((tmp_path / "dense" / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors", "format": kind, "ignore": ["lm_head"],
        "config_groups": {"group_0": json.loads(scheme.model_dump_json())},
    }  # fmt: skip
    save_file(dense, tmp_path / "dense" / "model.safetensors")
    path = tmp_path / "quantized"
    path.mkdir()
    save_file(written, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))

    checkpoint, model = Checkpoint(path), model_config(path)
    checkpoint.check_complete(model)
    for name in filter(re.compile(LINEAR).search, dense):
        shape = tuple(dense[name].shape)
        matrix = empty_matrix(checkpoint.format_of(model, name, shape), *shape, torch.float32, torch.device("cpu"))
        assert isinstance(matrix, QuantizedMatrix)
        checkpoint.read_into({name: matrix})
        assert torch.equal(matrix.widened(), dense[name]), name
    ids = torch.arange(20)
    expected = StageChain(tmp_path / "dense", (2,)).prefill(ids, 20)
    torch.testing.assert_close(StageChain(path, (1, 1)).prefill(ids, 20), expected, atol=3e-5, rtol=1e-5)
