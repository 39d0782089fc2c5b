"""Models by their names on a hub: which names mean what, downloads that break and go on, and what refuses them, in one line."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub.constants
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file
from support.checkpoints import save_tiny_llama
from support.gguf_files import save_gguf
from support.hub_server import Hub, commit, running_hub, sha256
from support.processes import wait_until
from support.tiny_pair import Pair

from pipedec.checkpoints import CheckpointPart, TensorFiles
from pipedec.checkpoints.download import downloaded, fetch, pinned
from pipedec.cli.main import program
from pipedec.cluster.doctor.host import checkpoint
from pipedec.config import load_cluster
from pipedec.config.settings import Models
from pipedec.core.errors import PipedecError, UserError
from pipedec.families import model_config
from pipedec.gguf import is_gguf, is_named, located
from pipedec.hub import HubName, gguf_file

SHARDS, SHARD_BYTES = 5, 3_000_000


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    with running_hub(tmp_path / "hub") as running:
        yield running


@pytest.fixture
def cache(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The library's cache, of which and of the hub this process now knows; huggingface_hub reads its variables once."""
    constants, cache = huggingface_hub.constants, tmp_path / "cache"
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr("pipedec.hub._RETRY_SECONDS", 0.01)
    return cache


@pytest.fixture
def model(hub: Hub) -> str:
    """A small whole model on the hub, in several shards."""
    save_tiny_llama(hub.root / "acme" / "tiny", layers=4, max_shard_size="40KB")
    return "acme/tiny"


@pytest.fixture
def large(hub: Hub) -> str:
    """Shards of some megabytes, which no one could use as a model."""
    directory = hub.root / "acme" / "large"
    directory.mkdir(parents=True)
    names = [f"model-{shard}.safetensors" for shard in range(SHARDS)]
    for shard, name in enumerate(names):
        save_file({f"part.{shard}": torch.arange(SHARD_BYTES // 4) * (shard + 1)}, directory / name)
    weight_map = {f"part.{shard}": name for shard, name in enumerate(names)}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (directory / "config.json").write_text("{}")
    return "acme/large"


def in_cache(name: str) -> dict[str, bytes]:
    place = located(name)
    return {str(file.relative_to(place)): file.read_bytes() for file in place.rglob("*") if file.is_file()}


def on_hub(hub: Hub, repo: str) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in (hub.root / repo).iterdir()}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("acme/model", HubName("acme/model")),
        ("acme/model@v1.0", HubName("acme/model", revision="v1.0")),
        ("acme/model:Q4_K_M", HubName("acme/model", "Q4_K_M")),
        ("acme/a.b-c_d:x/y.gguf@main", HubName("acme/a.b-c_d", "x/y.gguf", "main")),
        ("./acme/model", None), ("/acme/model", None), ("model", None), ("a/b/c", None), ("~/model", None), ("a/b@", None),
    ],
)  # fmt: skip
def test_names(text: str, expected: HubName | None) -> None:
    assert HubName.of(text) == expected
    assert is_named(text) == (expected is not None)
    if expected is not None:
        assert HubName.of(str(expected)) == expected


def test_a_path_that_exists_is_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative to the working directory; in a cluster.yaml, relative to the file."""
    (tmp_path / "acme" / "model").mkdir(parents=True)
    file = tmp_path / "cluster.yaml"
    models = "target: acme/model, draft: acme/other"
    file.write_text(f"{{{models}, servers: [{{host: a, devices: {{cpu: 1}}}}], partitions: {{p: {{stages: 1}}}}}}")
    config = load_cluster(file)
    assert config.target == str(tmp_path / "acme/model") and config.draft == "acme/other"
    monkeypatch.chdir(tmp_path)
    assert HubName.of("acme/model") is None


FILES = ["M-Q4_K_M.gguf", "M-Q4_K_S.gguf", "sub/M-Q8_0.gguf", "mmproj-M.gguf", "README.md"]


@pytest.mark.parametrize(
    ("file", "files", "expected"),
    [
        (None, FILES, "M-Q4_K_M.gguf"), ("q4_k_s", FILES, "M-Q4_K_S.gguf"), ("Q8_0", FILES, "sub/M-Q8_0.gguf"),
        ("sub/M-Q8_0.gguf", FILES, "sub/M-Q8_0.gguf"), (None, ["only-IQ2.gguf"], "only-IQ2.gguf"),
        (None, [*FILES, "model.safetensors"], None), (None, ["config.json"], None),
    ],
)  # fmt: skip
def test_a_gguf_file_is_known_by_its_quantisation(file: str | None, files: list[str], expected: str | None) -> None:
    assert gguf_file(HubName("acme/m", file), files) == expected


@pytest.mark.parametrize(("file", "counted"), [("Q5_K_M", "no GGUF files are"), ("M", "3 GGUF files are")])
def test_no_or_several_gguf_files_are_refused_with_the_names_that_there_are(file: str, counted: str) -> None:
    with pytest.raises(UserError, match=rf"{counted} called {file}: give acme/m:FILE, of M-Q4_K_M.gguf, M-Q4_K_S.gguf"):
        gguf_file(HubName("acme/m", file), FILES)


def test_a_model_is_downloaded_once(hub: Hub, cache: Path, model: str) -> None:
    place = downloaded(Path(model))
    assert str(place) == f"{model}@{commit(hub.root / model)}"
    assert in_cache(str(place)) == on_hub(hub, model)
    assert model_config(place).num_hidden_layers == 4
    before = len(hub.asked)
    assert downloaded(Path(model)) == place
    assert [path for path in hub.asked[before:] if "/resolve/" in path] == []
    assert not list(cache.rglob("*.incomplete"))


def test_what_describes_a_model_comes_without_its_weights(hub: Hub, cache: Path, model: str) -> None:
    (hub.root / model / "extra.bin").write_bytes(b"1")
    (hub.root / model / ".gitattributes").write_text("x")
    names = pinned(Models(target=model, draft="none"))
    assert names.keys() == {"target"}
    assert in_cache(names["target"]).keys() == {"config.json", "generation_config.json", "model.safetensors.index.json"}
    assert hub.served == []


def test_a_revision_is_a_branch_a_tag_or_a_commit(hub: Hub, cache: Path, model: str) -> None:
    tagged = hub.root / "acme" / "tiny@v2"
    save_tiny_llama(tagged, layers=2)
    for revision in ("v2", commit(tagged)):
        assert model_config(downloaded(Path(f"{model}@{revision}"))).num_hidden_layers == 2
    assert model_config(downloaded(Path(model))).num_hidden_layers == 4


def test_a_gguf_file_is_downloaded_by_its_quantisation(hub: Hub, cache: Path, pair: Pair) -> None:
    directory = hub.root / "acme" / "files"
    directory.mkdir(parents=True)
    for name in ("a-F16.gguf", "a-F32.gguf"):
        save_gguf(directory / name, pair.target)
    place = downloaded(Path("acme/files:f16"))
    assert str(place) == f"acme/files:a-F16.gguf@{commit(directory)}" and is_gguf(place)
    assert model_config(place).num_hidden_layers == model_config(pair.target).num_hidden_layers
    assert [file for _, file, _, _ in hub.served] == ["a-F16.gguf"]


def test_a_transfer_that_breaks_again_and_again_goes_on(hub: Hub, cache: Path, large: str) -> None:
    hub.cut_after = 700_000
    assert in_cache(str(downloaded(Path(large)))) == on_hub(hub, large)
    sizes = sum(len(content) for name, content in on_hub(hub, large).items() if name.endswith(".safetensors"))
    assert hub.served_bytes() == sizes and len(hub.served) > 2 * SHARDS


def test_a_draft_that_is_the_target_is_counted_once(hub: Hub, cache: Path, large: str) -> None:
    names, shown = pinned(Models(target=large, draft=large)), list[tuple[int, int]]()
    parts = [CheckpointPart(key, name, is_whole=True) for key, name in names.items()]
    fetch(parts, lambda done, total: shown.append((done, total)))
    sizes = sum(len(content) for name, content in on_hub(hub, large).items() if name.endswith(".safetensors"))
    assert len(parts) == 2 and shown[-1] == (sizes, sizes) and hub.served_bytes() == sizes


@pytest.mark.usefixtures("leaves_nothing")
def test_a_download_that_is_killed_at_ten_places_goes_on(hub: Hub, large: str, tmp_path: Path) -> None:
    """Nothing is loaded twice but what was on its way when the process was killed."""
    hub.seconds_per_chunk = 0.002
    total = sum((hub.root / large / f"model-{shard}.safetensors").stat().st_size for shard in range(SHARDS))
    environment = os.environ | {"HF_ENDPOINT": hub.url, "HF_HUB_CACHE": str(tmp_path / "cache")}
    code = "from pathlib import Path; from pipedec.checkpoints.download import downloaded; print(downloaded(Path('acme/large')))"
    places, chance = [], random.Random(7)

    def here() -> int:
        return sum(file.stat().st_size for file in (tmp_path / "cache").rglob("*") if file.is_file() and not file.is_symlink())

    for _ in range(10):
        with subprocess.Popen([sys.executable, "-c", code], env=environment, stderr=subprocess.DEVNULL) as process:
            wanted = here() + chance.randrange(1, total // 12)
            assert wait_until(lambda wanted=wanted: here() >= wanted, 60)
            process.send_signal(signal.SIGKILL)
        places.append(here())
    assert places == sorted(places) and places[-1] < total, places
    ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120, check=True)
    blobs = tmp_path / "cache" / "models--acme--large" / "snapshots" / ended.stdout.strip().partition("@")[2]
    assert {file.name: file.read_bytes() for file in blobs.iterdir()} == on_hub(hub, large)
    for shard in range(SHARDS):  # every transfer began where the one before had ended, or after what it had sent on its way
        parts = [(first, first + sent) for _, file, first, sent in hub.served if file == f"model-{shard}.safetensors"]
        assert parts[0][0] == 0 and all(first <= end for (_, end), (first, _) in pairwise(sorted(parts)))
        assert len([first for first, _ in parts if first == 0]) == 1


def test_a_page_in_the_place_of_a_file_ends_the_download(
    hub: Hub, cache: Path, large: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a proxy that wants a login. What had been received stays."""
    monkeypatch.setattr("pipedec.hub._RETRIES", 0)
    hub.cut_after = 700_000
    received = []
    for hub.page in (None, b"<html>log in</html>"):
        with pytest.raises(PipedecError, match="no download from"):
            downloaded(Path(large))
        received.append(sum(file.stat().st_size for file in cache.rglob("*.pipedec-incomplete")))
    assert received[0] == received[1] > 0


def test_weights_beside_a_gguf_file_are_not_taken_for_it(hub: Hub, cache: Path, model: str, pair: Pair) -> None:
    save_gguf(hub.root / model / "a-F16.gguf", pair.target)
    assert is_gguf(downloaded(Path(f"{model}:F16")))
    described = pinned(Models(target=model))["target"]
    assert not is_gguf(described) and not is_gguf(model)
    assert str(downloaded(Path(model))) == described and TensorFiles(described).is_whole


@pytest.mark.parametrize("files", [["a-00001-of-00002.gguf", "a-00002-of-00002.gguf"]])
def test_a_file_in_parts_is_refused_before_it_is_downloaded(files: list[str]) -> None:
    for file in (None, files[0]):
        with pytest.raises(UserError, match="is one of several parts: join them"):
            gguf_file(HubName("acme/m", file or "a"), files)


def test_two_processes_share_a_download(hub: Hub, large: str, tmp_path: Path) -> None:
    hub.seconds_per_chunk = 0.001
    environment = os.environ | {"HF_ENDPOINT": hub.url, "HF_HUB_CACHE": str(tmp_path / "cache")}
    code = "from pathlib import Path; from pipedec.checkpoints.download import downloaded; print(downloaded(Path('acme/large')))"
    both = [subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE) for _ in range(2)]
    said = {process.communicate(timeout=120)[0] for process in both}
    assert len(said) == 1 and [process.returncode for process in both] == [0, 0]
    assert len(hub.served) == SHARDS


def refused(name: str) -> str:
    """The line of the command that is refused."""
    result = CliRunner().invoke(program, ["plan", name, "--gpus", "1x3090"])
    assert result.exception is not None
    message = str(result.exception)
    assert "\n" not in message and isinstance(result.exception, PipedecError)
    return message


def test_a_name_that_is_nowhere(hub: Hub, cache: Path, model: str) -> None:
    host = hub.url.removeprefix("http://")
    assert refused("acme/no").startswith(f"acme/no: neither a path here nor a model on {host}: correct it, or set HF_TOKEN")
    assert refused(f"{model}@v9").startswith(f"{model}@v9: {model} has no revision v9: give a branch, a tag or a commit")
    hub.gated.add(model)
    assert refused(model).startswith(f"{model}: its authors ask you to accept their terms: do that on {hub.url}/{model}, then")
    (hub.root / "acme" / "data").mkdir()
    (hub.root / "acme" / "data" / "x.csv").write_text("1")
    assert "acme/data has neither a config.json nor a GGUF file" in refused("acme/data")


def test_weights_that_only_pickle_reads_are_refused(hub: Hub, cache: Path, model: str) -> None:
    for file in (hub.root / model).glob("*.safetensors*"):
        file.unlink()
    with pytest.raises(UserError, match=r"has no model\.safetensors: give a model with whole weights in safetensors"):
        downloaded(Path(model))


def test_a_shard_with_another_digest_is_removed(hub: Hub, cache: Path, model: str) -> None:
    file = next((hub.root / model).glob("*-00002-*.safetensors"))
    name = file.name
    hub.broken.add(name)
    with pytest.raises(UserError, match=f"{name} does not have the digest that the hub lists, and was removed: start again"):
        downloaded(Path(model))
    assert not list(cache.rglob(name)) and not any(left.stat().st_size for left in cache.rglob(f"{sha256(file)}*"))
    hub.broken.clear()
    assert in_cache(str(downloaded(Path(model)))) == on_hub(hub, model)


def test_a_disk_without_room_is_named_before_anything_is_loaded(
    hub: Hub, cache: Path, large: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=10**7))
    with pytest.raises(UserError, match=r"needs 0.0 GB more, but 0.0 GB are free in .*cache: make room, or set HF_HOME to"):
        downloaded(Path(large))
    assert hub.served == []


def test_without_the_hub_what_is_here_is_used(hub: Hub, cache: Path, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place = downloaded(Path(model))
    hub.down = True
    assert downloaded(Path(model)) == place
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    before = len(hub.asked)
    assert downloaded(Path(model)) == place and len(hub.asked) == before
    assert "acme/other is not on this host, and HF_HUB_OFFLINE is set: unset it, or copy" in refused("acme/other")
    next(located(place).glob("*-00002-*")).unlink()
    with pytest.raises(PipedecError, match="is not here, and the hub does not answer or must not be asked"):
        downloaded(Path(model))


def test_a_hub_that_is_down_is_named(hub: Hub, cache: Path, model: str) -> None:
    hub.down = True
    host = hub.url.removeprefix("http://")
    assert refused(model).startswith(f"{model}: no download from {host} (HTTP status 503): start again")


def test_a_plan_reads_the_configuration_alone(hub: Hub, cache: Path, model: str) -> None:
    result = CliRunner().invoke(program, ["plan", model, "--gpus", "2x3090,4090"])
    assert result.exit_code == 0 and f"{model} in float32, 3 stages in 3" in result.output, result.output
    assert {Path(path).name for path in hub.asked if "/resolve/" in path} == {"config.json", "generation_config.json"}


def test_the_doctor_knows_what_will_be_downloaded(hub: Hub, cache: Path, model: str) -> None:
    name = pinned(Models(target=model), sizes_only=True)["target"]
    part = CheckpointPart("target", name, is_whole=True)
    found, digests = checkpoint(part, replace(part, is_whole=False))
    assert (found.level, digests) == ("note", {}) and found.value.startswith("downloaded when the cluster starts; ")
    downloaded(Path(model))
    found, digests = checkpoint(part, part)
    assert found.level == "ok" and digests


def test_a_plan_says_with_which_quantisation_a_model_fits() -> None:
    result = CliRunner().invoke(program, ["plan", "llama-3.1-70b", "--gpus", "4x3090", "--draft", "llama-3.2-1b"])
    assert str(result.exception).startswith("it does not fit (it would with --quantize int8): ")
    result = CliRunner().invoke(program, ["plan", "llama-3.1-70b:awq", "--gpus", "2x3090", "--draft", "llama-3.2-1b"])
    assert "rtx3090 #1 *" in result.output  # shared with the draft


@pytest.mark.parametrize("gpus", ["4x3091", "x", "", "0x3090", "65x3090", "2x3090,"])
def test_gpus_that_are_unknown_or_too_many_are_refused(gpus: str) -> None:
    result = CliRunner().invoke(program, ["plan", "llama-3.2-1b", "--gpus", gpus])
    assert isinstance(result.exception, UserError) and str(result.exception).startswith(f"--gpus {gpus}: ")
