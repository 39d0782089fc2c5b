"""What the launching machine knows of the checkpoints, and every host's tensors compared with it."""

from __future__ import annotations

import json
import os
import shutil
import threading
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from support.processes import wait_until
from support.tiny_pair import Pair

from pipedec.checkpoints import combined, part_digests, rank_parts, weights_digest
from pipedec.cluster import launched
from pipedec.cluster.launched import ListedWeights, proved_one
from pipedec.core import PipedecError, UserError

LAYERS = [(0, 4), (4, 8)]


def ignore(done: int, total: int) -> None:
    """Progress that nobody wants to know."""


def of_rank(rank: int, target: Path) -> dict[str, dict[str, str]]:
    return part_digests([part for part in rank_parts(rank, LAYERS, {"target": target}) if part.is_read], None, ignore)


def test_all_parts_are_proved_to_be_of_one_checkpoint(pair: Pair, state_directory: Path) -> None:
    listed = ListedWeights({"target": str(pair.target)}).wait(ignore)
    known = proved_one([("a", of_rank(1, pair.target)), ("b", of_rank(2, pair.target))], listed)
    assert known == listed and combined(known["target"]) == weights_digest(pair.target, None)


def test_one_bit_of_one_tensor_of_one_host_is_named(pair: Pair, tmp_path: Path, state_directory: Path) -> None:
    other = Path(shutil.copytree(pair.target, tmp_path / "other"))
    tensors = load_file(other / "model.safetensors")
    tensors["model.layers.5.mlp.down_proj.weight"][0, 0] += 1
    save_file(tensors, other / "model.safetensors", {"format": "pt"})
    listed = ListedWeights({"target": str(pair.target)}).wait(ignore)
    proved_one([("a", of_rank(1, other))], listed)
    with pytest.raises(
        UserError, match=r"^b has other weights of the target than this machine \(model\.layers\.5\.mlp\.down.*distribute"
    ):
        proved_one([("a", of_rank(1, other)), ("b", of_rank(2, other))], listed)


def test_a_machine_without_checkpoints_lists_nothing_and_learns_from_the_hosts(pair: Pair, tmp_path: Path) -> None:
    listed = ListedWeights({"target": str(tmp_path / "nowhere"), "draft": "/proc/1"}).wait(ignore)
    assert listed == {}
    told = [of_rank(rank, pair.target) for rank in (1, 2)]
    assert proved_one([("a", told[0]), ("b", told[1])], listed) == {"target": told[0]["target"] | told[1]["target"]}


def test_the_prompt_of_another_target_is_refused(pair: Pair, tmp_path: Path, state_directory: Path) -> None:
    """Hosts that hold parts of the target cannot tell."""
    bita = Path(shutil.copytree(pair.bita, tmp_path / "bita"))
    config = json.loads((bita / "config.json").read_text()) | {"target": "0" * 16}
    (bita / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="was trained for another target than"):
        ListedWeights({"target": str(pair.target), "bita": str(bita)}).wait(ignore)


def test_a_list_that_nobody_wants_any_more_is_given_up(
    pair: Pair, state_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the first tensor is read."""
    begun, go_on, pread = threading.Event(), threading.Event(), os.pread
    read: list[int] = []

    def slow(file: int, length: int, offset: int) -> bytes:
        begun.set()
        assert go_on.wait(30)
        threading.Event().wait(0.1)  # as a disk takes its time
        read.append(offset)
        return pread(file, length, offset)

    monkeypatch.setattr(os, "pread", slow)
    listed = ListedWeights({"target": str(pair.target)})
    assert begun.wait(30)
    monkeypatch.setattr(launched, "LIST_SECONDS", 0.0)
    with pytest.raises(PipedecError, match=rf"^this machine has not digested {pair.target} within 0 s: launch from"):
        listed.wait(ignore)
    listed.close()
    go_on.set()
    assert wait_until(lambda: not any(thread.name.startswith("weights") for thread in threading.enumerate()))
    assert 0 < len(read) < 40, "of 75 tensors"
