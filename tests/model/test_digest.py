"""Digests of checkpoints: every byte counts, and unchanged files are not read again."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.torch import save_file
from support.tiny_pair import Pair

from pipedec.config import state_directory
from pipedec.directories import cache_directory
from pipedec.model.digest import MAX_ENTRIES, config_digest, quick_digest, weights_digest


@pytest.fixture
def checkpoint(pair: Pair, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pair.target, tmp_path / "checkpoint"))


def flip_a_bit(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def test_one_bit_makes_other_weights_but_the_same_configuration(checkpoint: Path) -> None:
    config, weights = config_digest(checkpoint), weights_digest(checkpoint, None)
    flip_a_bit(checkpoint / "model.safetensors", -1)
    assert weights_digest(checkpoint, None) != weights
    assert config_digest(checkpoint) == config


def test_another_checkpoint_of_the_same_shape_is_told_without_reading_it_whole(checkpoint: Path) -> None:
    quick = quick_digest(checkpoint)
    assert quick_digest(checkpoint) == quick
    file = checkpoint / "model.safetensors"
    with safe_open(str(file), framework="pt") as opened:
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - the handle is not a mapping
    save_file({name: tensor * 1.01 for name, tensor in tensors.items()}, file)
    assert quick_digest(checkpoint) != quick


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_configuration_and_tokenizer_count(name: str, checkpoint: Path) -> None:
    config, weights = config_digest(checkpoint), weights_digest(checkpoint, None)
    (checkpoint / name).write_text((checkpoint / name).read_text() + " ")
    assert config_digest(checkpoint) != config
    assert weights_digest(checkpoint, None) == weights


def test_an_unchanged_file_is_read_once(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    file_digest = hashlib.file_digest

    def counting(file, algorithm):  # type: ignore[no-untyped-def]
        read.append(file.name)
        return file_digest(file, algorithm)

    monkeypatch.setattr(hashlib, "file_digest", counting)
    cache = tmp_path / "cache"
    first = weights_digest(checkpoint, cache)
    assert weights_digest(checkpoint, cache) == first == weights_digest(checkpoint, None)
    assert len(read) == 2, "once into the cache, once without it"
    flip_a_bit(checkpoint / "model.safetensors", -1)
    assert weights_digest(checkpoint, cache) != first


def test_the_cache_may_share_the_state_directory(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which must be private, whoever makes it first."""
    monkeypatch.setenv("PIPEDEC_STATE_DIR", str(tmp_path / "own"))
    weights_digest(checkpoint, cache_directory())
    assert state_directory() == tmp_path / "own"


@pytest.mark.parametrize("entry", ["", "{}", "[1]", '{"file": 1}'])
def test_a_damaged_cache_is_made_anew(entry: str, checkpoint: Path, tmp_path: Path) -> None:
    first = weights_digest(checkpoint, tmp_path / "cache")
    (cached,) = (tmp_path / "cache" / "digests").iterdir()
    cached.write_text(entry)
    assert weights_digest(checkpoint, tmp_path / "cache") == first
    assert cached.read_text() != entry


def test_the_cache_keeps_the_newest(checkpoint: Path, tmp_path: Path) -> None:
    weights_digest(checkpoint, tmp_path / "cache")
    (oldest,) = (tmp_path / "cache" / "digests").iterdir()
    for number in range(MAX_ENTRIES):
        weights = tmp_path / str(number) / "model.safetensors"
        weights.parent.mkdir()
        weights.write_bytes(b"small")
        weights_digest(weights.parent, tmp_path / "cache")
    assert len(list((tmp_path / "cache" / "digests").iterdir())) == MAX_ENTRIES and not oldest.exists()


def test_without_a_place_for_the_cache_files_are_read_again(checkpoint: Path) -> None:
    assert weights_digest(checkpoint, Path("/proc/nowhere")) == weights_digest(checkpoint, None)
