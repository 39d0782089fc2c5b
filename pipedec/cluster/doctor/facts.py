"""Facts about a host, as plain data that fits into JSON, and how to find them out.

Judges nothing: ``checks`` and ``comparison`` interpret the facts. An unknown fact is None, or a text that gives the reason.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import resource
import shutil
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import psutil

from pipedec import __version__
from pipedec.checkpoints import CheckpointPart
from pipedec.cluster.clock import measured_offset_us
from pipedec.cluster.doctor.checkpoints import CheckpointFacts, checkpoint_facts
from pipedec.cluster.doctor.gpus import GpuFacts, first_line, gpu_facts
from pipedec.cluster.doctor.needs import HostNeeds
from pipedec.cluster.network import addresses_of, interface_address, interface_of, is_loopback, is_this_host, routed_address
from pipedec.cluster.versions import installed_version
from pipedec.config import ServerConfig, state_directory
from pipedec.core import PipedecError
from pipedec.scheduler import connect
from pipedec.scheduler.client import address_of, translated_errors
from pipedec.scheduler.server import find_server_binary, server_version

ANYWHERE = "192.0.2.1"  # an address for documentation: no host has it, and only a default route leads there


@dataclass(frozen=True)
class Questions:
    """Information that a host cannot find out by itself.

    Attributes:
        redis_url: the Redis to reach, with its password: never print it. None if there is none yet.
        starts_redis: a Redis server will be started on this host.
        checkpoints: those that must be there as a whole.
        peers: names or addresses of the other hosts.
        server: the host's entry in the file; None without a file.
        needs: what the ranks of the partition take here; None if there is no partition, or no rank of it on this host.
    """

    redis_url: str | None = field(default=None, repr=False)
    starts_redis: bool = True
    checkpoints: tuple[str, ...] = ()
    peers: tuple[str, ...] = ()
    server: ServerConfig | None = None
    needs: HostNeeds | None = None


@dataclass(frozen=True)
class NetworkFacts:
    """Names and addresses.

    Attributes:
        host_name: what the machine calls itself.
        is_in_file: whether that is the host that the file means; None if unknown.
        own_addresses: what that name resolves to on the machine itself.
        interfaces: name and address of every interface that has an address.
        address: the one to talk to the other hosts with; None if there is none but loopback.
        interface: the interface of ``address``.
        speeds_mbps: what interfaces have negotiated, in Mbit/s, where they tell.
        port: a TCP port that could be opened on all addresses; None if none could.
    """

    host_name: str
    is_in_file: bool | None
    own_addresses: tuple[str, ...]
    interfaces: Mapping[str, str]
    address: str | None
    interface: str | None
    port: int | None
    speeds_mbps: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class RedisFacts:
    """The Redis of the run, seen from this host: either ``error``, or the server's version and its clock minus this host's."""

    address: str
    version: str = ""
    clock_offset_us: int = 0
    error: str | None = None


@dataclass(frozen=True)
class HostFacts:
    """All of it.

    Attributes:
        python: path of the interpreter.
        versions: of pipedec, python and packages; None for a package that is not installed.
        flash_attention_error: why an installed flash-attn cannot be imported.
        memory_bytes, available_memory_bytes: RAM.
        shared_memory_bytes, free_shared_memory_bytes: of /dev/shm; None where there is none.
        redis_server: path and version of the server binary, or ``redis_server_error``.
    """

    python: str
    versions: Mapping[str, str | None]
    flash_attention_error: str | None
    gpus: GpuFacts
    network: NetworkFacts
    cpus: int
    memory_bytes: int
    available_memory_bytes: int
    shared_memory_bytes: int | None
    free_shared_memory_bytes: int | None
    open_files: int
    redis_server: str | None
    redis_server_error: str | None
    redis: RedisFacts | None
    state_directory: str | None
    state_directory_error: str | None
    ssh: str | None
    checkpoints: Mapping[str, CheckpointFacts]


def gather(questions: Questions, port: int | None) -> HostFacts:
    """The facts of this host. Takes as long as importing torch, and some seconds more if Redis does not answer.

    Args:
        port: a TCP port that was opened on this host; None if none could be.
    """
    server, server_error = _redis_server()
    state, state_error = _state_directory()
    total, free = _shared_memory()
    memory = psutil.virtual_memory()
    return HostFacts(
        python=sys.executable,
        versions=package_versions(),
        flash_attention_error=_flash_attention_error(),
        gpus=gpu_facts(),
        network=_network(questions, port),
        cpus=os.cpu_count() or 1,
        memory_bytes=memory.total,
        available_memory_bytes=memory.available,
        shared_memory_bytes=total,
        free_shared_memory_bytes=free,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        redis_server=server,
        redis_server_error=server_error,
        redis=_redis(questions.redis_url) if questions.redis_url else None,
        state_directory=state,
        state_directory_error=state_error,
        ssh=shutil.which("ssh"),
        checkpoints=_checkpoints(questions),
    )


def package_versions() -> dict[str, str | None]:
    """Versions of pipedec, python, and the packages on which results depend."""
    packages = {package: installed_version(package) for package in ("torch", "transformers", "flash-attn")}
    return {"pipedec": __version__, "python": platform.python_version(), **packages}


def _checkpoints(questions: Questions) -> dict[str, CheckpointFacts]:
    parts = questions.needs.parts() if questions.needs else []
    found = {model: checkpoint_facts(CheckpointPart("target", model, is_whole=True)) for model in questions.checkpoints}
    return found | {part.model: checkpoint_facts(part, spare) for part, spare in parts}


def _flash_attention_error() -> str | None:
    if importlib.util.find_spec("flash_attn") is None:
        return None
    try:
        importlib.import_module("flash_attn")
    except Exception as error:  # a build for another torch fails in any way
        return first_line(error)
    return None


def _network(questions: Questions, port: int | None) -> NetworkFacts:
    address = _address_towards(questions)
    name = socket.gethostname()
    own = {interface: interface_address(interface) for interface in psutil.net_if_addrs()}
    return NetworkFacts(
        host_name=name,
        is_in_file=is_this_host(questions.server) if questions.server else None,
        own_addresses=tuple(addresses_of(name)),
        interfaces={interface: found for interface, found in own.items() if found is not None},
        address=address,
        interface=interface_of(address) if address else None,
        port=port,
        speeds_mbps={interface: found.speed for interface, found in psutil.net_if_stats().items() if found.speed > 0},
    )


def _address_towards(questions: Questions) -> str | None:
    """The address of the configured interface, else of the route to another host, else to anywhere, else any but loopback."""
    if questions.server is not None and questions.server.interface is not None:
        return interface_address(questions.server.interface)
    towards = [routed_address(peer) for peer in (*questions.peers, ANYWHERE)]
    anything = [interface_address(interface) for interface in psutil.net_if_addrs()]
    candidates = [address for address in (*towards, *anything) if address and not is_loopback(address)]
    return candidates[0] if candidates else None


def _shared_memory() -> tuple[int | None, int | None]:
    try:
        usage = shutil.disk_usage("/dev/shm")
    except OSError:
        return None, None
    return usage.total, usage.free


def _redis_server() -> tuple[str | None, str | None]:
    try:
        binary = find_server_binary()
    except PipedecError as error:
        return None, str(error)
    return f"{binary} {'.'.join(map(str, server_version(binary)))}", None


def _redis(url: str) -> RedisFacts:
    address = address_of(url)
    try:
        with connect(url) as client, translated_errors(address):
            info: Any = client.info("server")
            version = str(info.get("valkey_version") or info["redis_version"])
            return RedisFacts(address, version, measured_offset_us(lambda: _microseconds(client.time())))
    except PipedecError as error:
        return RedisFacts(address, error=str(error))


def _microseconds(time: Any) -> int:
    seconds, microseconds = time
    return int(seconds) * 1_000_000 + int(microseconds)


def _state_directory() -> tuple[str | None, str | None]:
    try:
        return str(state_directory()), None
    except PipedecError as error:
        return None, str(error)
