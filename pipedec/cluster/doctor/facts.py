"""Facts about a host, as plain data that fits into JSON, and how they are gathered.

Judges nothing: that is for ``checks`` and ``comparison``. An unknown fact is None, or a text that gives the reason.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import platform
import resource
import shutil
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from pipedec import __version__
from pipedec.checkpoints import INDEX_FILE, CheckpointPart, TensorFiles, config_digest, has_weights, weight_files
from pipedec.cluster.doctor.findings import first_line
from pipedec.cluster.doctor.gpus import GpuFacts, gpu_facts
from pipedec.cluster.doctor.needs import HostNeeds
from pipedec.cluster.network import (
    addresses_of,
    installed_version,
    interface_address,
    interface_of,
    is_loopback,
    is_this_host,
    measured_offset_us,
    routed_address,
)
from pipedec.config import ServerConfig, state_directory
from pipedec.config.environment import usable_cpus
from pipedec.core.errors import PipedecError
from pipedec.gguf import model_files
from pipedec.scheduler import connect
from pipedec.scheduler.client import address_of, translated_errors
from pipedec.scheduler.server import find_server_binary, server_version

ANYWHERE = "192.0.2.1"  # an address for documentation: no host has it, and only a default route leads there
SLOW_START = Path("/proc/sys/net/ipv4/tcp_slow_start_after_idle")
SAMPLES = 16  # pieces of a file that stand for all of it
SAMPLE_BYTES = 1 << 16


@dataclass(frozen=True)
class Questions:
    """Information that a host cannot find out by itself."""

    redis_url: str | None = field(default=None, repr=False)  # of the Redis to reach, with its password; None if there is none yet
    starts_redis: bool = True  # whether a Redis server will be started on this host
    checkpoints: tuple[str, ...] = ()  # those that must be complete here
    peers: tuple[str, ...] = ()  # names or addresses of the other hosts
    server: ServerConfig | None = None  # the host's entry in the file; None without a file
    needs: HostNeeds | None = None  # of the partition's ranks on this host; None if there are none


@dataclass(frozen=True)
class NetworkFacts:
    """Names, addresses and interfaces."""

    host_name: str  # the machine's own
    is_in_file: bool | None  # whether this is the host of the file's entry; None if unknown
    own_addresses: tuple[str, ...]  # to which its own name resolves on the machine itself
    interfaces: Mapping[str, str]  # name and address of every interface that has an address
    address: str | None  # for connections with other hosts; None if there is none but loopback
    interface: str | None  # the interface of ``address``
    port: int | None  # a TCP port that could be opened on all addresses; None if none could
    speeds_mbps: Mapping[str, int] = field(default_factory=dict)  # negotiated by interfaces, in Mbit/s, where that is known
    slow_start_after_idle: bool | None = None  # whether TCP starts slowly again after a pause; None if unknown


@dataclass(frozen=True)
class RedisFacts:
    """The Redis of the run, seen from this host: either ``error``, or the server's version and its clock minus this host's."""

    address: str
    version: str = ""
    clock_offset_us: int = 0
    error: str | None = None


@dataclass(frozen=True)
class MissingFile:
    """A missing file of weights; ``num_bytes`` is an estimate."""

    name: str
    num_bytes: int
    only_for_spares: bool


@dataclass(frozen=True)
class CheckpointFacts:
    """A checkpoint on a host."""

    error: str | None  # what is wrong with it, besides missing files; None if nothing is
    config_digest: str = ""  # of configuration, tokenizer and index
    files: Mapping[str, str] = field(default_factory=dict)  # size and digest of samples, by name, of the files of weights here
    weight_bytes: int = 0  # of these files
    missing: tuple[MissingFile, ...] = ()  # files that the ranks of this host would read
    free_bytes: int | None = None  # of the disk; None if unknown


@dataclass(frozen=True)
class HostFacts:
    """All facts about a host."""

    python: str  # path of the interpreter
    versions: Mapping[str, str | None]  # of pipedec, python and packages; None for a package that is not installed
    flash_attention_error: str | None  # why an installed flash-attn cannot be imported
    gpus: GpuFacts
    network: NetworkFacts
    cpus: int
    memory_bytes: int  # RAM
    available_memory_bytes: int
    shared_memory_bytes: int | None  # of /dev/shm; None where there is none
    free_shared_memory_bytes: int | None
    open_files: int
    redis_server: str | None  # path and version of the server binary; None without one
    redis: RedisFacts | None
    state_directory: str | None
    state_directory_error: str | None
    ssh: str | None
    checkpoints: Mapping[str, CheckpointFacts]


def gather(questions: Questions, port: int | None) -> HostFacts:
    """The facts of this host; ``port`` as in ``NetworkFacts``. Imports torch, and takes some seconds more if Redis does not
    answer.
    """
    server = state = state_error = flash_attention_error = total_shared = free_shared = None
    with suppress(PipedecError):
        binary = find_server_binary()
        server = f"{binary} {'.'.join(map(str, server_version(binary)))}"
    try:
        state = str(state_directory())
    except PipedecError as error:
        state_error = str(error)
    if importlib.util.find_spec("flash_attn") is not None:
        try:
            importlib.import_module("flash_attn")
        except Exception as error:  # a build for another torch fails in any way
            flash_attention_error = first_line(error)
    with suppress(OSError):
        shared = shutil.disk_usage("/dev/shm")
        total_shared, free_shared = shared.total, shared.free
    parts = questions.needs.parts() if questions.needs else []
    checkpoints = {model: checkpoint_facts(CheckpointPart("target", model, is_whole=True)) for model in questions.checkpoints}
    packages = {package: installed_version(package) for package in ("torch", "transformers", "flash-attn")}
    memory = psutil.virtual_memory()
    return HostFacts(
        python=sys.executable,
        versions={"pipedec": __version__, "python": platform.python_version()} | packages,
        flash_attention_error=flash_attention_error,
        gpus=gpu_facts(),
        network=_network(questions, port),
        cpus=usable_cpus(),
        memory_bytes=memory.total,
        available_memory_bytes=memory.available,
        shared_memory_bytes=total_shared,
        free_shared_memory_bytes=free_shared,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        redis_server=server,
        redis=_redis(questions.redis_url) if questions.redis_url else None,
        state_directory=state,
        state_directory_error=state_error,
        ssh=shutil.which("ssh"),
        checkpoints=checkpoints | {part.model: checkpoint_facts(part, spare) for part, spare in parts},
    )


def _network(questions: Questions, port: int | None) -> NetworkFacts:
    own = {interface: interface_address(interface) for interface in psutil.net_if_addrs()}
    if questions.server is not None and questions.server.interface is not None:
        address = interface_address(questions.server.interface)
    else:  # of the route to another host, else to anywhere, else any but loopback
        towards = [routed_address(peer) for peer in (*questions.peers, ANYWHERE)]
        address = next((found for found in (*towards, *own.values()) if found and not is_loopback(found)), None)
    name, slow_start = socket.gethostname(), None
    with suppress(OSError):  # not Linux
        slow_start = SLOW_START.read_text().strip() != "0"
    return NetworkFacts(
        host_name=name,
        is_in_file=is_this_host(questions.server) if questions.server else None,
        own_addresses=tuple(addresses_of(name)),
        interfaces={interface: found for interface, found in own.items() if found is not None},
        address=address,
        interface=interface_of(address) if address else None,
        port=port,
        slow_start_after_idle=slow_start,
        speeds_mbps={interface: found.speed for interface, found in psutil.net_if_stats().items() if found.speed > 0},
    )


def _redis(url: str) -> RedisFacts:
    address = address_of(url)
    try:
        with connect(url) as client, translated_errors(address):
            info: Any = client.info("server")

            def clock_us() -> int:
                seconds, microseconds = client.time()
                return int(seconds) * 1_000_000 + int(microseconds)

            return RedisFacts(address, str(info.get("valkey_version") or info["redis_version"]), measured_offset_us(clock_us))
    except PipedecError as error:
        return RedisFacts(address, error=str(error))


def checkpoint_facts(part: CheckpointPart, spare: CheckpointPart | None = None) -> CheckpointFacts:
    """The state of a checkpoint: whether the part that this host's ranks read is here, and the part for a ``spare``, which may
    take over other ranks.
    """
    free: int | None = None
    typical = 0  # mean bytes of a file of weights, by the index
    with suppress(OSError):
        path = Path(part.model).absolute()
        free = shutil.disk_usage(next(one for one in (path, *path.parents) if one.exists())).free
    try:
        if not (directory := model_files(part.model)).is_dir():
            return CheckpointFacts("no such directory", free_bytes=free)
        if not has_weights(directory) and part.is_read:
            TensorFiles(part.model)  # raises UserError, which names what is missing
        present, lacking = weight_files(Path(part.model)), part.missing()
        later = [file for file in (spare or part).missing() if file not in lacking]
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError):
            index = json.loads((directory / INDEX_FILE).read_text(encoding="utf-8"))
            typical = int(index["metadata"]["total_size"]) // len(set(index["weight_map"].values()))
        return CheckpointFacts(
            None, config_digest(Path(part.model)), {file.name: _sampled(file) for file in present},
            sum(file.stat().st_size for file in present),
            tuple(MissingFile(file.name, typical, file in later) for file in (*lacking, *later)), free,
        )  # fmt: skip
    except Exception as error:  # a damaged file, a disk that fails
        return CheckpointFacts(first_line(error), free_bytes=free)


def _sampled(file: Path) -> str:
    """The size of a file and a digest of pieces of it, which take little time to read."""
    size, total = file.stat().st_size, hashlib.sha256()
    with file.open("rb") as opened:
        for index in range(SAMPLES):
            opened.seek(max(0, size - SAMPLE_BYTES) * index // (SAMPLES - 1))
            total.update(opened.read(SAMPLE_BYTES))
    return f"{size} {total.hexdigest()[:16]}"
