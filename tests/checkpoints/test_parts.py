"""What each rank needs of the checkpoints, and what a host that lacks it is told."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.checkpoints import save_tiny, save_tiny_llama
from support.quantized_files import write_quantized_checkpoint
from support.tiny_pair import Pair

from pipedec.checkpoints import INDEX_FILE, CheckpointPart, LayerSpan, TensorFiles, check_here, fingerprint, merged, rank_parts
from pipedec.checkpoints.parts import missing_files
from pipedec.core.errors import UserError
from pipedec.directories import reference_pair

LAYERS = [(0, 3), (3, 6), (6, 8)]


@pytest.fixture
def target(tmp_path: Path) -> Path:
    save_tiny_llama(tmp_path / "target", layers=8, max_shard_size="50KB")
    return tmp_path / "target"


def test_a_part_of_stored_weights_has_all_tensors_of_its_matrices(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path / "plain", layers=4)
    write_quantized_checkpoint(tmp_path / "plain", tmp_path / "stored", "gptq-ordered")
    part = CheckpointPart("target", str(tmp_path / "stored"), (LayerSpan(range(2, 4), first=False, last=True),))
    files = TensorFiles(tmp_path / "stored")
    inside = [name for name in files.file_of if re.match(r"model\.layers\.[23]\.|model\.norm|lm_head", name)]
    assert sorted(part.tensors(files)) == sorted(inside) and "model.layers.2.self_attn.q_proj.g_idx" in inside


def test_all_ranks_together_read_every_tensor_once(target: Path) -> None:
    files = TensorFiles(target)
    names = [name for rank in range(4) for part in rank_parts(rank, LAYERS, {"target": target}) for name in part.tensors(files)]
    assert sorted(names) == sorted(files.file_of)


def test_a_tied_head_is_read_by_the_first_and_the_last_stage(tmp_path: Path) -> None:
    save_tiny_llama(tmp_path, layers=8, tie_word_embeddings=True)
    files, embedding = TensorFiles(tmp_path), "model.embed_tokens.weight"
    reads = [embedding in part.tensors(files) for rank in (1, 2, 3) for part in rank_parts(rank, LAYERS, {"target": tmp_path})]
    assert reads == [True, False, True]


def test_only_rank_zero_reads_the_draft_and_all_read_the_bita(pair: Pair) -> None:
    models = {"target": pair.target, "draft": pair.draft, "bita": pair.bita}
    reads = [{part.key for part in rank_parts(rank, LAYERS, models) if part.is_read} for rank in (0, 1, 2)]
    assert reads == [{"draft", "bita"}, {"target", "bita"}, {"target", "bita"}]


def test_the_parts_of_a_named_directory_are_those_of_its_path() -> None:
    named, by_path = (
        CheckpointPart("target", str(model), is_whole=True) for model in ("reference-pair", reference_pair() / "target")
    )
    assert (named.files(), named.describing_files(), named.missing()) == (by_path.files(), by_path.describing_files(), [])
    assert fingerprint(Path("reference-pair")) == fingerprint(reference_pair() / "target")


def test_a_host_lacks_only_the_shards_of_its_ranks(target: Path) -> None:
    """The first and the last stage are here: shards of the middle one alone may be missing."""
    files = TensorFiles(target)
    here = merged(part for rank in (1, 3) for part in rank_parts(rank, LAYERS, {"target": target}))
    needed = {files.file_of[name].name for part in here for name in part.tensors(files)}
    elsewhere = [file for file in target.glob("*.safetensors") if file.name not in needed]
    assert elsewhere
    for file in elsewhere:
        file.unlink()
    assert missing_files(here) == []
    check_here(here, "host-a")
    lost = target / min(needed)
    lost.unlink()
    assert missing_files(here) == [lost]
    with pytest.raises(UserError, match=rf"^host-a lacks {lost.name} of {target}: copy .* `pipedec distribute`$"):
        check_here(here, "host-a")


@pytest.mark.parametrize("name", ["config.json", INDEX_FILE])
def test_what_describes_a_checkpoint_is_needed_everywhere(name: str, target: Path) -> None:
    (target / name).unlink()
    (part,) = rank_parts(2, LAYERS, {"target": target})
    assert [file.name for file in part.missing()] == [name if name != INDEX_FILE else "model.safetensors"]


def test_many_missing_files_are_counted(target: Path) -> None:
    files = list(target.glob("*.safetensors"))
    for file in files:
        file.unlink()
    with pytest.raises(UserError, match=rf" and {len(files) - 3} more of "):
        check_here(merged(part for rank in (1, 2, 3) for part in rank_parts(rank, LAYERS, {"target": target})), "host-a")
