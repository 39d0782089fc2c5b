"""Copies of checkpoints to hosts: each gets its part, once; and the tensors of hosts compared with those of this machine."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file
from support.checkpoints import save_tiny_llama
from support.tiny_pair import TARGET_LAYERS, Pair

from pipedec.checkpoints import TensorFiles, combined, part_digests, rank_parts, weights_digest
from pipedec.checkpoints.parts import missing_files
from pipedec.cli.main import program
from pipedec.cluster import distribution
from pipedec.cluster.distribution import PARTIAL, Folder, folders, send
from pipedec.cluster.launched import listed_weights, proved_one
from pipedec.config import ClusterConfig, ServerConfig, load_cluster
from pipedec.core.errors import UserError
from pipedec.plan.files import checkpoints_of, host_parts, needed_files

pytestmark = [
    pytest.mark.usefixtures("leaves_nothing"),
    pytest.mark.skipif(shutil.which("rsync") is None, reason="needs rsync"),
]

# Stands in for ssh: runs the command here.
SSH_TO_HERE = """#!/bin/sh
while [ "$1" = -o ]; do shift 2; done
shift
exec sh -c "$*"
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
        ssh.write_text(SSH_TO_HERE)
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

    def folders(self, host: str) -> list[Folder]:
        return folders(host_parts(self.here_config)[host], checkpoints_of(self.config))

    def one_shard(self) -> Folder:
        """A file with weights, wanted there."""
        return Folder(self.here / "target", self.there / "target", (min(self.here.glob("target/model-0*")).name,))

    def call(self, *options: str) -> Result:
        return CliRunner().invoke(program, ["distribute", str(self.file), "--from", str(self.here), *options])

    def names_there(self, model: str = "target") -> set[str]:
        return {file.name for file in (self.there / model).rglob("*")}


BETA = ServerConfig("beta", {"cpu": 1})


@pytest.fixture
def site(tmp_path: Path, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> Site:
    return Site(tmp_path, pair, monkeypatch)


def test_a_host_gets_what_its_ranks_read_and_nothing_else(site: Site) -> None:
    sizes = [size for folder in site.folders("beta") for size in send(BETA, folder, checksum=False)]
    files = TensorFiles(site.here / "target")
    needed = {file.name for part in host_parts(site.here_config)["beta"] for file in part.files()}
    everywhere = {file.name for file in (site.here / "target").glob("*") if file.suffix in (".json", ".jinja")}
    assert site.names_there() == needed | everywhere
    assert sorted(sizes) == sorted(file.stat().st_size for file in site.there.rglob("*") if file.is_file())
    assert needed < {file.name for file in files.file_of.values()}
    assert site.names_there("draft") and "model.safetensors" not in site.names_there("draft"), "alpha's alone"
    assert missing_files(host_parts(site.config)["beta"]) == []
    assert missing_files(host_parts(site.config)["alpha"]) != []
    for name in site.names_there():
        assert (site.there / "target" / name).read_bytes() == (site.here / "target" / name).read_bytes()


def test_a_second_call_finds_nothing_missing(site: Site) -> None:
    site.write("[{host: alpha, devices: {cpu: 5}}]")
    first, second = site.call(), site.call()
    assert (first.exit_code, second.exit_code) == (0, 0), (first.output, second.output)
    assert "alpha: " in first.output and " files, " in first.output
    assert second.output.splitlines() == ["alpha: nothing is missing"]
    assert missing_files(host_parts(site.config)["alpha"]) == []


@pytest.mark.parametrize("destination", ["ssh://me@beta:2222", "me@fe80::1"])
def test_ssh_gets_every_destination_as_it_is(destination: str, site: Site) -> None:
    (site.file.parent / "ssh").write_text(SSH_TO_HERE.replace("shift\n", f'[ "$1" = {destination} ] || exit 9\nshift\n'))
    folder = site.one_shard()
    assert send(ServerConfig("beta", {"cpu": 1}, ssh=destination), folder, checksum=False) != []
    assert (folder.target / folder.files[0]).is_file()


def test_a_broken_copy_is_no_checkpoint_and_goes_on_where_it_stopped(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = site.one_shard()
    name, content = folder.files[0], os.urandom(4_000_000)
    (folder.source / name).write_bytes(content)
    ssh, log = site.file.parent / "ssh", site.file.parent / "log"
    broken = "dd bs=64k iflag=count_bytes count=2500000 status=none | sh"  # what the host receives ends there
    ssh.write_text(SSH_TO_HERE.replace("exec sh", broken))
    with pytest.raises(UserError, match=r"^beta: rsync: .*: mend that, and call pipedec distribute again"):
        send(BETA, folder, checksum=False)
    assert not (folder.target / name).exists()
    came = (folder.target / PARTIAL / name).stat().st_size
    assert came > 1_000_000
    ssh.write_text(SSH_TO_HERE)
    monkeypatch.setattr(distribution, "OPTIONS", (*distribution.OPTIONS, f"--log-file={log}", "--log-file-format=%b bytes"))
    assert send(BETA, folder, checksum=False) == [4_000_000]
    assert (folder.target / name).read_bytes() == content and not (folder.target / PARTIAL).exists()
    sent = sum(int(line.split()[-2]) for line in log.read_text().splitlines() if line.endswith(" bytes"))
    assert 0 < sent < 4_100_000 - came


@pytest.mark.parametrize("checksum", [False, True])
@pytest.mark.failure_case("M2")
def test_other_bytes_of_the_same_size_and_time_are_found_by_their_checksum_alone(checksum: bool, site: Site) -> None:
    folder = site.one_shard()
    source, there = folder.source / folder.files[0], folder.target / folder.files[0]
    send(BETA, folder, checksum=False)
    spoilt = bytearray(source.read_bytes())
    spoilt[-1] ^= 1
    there.write_bytes(spoilt)
    os.utime(there, ns=(source.stat().st_atime_ns, source.stat().st_mtime_ns))
    assert len(send(BETA, folder, checksum)) == checksum
    assert (there.read_bytes() == source.read_bytes()) is checksum


def test_links_are_followed(site: Site) -> None:
    """As in the cache of huggingface_hub."""
    folder = site.one_shard()
    link = folder.source / folder.files[0]
    blob = link.rename(site.file.parent / "blob")
    link.symlink_to(blob)
    send(BETA, folder, checksum=False)
    there = folder.target / folder.files[0]
    assert there.read_bytes() == blob.read_bytes() and not there.is_symlink()


def lose_a_source(site: Site) -> None:
    min((site.here / "target").glob("model-0*")).unlink()


def put_a_file_in_the_way(site: Site) -> None:
    site.there.write_text("not a directory")


def let_ssh_fail(site: Site) -> None:
    (site.file.parent / "ssh").write_text("#!/bin/sh\necho 'connect to host alpha port 22: No route to host' >&2\nexit 255\n")


def have_no_rsync_there(site: Site) -> None:
    (site.file.parent / "ssh").write_text(SSH_TO_HERE.replace("exec sh", "PATH=/nowhere exec /bin/sh"))


def have_no_rsync_here(site: Site) -> None:
    os.environ["PATH"] = "/nowhere"


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lose_a_source, "^alpha needs .*model-00001-of-.*, which this machine lacks: download it, or give --from DIR$"),
        (put_a_file_in_the_way, "^alpha: rsync: .*there.*: Not a directory .*: mend that, and call pipedec distribute again"),
        (
            let_ssh_fail,
            "^alpha: ssh failed: connect to host alpha port 22: No route to host: see that `ssh alpha` works by itself$",
        ),
        (have_no_rsync_there, "^alpha has no rsync: install rsync there, or copy by hand what `pipedec plan --files` lists$"),
        (have_no_rsync_here, "^this machine has no rsync: install rsync here and on all hosts, or copy by hand"),
    ],
)
def test_what_goes_wrong_is_one_line(
    spoil: Callable[[Site], None], message: str, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.write("[{host: alpha, devices: {cpu: 5}}]")
    monkeypatch.setenv("PATH", os.environ["PATH"])  # as it is afterwards
    spoil(site)
    ended = site.call()
    assert isinstance(ended.exception, UserError), ended.output
    assert len(str(ended.exception).splitlines()) == 1
    with pytest.raises(UserError, match=message):
        raise ended.exception


def test_one_host_that_fails_leaves_the_others_their_files(site: Site) -> None:
    (site.file.parent / "ssh").write_text(SSH_TO_HERE.replace("shift\n", '[ "$1" = beta ] || exit 255\nshift\n'))
    ended = site.call()
    assert "beta: " in ended.output and "alpha: ssh failed: " in str(ended.exception)
    assert missing_files(host_parts(site.config)["beta"]) == []


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


def of_rank(rank: int, target: Path) -> dict[str, dict[str, str]]:
    return part_digests([part for part in rank_parts(rank, LAYERS, {"target": target}) if part.is_read])


def test_all_parts_are_proved_to_be_of_one_checkpoint(pair: Pair) -> None:
    listed = listed_weights({"target": str(pair.target)})
    known = proved_one([("a", of_rank(1, pair.target)), ("b", of_rank(2, pair.target))], listed)
    assert known == listed and combined(known["target"]) == weights_digest(pair.target)


def test_one_tensor_of_one_host_is_named(pair: Pair, tmp_path: Path) -> None:
    other = Path(shutil.copytree(pair.target, tmp_path / "other"))
    tensors = load_file(other / "model.safetensors")
    tensors["model.layers.5.mlp.down_proj.weight"][0, 0] += 1
    save_file(tensors, other / "model.safetensors", {"format": "pt"})
    listed = listed_weights({"target": str(pair.target)})
    proved_one([("a", of_rank(1, other))], listed)
    with pytest.raises(
        UserError, match=r"^b has other weights of the target than this machine \(model\.layers\.5\.mlp\.down.* --checksum"
    ):
        proved_one([("a", of_rank(1, other)), ("b", of_rank(2, other))], listed)


def test_a_machine_without_checkpoints_lists_nothing_and_learns_from_the_hosts(pair: Pair, tmp_path: Path) -> None:
    listed = listed_weights({"target": str(tmp_path / "nowhere"), "draft": "/proc/1"})
    assert listed == {}
    known = [of_rank(rank, pair.target) for rank in (1, 2)]
    assert proved_one([("a", known[0]), ("b", known[1])], listed) == {"target": known[0]["target"] | known[1]["target"]}


def test_the_prompt_of_another_target_is_refused(pair: Pair, tmp_path: Path) -> None:
    """Hosts that hold parts of the target cannot tell."""
    bita = Path(shutil.copytree(pair.bita, tmp_path / "bita"))
    config = json.loads((bita / "config.json").read_text()) | {"target": "0" * 16}
    (bita / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="was trained for another target than"):
        listed_weights({"target": str(pair.target), "bita": str(bita)})
