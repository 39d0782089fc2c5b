"""Loading one stage of a large checkpoint needs little more memory than the stage's weights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints import save_tiny_llama
from support.gguf_files import K_TYPES, quantized, save_gguf
from support.quantized_files import QUANTIZATION, WRITERS

from pipedec.checkpoints import KnownTensors, LayerSpan
from pipedec.families import model_config
from pipedec.gguf.index import TensorIndex, TensorPlace

LOADER = """
import json, sys
from pathlib import Path
import torch
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from pipedec.families import model_config
from pipedec.model.matrices import DenseMatrix
from pipedec.model.stage_model import StageModel

DenseMatrix(torch.ones(256, 256)).prepared().linear(torch.ones(1, 256))  # whose code is resident from its first use on

def status(field):
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024

directory, start, stop, dtype = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), getattr(torch, sys.argv[4])
config = model_config(directory)
Path("/proc/self/clear_refs").write_text("5")  # resets the peak
before = status("VmRSS")
stage = StageModel.load(directory, range(start, stop), dtype, "cpu", config)
print(json.dumps({"growth": status("VmHWM") - before, "kept": status("VmRSS") - before, "weights": stage.stack.num_bytes}))
"""


pytestmark = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from /proc")


def load_layers(model: Path, layers: range, dtype: str = "float32") -> dict[str, int]:
    """What a process grew by at most while it loaded these layers, by how much it has then grown, and its weights; bytes."""
    arguments = [str(model), str(layers.start), str(layers.stop), dtype]
    root = Path(__file__).parents[2]
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "131072"}  # what is freed is given back, and does not count
    loader = subprocess.run(
        [sys.executable, "-c", LOADER, *arguments], capture_output=True, text=True, cwd=root, timeout=60, env=environment
    )
    assert loader.returncode == 0, loader.stderr
    return json.loads(loader.stdout)


@pytest.mark.slow
def test_peak_memory_is_little_more_than_the_stage(tmp_path: Path) -> None:
    save_tiny_llama(tmp_path, layers=40, hidden=352, vocab=512)
    on_disk = sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    measured = load_layers(tmp_path, range(10, 20))
    assert on_disk > 3.5 * measured["weights"] > 100 * 2**20
    assert measured["growth"] <= 1.2 * measured["weights"] + 10 * 2**20, f"{measured} of {on_disk} bytes on disk"


@pytest.mark.slow
@pytest.mark.usefixtures("own_cache")
def test_a_gguf_file_is_read_piece_by_piece(tmp_path: Path) -> None:
    save_tiny_llama(tmp_path / "source", layers=20, hidden=512, vocab=512)
    file = save_gguf(tmp_path / "model.gguf", tmp_path / "source", "Q8_0")
    measured = load_layers(file, range(10, 20))
    assert measured["weights"] > 20 * 2**20
    assert measured["growth"] <= 1.3 * measured["weights"] + 10 * 2**20, f"{measured}; {file.stat().st_size} bytes on disk"


GROUPED = ("gptq", "awq", "ct-int4")
LAYERS = 26  # equal ones
STAGE = range(1, 25)
CODE = 32 * 2**20  # of kernels, resident from their first use on
READ = 8 * 2**20  # a part of a matrix, of at most 4 Mi weights, while it is read and unpacked, and pages of its file
MORE = {("Q4_K", "bfloat16"): 10 / 9}  # torch's kernel takes 5 bits instead of 4.5


def save_stored(out: Path, name: str) -> None:
    """A checkpoint whose matrices are stored in a format of ``WRITERS``, those of 4 bits in groups of 128, or in blocks."""
    save_tiny_llama(out, layers=1, hidden=1024, vocab=64)
    config, file = json.loads((out / "config.json").read_text()), out / "model.safetensors"
    tensors, rng = load_file(file), np.random.default_rng(0)
    if name in K_TYPES:
        save_blocks(out, name, tensors)
        file.unlink()
    else:
        described = json.dumps(QUANTIZATION[name]).replace('"group_size": 32', '"group_size": 128')
        config["quantization_config"] = json.loads(described)
        written: dict[str, torch.Tensor] = {}
        for weight, tensor in tensors.items():
            parts = {"weight": tensor}
            if weight.endswith("_proj.weight"):
                parts, _ = WRITERS[name](tensor, rng, **({"group": 128} if name in GROUPED else {}))
            written |= {one: part.clone() for suffix, part in parts.items() for one in of_layers(weight, suffix)}
        save_file(written, file, {"format": "pt"})
    (out / "config.json").write_text(json.dumps({**config, "num_hidden_layers": LAYERS}))


def of_layers(weight: str, suffix: str = "weight") -> list[str]:
    """The names of a part of a tensor of layer 0 in all layers; of any other tensor, its name alone."""
    own = weight.removesuffix("weight") + suffix
    return [own.replace(".layers.0.", f".layers.{layer}.") for layer in range(LAYERS if ".layers." in own else 1)]


def save_blocks(out: Path, kind: str, tensors: Mapping[str, torch.Tensor]) -> None:
    """The tensors as in a GGUF file, matrices as random blocks. All layers have the same ones."""
    places: dict[str, TensorPlace] = {}
    written = b""
    for weight, tensor in tensors.items():
        is_stored = weight.endswith("_proj.weight")
        data = (quantized(tensor.numpy(), kind) if is_stored else tensor.numpy()).tobytes()
        place = TensorPlace(kind if is_stored else "F32", tuple(tensor.shape), len(written), len(data))
        places |= dict.fromkeys(of_layers(weight), place)
        written += data
    (out / "model.gguf").write_bytes(written)
    TensorIndex(out / "model.gguf", places).save(out)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*GROUPED, "ct-w8a8", "fp8-blocks", "mxfp4", "nf4", "nf4-nested", *K_TYPES])
def test_stored_formats_take_the_bytes_of_the_file(tmp_path: Path, name: str) -> None:
    save_stored(tmp_path, name)
    span = LayerSpan(STAGE, first=False, last=False)
    stored = sum(KnownTensors(model_config(tmp_path)).file_bytes(span, 4).values())
    assert stored > 110 * 2**20
    for dtype in ("float32", "bfloat16"):
        measured, most = load_layers(tmp_path, STAGE, dtype), 1.03 * MORE.get((name, dtype), 1) * stored
        assert measured["weights"] <= most, f"{dtype}: {measured} of {stored} bytes"
        assert measured["kept"] <= most + CODE, f"{dtype}: {measured} of {stored} bytes"
        assert measured["growth"] <= most + CODE + READ, f"{dtype}: {measured} of {stored} bytes"
