"""GGUF files that cannot be used are refused in one line that names the file; what is derived is kept until the file changes."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.checkpoints import save_tiny_llama
from support.gguf_files import gguf_refusal, save_gguf

from pipedec.checkpoints import TensorFiles, fingerprint
from pipedec.config import state_directory
from pipedec.core.errors import UserError
from pipedec.engine.build import checked
from pipedec.families import context_length
from pipedec.gguf import TensorIndex, model_files

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("source")
    save_tiny_llama(directory, layers=2)
    return directory


@pytest.fixture
def file(source: Path, tmp_path: Path) -> Path:
    return save_gguf(tmp_path / "model.gguf", source)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"general__architecture": "mamba"}, "architecture 'mamba' is not supported; use one of llama, qwen2"),
        ({"llama__expert_count": 8}, "no field llama.expert_used_count"),
        ({"llama__block_count": None}, "no field llama.block_count"),
        ({"llama__attention__head_count_kv": [2, 1]}, "llama.attention.head_count_kv is not one number"),
        ({"llama__rope__dimension_count": 4}, "turns 4 of 8 numbers"),
        ({"llama__rope__scaling__type": "spiral", "llama__rope__scaling__factor": 2.0}, "scaled by 'spiral'"),
        ({"llama__block_count": 1_000_000_000}, "too few for 1000000000 layers"),
        ({"tokenizer__ggml__bos_token_id": "one"}, "metadata is damaged"),
        ({"tokenizer__ggml__merges": ["no such"]}, "metadata is damaged"),
        ({"split__count": 3}, "one of 3 parts"),
        ({"extra_tensors": {"rope_freqs.weight": np.full(4, 7.0, np.float32)}}, "rope_freqs.weight"),
        ({"extra_tensors": {"blk.0.ffn_gate_inp.weight": np.ones((8, 32), np.float32)}}, "blk.0.ffn_gate_inp.weight is not part"),
        ({"leave_out": ("token_embd.weight",)}, "no token_embd.weight"),
        ({"leave_out": ("blk.1.ffn_up.weight",)}, "model.layers.1.mlp.up_proj.weight is missing"),
        ({"leave_out": ("output_norm.weight",)}, "model.norm.weight is missing"),
        ({"llama__embedding_length": 48, "llama__attention__key_length": 8}, "has shape"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_not_supported_is_named(source: Path, tmp_path: Path, fields: dict[str, Any], words: str) -> None:
    assert words in gguf_refusal(save_gguf(tmp_path / "model.gguf", source, **fields))


def test_types_that_are_not_supported_are_named(tmp_path: Path) -> None:
    save_tiny_llama(tmp_path / "source", layers=1, hidden=256)
    message = gguf_refusal(save_gguf(tmp_path / "model.gguf", tmp_path / "source", "TQ1_0"))
    assert "has the type TQ1_0" in message and "Q4_K" in message


def test_files_that_end_early_other_files_and_none(file: Path, tmp_path: Path) -> None:
    whole = file.read_bytes()
    for left in (0, 3, 20, 1500, -1, -20_000):
        file.write_bytes(whole[:left])
        assert "not a whole GGUF file" in gguf_refusal(file)
    text, folder = tmp_path / "text.gguf", tmp_path / "folder.gguf"
    text.write_text("not a model" * 100)
    folder.mkdir()
    assert "not a whole GGUF file" in gguf_refusal(text)
    gguf_refusal(folder)
    assert "cannot be read" in gguf_refusal(tmp_path / "missing.gguf")


def test_damaged_headers_are_refused_or_harmless(file: Path) -> None:
    whole, generator = file.read_bytes(), random.Random(1)
    refused = 0
    for _ in range(40):
        damaged = bytearray(whole)
        for place in generator.sample(range(4, 1200), 3):
            damaged[place] = generator.randrange(256)
        file.write_bytes(damaged)
        try:
            checked(file)
        except UserError as error:
            refused += 1
            assert str(error).count("\n") == 0
    assert refused > 10


def test_a_file_that_is_cut_after_it_was_read(file: Path) -> None:
    index = TensorIndex.load(model_files(file))
    file.write_bytes(file.read_bytes()[:2000])
    with pytest.raises(UserError, match="cannot be read") as caught:
        for name in index.tensors:
            index.read(name, 0, 1)
    assert str(file) in str(caught.value)


def test_what_is_derived_is_kept_until_the_file_changes(source: Path, file: Path, own_cache: Path) -> None:
    first = model_files(file)
    written = (first / "config.json").stat().st_mtime_ns
    reader = (
        "import sys; from pathlib import Path; from pipedec.text.prompt import load_tokenizer; load_tokenizer(Path(sys.argv[1]));"
    )
    reader += "print({'gguf', 'torch', 'transformers'} & set(sys.modules))"
    again = subprocess.run([sys.executable, "-c", reader, str(file)], capture_output=True, text=True, timeout=60, check=True)
    assert again.stdout == "set()\n"
    assert (first / "config.json").stat().st_mtime_ns == written
    save_gguf(file, source, llama__context_length=77)
    assert model_files(file) != first
    assert context_length(file) == 77
    assert not list(own_cache.rglob("partial-*"))


def test_a_refused_file_leaves_nothing_in_the_cache(file: Path, own_cache: Path) -> None:
    file.write_bytes(file.read_bytes()[:300])
    gguf_refusal(file)
    assert [path.name for path in own_cache.rglob("*")] == ["gguf"]


def test_processes_that_read_a_file_at_once_agree(file: Path) -> None:
    reader = "import sys; from pipedec.gguf import model_files; print(model_files(sys.argv[1]))"
    readers = [
        subprocess.Popen([sys.executable, "-c", reader, str(file)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    said = [process.communicate(timeout=60) for process in readers]
    assert {out for out, _ in said} == {f"{model_files(file)}\n"}, said


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_cache_that_cannot_be_written(file: Path, own_cache: Path) -> None:
    own_cache.chmod(0o500)
    assert "PIPEDEC_STATE_DIR" in gguf_refusal(file)


def test_a_state_directory_that_is_made_is_private(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = tmp_path / "state"
    monkeypatch.setenv("PIPEDEC_STATE_DIR", str(state))
    model_files(file)
    (tmp_path / "elsewhere").mkdir()
    moved = Path(shutil.move(file, tmp_path / "elsewhere"))
    assert len(TensorFiles(moved).places) > 10 and fingerprint(moved), "the file may be moved"
    assert state.stat().st_mode & 0o777 == 0o700
    assert state_directory() == state
