"""Loading one stage of a large checkpoint needs little more memory than the stage's weights."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.checkpoints import save_tiny_llama
from support.gguf_files import save_gguf

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

directory, start, stop = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
config = model_config(directory)
Path("/proc/self/clear_refs").write_text("5")  # resets the peak
before = status("VmRSS")
stage = StageModel.load(directory, range(start, stop), torch.float32, "cpu", config)
print(json.dumps({"growth": status("VmHWM") - before, "weights": stage.stack.num_bytes}))
"""


pytestmark = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from /proc")


def load_ten_layers(model: Path) -> dict[str, int]:
    """What a process grew by at most while it loaded layers 10 to 20, and what it keeps; bytes."""
    root = Path(__file__).parents[2]
    loader = subprocess.run(
        [sys.executable, "-c", LOADER, str(model), "10", "20"], capture_output=True, text=True, cwd=root, timeout=60
    )
    assert loader.returncode == 0, loader.stderr
    return json.loads(loader.stdout)


@pytest.mark.slow
def test_peak_memory_is_little_more_than_the_stage(tmp_path):
    save_tiny_llama(tmp_path, layers=40, hidden=352, vocab=512)
    on_disk = sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    measured = load_ten_layers(tmp_path)
    assert on_disk > 3.5 * measured["weights"] > 100 * 2**20
    assert measured["growth"] <= 1.2 * measured["weights"] + 10 * 2**20, f"{measured} of {on_disk} bytes on disk"


@pytest.mark.slow
@pytest.mark.usefixtures("own_cache")
def test_a_gguf_file_is_read_piece_by_piece(tmp_path):
    save_tiny_llama(tmp_path / "source", layers=20, hidden=512, vocab=512)
    file = save_gguf(tmp_path / "model.gguf", tmp_path / "source", "Q8_0")
    measured = load_ten_layers(file)
    assert measured["weights"] > 20 * 2**20
    assert measured["growth"] <= 1.3 * measured["weights"] + 10 * 2**20, f"{measured}; {file.stat().st_size} bytes on disk"
