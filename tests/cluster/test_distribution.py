"""Copies of checkpoints to hosts: each gets its part, once; and the tensors of hosts compared with those of this machine."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file
from support.checkpoints import save_tiny_llama
from support.processes import wait_until
from support.tiny_pair import TARGET_LAYERS, Pair

from pipedec.checkpoints import TensorFiles, combined, part_digests, rank_parts, weights_digest
from pipedec.checkpoints.parts import missing_files
from pipedec.cli.main import program
from pipedec.cluster import launched
from pipedec.cluster.distribution import Delivery, Sources
from pipedec.cluster.inbox import WantedFile
from pipedec.cluster.launched import ListedWeights, proved_one
from pipedec.config import ClusterConfig, load_cluster
from pipedec.core.errors import PipedecError, UserError
from pipedec.plan.files import checkpoints_of, host_parts, needed_files

pytestmark = pytest.mark.usefixtures("leaves_nothing")

# Stands in for ssh: runs the command here, as a host of its own directory.
SSH_TO_HERE = """#!/bin/sh
while [ "$1" = -o ]; do shift 2; done
export PIPEDEC_STATE_DIR={state}
shift
exec sh -c "$1"
"""


class Site:
    """The checkpoints in ``here``, and a cluster.yaml for hosts that have them, or not yet, in ``there``."""

    def __init__(self, folder: Path, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
        self.here, self.there = folder / "here", folder / "there"
        for name in ("target", "draft", "bita"):
            shutil.copytree(getattr(pair, name), self.here / name)
        weights = self.here / "target" / "model.safetensors"
        weights.unlink()
        save_tiny_llama(self.here / "shards", layers=TARGET_LAYERS, vocab=300, max_shard_size="50KB")
        for file in (self.here / "shards").glob("model*"):
            file.rename(self.here / "target" / file.name)
        shutil.rmtree(self.here / "shards")
        (self.here / "target" / "original").mkdir()
        (self.here / "target" / "original" / "consolidated.00.pth").write_bytes(b"pickle")
        self.file = folder / "cluster.yaml"
        self.write("[{host: alpha, devices: {cpu: 2}}, {host: beta, devices: {cpu: 3}}]")
        ssh = folder / "ssh"
        ssh.write_text(SSH_TO_HERE.format(state=folder / "state"))
        ssh.chmod(0o755)
        monkeypatch.setenv("PIPEDEC_SSH", str(ssh))

    def write(self, servers: str, more: str = "") -> None:
        """With four stages, of which the first one and the draft are on alpha."""
        models = [f"{name}: {self.there / name}" for name in ("target", "draft")]
        partition = "partitions: {four: {stages: 4, draft_device: {host: alpha, device: cpu}}}"
        self.file.write_text("\n".join([*models, "bita: none", f"servers: {servers}", partition, more]) + "\n")

    @property
    def config(self) -> ClusterConfig:
        return load_cluster(self.file).for_partition()

    @property
    def here_config(self) -> ClusterConfig:
        return self.config.for_partition(given={name: str(self.here / name) for name in ("target", "draft")})

    def wanted(self, host: str) -> list[tuple[WantedFile, Path]]:
        return Sources(checkpoints_of(self.config)).wanted(host_parts(self.here_config)[host])

    def delivery(self, host: str) -> Delivery:
        return Delivery(self.config, host, self.wanted(host))

    def call(self, *options: str) -> Result:
        return CliRunner().invoke(program, ["distribute", str(self.file), "--from", str(self.here), *options])

    def names_there(self, model: str = "target") -> set[str]:
        return {file.name for file in (self.there / model).rglob("*")}


@pytest.fixture
def site(tmp_path: Path, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> Site:
    return Site(tmp_path, pair, monkeypatch)


def test_a_host_gets_what_its_ranks_read_and_nothing_else(site: Site) -> None:
    with site.delivery("beta") as delivery:
        missing = delivery.compare()
        sent: list[int] = []
        delivery.send(sent.append)
    assert sum(sent) == missing.num_bytes and missing.bytes_there == 0
    files = TensorFiles(site.here / "target")
    needed = {file.name for part in host_parts(site.here_config)["beta"] for file in part.files()}
    everywhere = {file.name for file in (site.here / "target").glob("*") if file.suffix in (".json", ".jinja")}
    assert site.names_there() == needed | everywhere
    assert needed < {file.name for file in files.file_of.values()}
    assert site.names_there("draft") and "model.safetensors" not in site.names_there("draft"), "alpha's alone"
    assert missing_files(host_parts(site.config)["beta"]) == []
    assert missing_files(host_parts(site.config)["alpha"]) != []
    for name in site.names_there():
        assert (site.there / "target" / name).read_bytes() == (site.here / "target" / name).read_bytes()


def test_a_second_call_says_that_nothing_is_missing(site: Site) -> None:
    site.write("[{host: alpha, devices: {cpu: 5}}]")
    first, second = site.call(), site.call()
    assert (first.exit_code, second.exit_code) == (0, 0), (first.output, second.output)
    assert "alpha: " in first.output and " files, " in first.output
    assert second.output.splitlines() == ["alpha: nothing is missing"]
    assert missing_files(host_parts(site.config)["alpha"]) == []


def test_what_was_interrupted_goes_on_where_it_stopped(site: Site) -> None:
    def stop(num_bytes: int) -> None:
        raise InterruptedError

    only = [one for one in site.wanted("beta") if one[1].suffix == ".safetensors"][:1]
    part = only[0][0].part
    with pytest.raises(InterruptedError), Delivery(site.config, "beta", only) as delivery:
        delivery.compare()
        delivery.send(stop)
    part.parent.mkdir(parents=True, exist_ok=True)
    part.write_bytes(only[0][1].read_bytes()[:1000])  # whatever of it had come
    sent: list[int] = []
    with Delivery(site.config, "beta", only) as delivery:
        assert delivery.compare().bytes_there == 1000
        delivery.send(sent.append)
    assert sum(sent) == only[0][0].num_bytes - 1000 and not part.exists()
    assert Path(only[0][0].path).read_bytes() == only[0][1].read_bytes()


@pytest.mark.parametrize("has_come", [b"\0" * 1000, None])
def test_what_is_there_with_other_bytes_is_not_kept(has_come: bytes | None, site: Site) -> None:
    """A part that was damaged is given up; a whole file of another content is replaced."""
    ((file, source),) = [one for one in site.wanted("beta") if one[1].suffix == ".safetensors"][:1]
    Path(file.path).parent.mkdir(parents=True)
    if has_come is None:
        content = bytearray(source.read_bytes())
        content[-1] ^= 1
        Path(file.path).write_bytes(content)
    else:
        file.part.write_bytes(has_come)
        with Delivery(site.config, "beta", [(file, source)]) as delivery, pytest.raises(UserError, match="with other bytes than"):
            delivery.compare()
            delivery.send(lambda num_bytes: None)
        assert not file.part.exists() and not Path(file.path).exists()
    with Delivery(site.config, "beta", [(file, source)]) as delivery:
        assert delivery.compare().files == 1
        delivery.send(lambda num_bytes: None)
    assert Path(file.path).read_bytes() == source.read_bytes()


def lose_a_source(site: Site) -> None:
    min((site.here / "target").glob("model-0*")).unlink()


def put_a_file_in_the_way(site: Site) -> None:
    site.there.write_text("not a directory")


def let_ssh_fail(site: Site) -> None:
    (site.file.parent / "ssh").write_text("#!/bin/sh\necho 'connect to host alpha port 22: No route to host' >&2\nexit 255\n")


def name_no_python(site: Site) -> None:
    site.write("[{host: alpha, devices: {cpu: 5}, python: /nowhere/python}]")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lose_a_source, "alpha lacks .*model-00001-of-.*, and so does this machine: download it, or give --from DIR"),
        (put_a_file_in_the_way, "alpha: .*there.*: checkpoints must be where this user may write"),
        (
            let_ssh_fail,
            "alpha: ssh failed: connect to host alpha port 22: No route to host: see that `ssh alpha` works by itself",
        ),
        (name_no_python, "alpha: there is no interpreter /nowhere/python: set python: "),
    ],
)
def test_what_goes_wrong_is_said_in_one_line(spoil: Callable[[Site], None], message: str, site: Site) -> None:
    site.write("[{host: alpha, devices: {cpu: 5}}]")
    spoil(site)
    ended = site.call()
    assert isinstance(ended.exception, UserError), ended.output
    assert len(str(ended.exception).splitlines()) == 1
    with pytest.raises(UserError, match=message):
        raise ended.exception


def test_a_full_disk_is_found_before_anything_is_sent(site: Site) -> None:
    ((file, source),) = [one for one in site.wanted("beta") if one[1].suffix == ".safetensors"][:1]
    large = WantedFile(file.path, 10**18, file.digest)
    message = r"^beta: .* has [\d.]+ GB left, but 1000000000\.00 GB are missing: make room there$"
    with Delivery(site.config, "beta", [(large, source)]) as delivery, pytest.raises(UserError, match=message):
        delivery.compare()
    assert not site.there.exists()


def test_the_plan_lists_files_that_are_not_here(site: Site) -> None:
    """From the index alone. Shards that two hosts need are named with both."""
    known = needed_files(host_parts(site.here_config))
    for file in (site.here / "target").glob("*.safetensors"):
        file.unlink()
    listed = needed_files(host_parts(site.here_config))
    assert [(file.path, file.hosts) for file in listed] == [(file.path, file.hosts) for file in known]
    assert all((file.num_bytes is None) == (file.key == "target") for file in listed)
    shutil.copytree(site.here, site.there)
    shown = CliRunner().invoke(program, ["plan", str(site.file), "--files"]).output
    for file in known:
        assert file.path.name in shown
    assert "alpha: " in shown and "beta: " in shown and " ? GB" in shown


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

    before = set(threading.enumerate())
    monkeypatch.setattr(os, "pread", slow)
    listed = ListedWeights({"target": str(pair.target)})
    assert begun.wait(30)
    monkeypatch.setattr(launched, "LIST_SECONDS", 0.0)
    with pytest.raises(PipedecError, match=rf"^this machine has not digested {pair.target} within 0 s: launch from"):
        listed.wait(ignore)
    listed.close()
    go_on.set()
    assert wait_until(lambda: not any(thread.name.startswith("weights") for thread in set(threading.enumerate()) - before))
    assert 0 < len(read) < 40, "of 75 tensors"
