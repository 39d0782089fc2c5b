"""Digests of checkpoints: whatever was trained differs, a host reads a sample of its own tensors, and no more."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from support.checkpoints import save_tiny_llama
from support.gguf_files import save_gguf
from support.tiny_pair import Pair

from pipedec.checkpoints import CheckpointPart, TensorFiles, merged, part_digests, rank_parts
from pipedec.checkpoints.digests import BLOCK_BYTES, BLOCKS, config_digest, fingerprint, weights_digest
from pipedec.model import StageModel


@pytest.fixture
def checkpoint(pair: Pair, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pair.target, tmp_path / "checkpoint"))


def count_reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of every piece of a file that is read to be digested, from now on."""
    read: list[int] = []
    pread = os.pread

    def counting(file: int, length: int, offset: int) -> bytes:
        piece = pread(file, length, offset)
        read.append(len(piece))
        return piece

    monkeypatch.setattr(os, "pread", counting)
    return read


def flip_a_bit(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def test_a_bit_of_a_small_tensor_makes_other_weights_but_the_same_configuration(checkpoint: Path) -> None:
    config, weights = config_digest(checkpoint), weights_digest(checkpoint)
    flip_a_bit(checkpoint / "model.safetensors", -1)
    assert weights_digest(checkpoint) != weights
    assert config_digest(checkpoint) == config


@pytest.mark.parametrize("place", [0.0, 0.3, 0.7, 1.0])
def test_a_sample_covers_beginning_middle_and_end_of_a_large_tensor(place: float, tmp_path: Path) -> None:
    """Fifteen of a hundred rows are found wherever they are."""
    rows = torch.zeros(100, BLOCK_BYTES)
    file = tmp_path / "model.safetensors"
    save_file({"one": rows}, file)
    before = weights_digest(tmp_path)
    start = round(place * 86)
    rows[start : start + 15] = 1
    save_file({"one": rows}, file)
    assert weights_digest(tmp_path) != before


@pytest.mark.parametrize(("first", "second"), [(torch.zeros(6), torch.zeros(2, 3)), (torch.zeros(2), torch.zeros(2).int())])
def test_shapes_and_types_count(first: torch.Tensor, second: torch.Tensor, tmp_path: Path) -> None:
    digests = []
    for tensor in (first, second):
        save_file({"one": tensor}, tmp_path / "model.safetensors")
        digests.append(weights_digest(tmp_path))
    assert digests[0] != digests[1]


def test_another_checkpoint_of_the_same_shape_is_told_without_reading_it_whole(pair: Pair, checkpoint: Path) -> None:
    quick = fingerprint(checkpoint)
    assert fingerprint(checkpoint) == quick == fingerprint(pair.target) and len(quick) == 16, "wherever it is"
    file = checkpoint / "model.safetensors"
    with safe_open(str(file), framework="pt") as opened:
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - the handle is not a mapping
    save_file({name: tensor * 1.01 for name, tensor in tensors.items()}, file)
    assert fingerprint(checkpoint) != quick


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_configuration_and_tokenizer_count(name: str, checkpoint: Path) -> None:
    config, weights = config_digest(checkpoint), weights_digest(checkpoint)
    (checkpoint / name).write_text((checkpoint / name).read_text() + " ")
    assert config_digest(checkpoint) != config
    assert weights_digest(checkpoint) == weights


def test_a_host_reads_its_own_tensors_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of 14 stages. The shards of the others are not there; of those that it shares it reads its own tensors."""
    whole, part = tmp_path / "whole", tmp_path / "part"
    save_tiny_llama(whole, layers=14, hidden=256, max_shard_size="1700KB")
    shutil.copytree(whole, part)
    save_tiny_llama(tmp_path / "one file", layers=14, hidden=256)
    assert fingerprint(tmp_path / "one file") == fingerprint(whole), "however it is cut"
    ranks = [rank_parts(rank, [(layer, layer + 1) for layer in range(14)], {"target": part}) for rank in (5, 6)]
    (host,) = merged(found for parts in ranks for found in parts)
    files = TensorFiles(whole)
    tensors = [files.places[name] for name in host.tensors(files)]
    needed, host_bytes = {tensor.file.name for tensor in tensors}, sum(tensor.num_bytes for tensor in tensors)
    for file in part.glob("*.safetensors"):
        if file.name not in needed:
            file.unlink()
    assert len(needed) < 6 < len(set(files.file_of.values())) and host.missing() == []
    read = count_reads(monkeypatch)
    digests = [part_digests(parts)["target"] for parts in ranks]
    assert sum(read) == sum(min(tensor.num_bytes, BLOCKS * BLOCK_BYTES) for tensor in tensors) < 0.2 * host_bytes
    for layer in (4, 5):
        StageModel.load(part, range(layer, layer + 1), torch.float32, "cpu")
    listed = part_digests([CheckpointPart("target", str(whole))], whatever_is_here=True)["target"]
    assert digests[0].items() | digests[1].items() <= listed.items() and not digests[0].keys() & digests[1].keys()


def test_a_gguf_file_is_digested_by_tensors(pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = save_gguf(tmp_path / "model.gguf", pair.target, "F16")
    read = count_reads(monkeypatch)
    (part,) = rank_parts(2, [(0, 4), (4, 5), (5, 8)], {"target": file})
    digests = part_digests([part])["target"]
    assert all(name.startswith("model.layers.4.") for name in digests) and 0 < sum(read) < file.stat().st_size / 4
