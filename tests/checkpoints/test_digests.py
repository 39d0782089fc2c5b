"""Digests of checkpoints: every byte counts, unchanged files are not read again, and nobody reads more than its part."""

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
from pipedec.checkpoints.digests import CONFIG_FILES, MAX_ENTRIES, config_digest, fingerprint, tensor_digests, weights_digest
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


@pytest.mark.failure_case("M2")
def test_one_bit_makes_other_weights_but_the_same_configuration(checkpoint: Path) -> None:
    config, weights = config_digest(checkpoint), weights_digest(checkpoint, None)
    flip_a_bit(checkpoint / "model.safetensors", -1)
    assert weights_digest(checkpoint, None) != weights
    assert config_digest(checkpoint) == config


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
    config, weights = config_digest(checkpoint), weights_digest(checkpoint, None)
    (checkpoint / name).write_text((checkpoint / name).read_text() + " ")
    assert config_digest(checkpoint) != config
    assert weights_digest(checkpoint, None) == weights


def test_an_unchanged_file_is_read_once(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = count_reads(monkeypatch)
    cache = tmp_path / "cache"
    size = sum(tensor.num_bytes for tensor in TensorFiles(checkpoint).places.values())
    first = weights_digest(checkpoint, cache)
    assert weights_digest(checkpoint, cache) == first == weights_digest(checkpoint, None)
    assert sum(read) == 2 * size, "once into the cache, once without it"
    flip_a_bit(checkpoint / "model.safetensors", -1)
    assert weights_digest(checkpoint, cache) != first


@pytest.mark.parametrize("entry", ["", "[1]", '{"file": 1, "tensors": []}'])
def test_a_damaged_cache_is_made_anew(entry: str, checkpoint: Path, tmp_path: Path) -> None:
    first = weights_digest(checkpoint, tmp_path / "cache")
    (cached,) = (tmp_path / "cache" / "digests").iterdir()
    cached.write_text(entry)
    assert weights_digest(checkpoint, tmp_path / "cache") == first
    assert cached.read_text() != entry
    assert weights_digest(checkpoint, Path("/proc/nowhere")) == first, "without a place for it"


def test_the_cache_keeps_the_newest(checkpoint: Path, tmp_path: Path) -> None:
    weights_digest(checkpoint, tmp_path / "cache")
    (oldest,) = (tmp_path / "cache" / "digests").iterdir()
    for number in range(MAX_ENTRIES):
        weights = tmp_path / str(number) / "model.safetensors"
        weights.parent.mkdir()
        save_file({"one": torch.ones(1)}, weights)
        weights_digest(weights.parent, tmp_path / "cache")
    assert len(list((tmp_path / "cache" / "digests").iterdir())) == MAX_ENTRIES and not oldest.exists()


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
    needed = {tensor.file.name for tensor in tensors}
    for file in part.glob("*.safetensors"):
        if file.name not in needed:
            file.unlink()
    assert len(needed) < 6 < len(set(files.file_of.values())) and host.missing() == []
    read, headers = count_reads(monkeypatch), sum(_header_bytes(part / name) for name in needed)
    digests = [part_digests(parts, tmp_path / "cache", lambda done, total: None)["target"] for parts in ranks]
    assert sum(read) == sum(tensor.num_bytes for tensor in tensors)
    described = headers + sum((part / name).stat().st_size for name in CONFIG_FILES if (part / name).exists())
    assert described <= 0.01 * sum(read), "the headers, the index and the sizes are all else"
    for layer in (4, 5):
        StageModel.load(part, range(layer, layer + 1), torch.float32, "cpu")
    listed = part_digests([CheckpointPart("target", str(whole))], None, lambda done, total: None, whatever_is_here=True)["target"]
    assert digests[0].items() | digests[1].items() <= listed.items() and not digests[0].keys() & digests[1].keys()


def test_a_gguf_file_is_digested_by_tensors(pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = save_gguf(tmp_path / "model.gguf", pair.target, "F16")
    read = count_reads(monkeypatch)
    (part,) = rank_parts(2, [(0, 4), (4, 5), (5, 8)], {"target": file})
    digests = part_digests([part], None, lambda done, total: None)["target"]
    assert all(name.startswith("model.layers.4.") for name in digests) and 0 < sum(read) < file.stat().st_size / 4


def test_a_digest_can_be_given_up(checkpoint: Path) -> None:
    def give_up(done: int, total: int) -> None:
        if done:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        tensor_digests(TensorFiles(checkpoint).places.values(), None, give_up)


def _header_bytes(file: Path) -> int:
    return 8 + int.from_bytes(file.read_bytes()[:8], "little")
