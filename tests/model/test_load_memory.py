"""Loading one stage of a large checkpoint needs little more memory than the stage's weights."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import save_tiny_llama

LOADER = """
import json, sys
from pathlib import Path
import torch
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from pipedec.model.config import ModelConfig
from pipedec.model.stage_model import StageModel

def status(field):
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024

directory, start, stop = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
config = ModelConfig.from_directory(directory)
Path("/proc/self/clear_refs").write_text("5")  # resets the peak
before = status("VmRSS")
stage = StageModel.load(directory, range(start, stop), torch.float32, "cpu", config)
print(json.dumps({"growth": status("VmHWM") - before, "weights": stage.num_bytes}))
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from /proc")
@pytest.mark.parametrize("max_shard_size", ["40MB", "1GB"])
def test_peak_memory_is_little_more_than_the_stage(tmp_path, max_shard_size):
    save_tiny_llama(tmp_path, layers=40, hidden=352, vocab=512, max_shard_size=max_shard_size)
    on_disk = sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    root = Path(__file__).parents[2]
    loader = subprocess.run(
        [sys.executable, "-c", LOADER, str(tmp_path), "10", "20"], capture_output=True, text=True, cwd=root, timeout=60
    )
    assert loader.returncode == 0, loader.stderr
    measured = json.loads(loader.stdout)
    assert on_disk > 3.5 * measured["weights"] > 100 * 2**20
    assert measured["growth"] <= 1.2 * measured["weights"] + 10 * 2**20, f"{measured} of {on_disk} bytes on disk"
