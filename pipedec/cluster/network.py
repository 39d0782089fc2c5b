"""This machine and others: its name, addresses, interfaces and packages, what it can connect to, offsets between clocks.

Queries the operating system. Knows no rank, no plan and no Redis.
"""

from __future__ import annotations

import ipaddress
import socket
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from pipedec.config import ServerConfig

CLOCK_SAMPLES = 8
_DISCARD_PORT = 9  # any port will do, as nothing is sent: a route depends on the address alone


def addresses_of(host: str) -> list[str]:
    """The IP addresses that a name resolves to here; the address itself if it is one; empty for an unknown name."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return []
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


def routed_address(host: str) -> str | None:
    """The address of this machine from which it reaches ``host``; None if the name is unknown or no route leads there."""
    with suppress(OSError, UnicodeError):
        for family, kind, protocol, _, address in socket.getaddrinfo(host, _DISCARD_PORT, type=socket.SOCK_DGRAM):
            with suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.connect(address)
                return str(probe.getsockname()[0])
    return None


def interface_of(address: str) -> str | None:
    """The network interface that has this address; None if none has."""
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.family in (socket.AF_INET, socket.AF_INET6) and entry.address == address for entry in entries):
            return name
    return None


def interface_address(interface: str) -> str | None:
    """The address of a network interface, IPv4 rather than IPv6; None if there is no such interface or it has none."""
    by_family = {entry.family: entry.address for entry in reversed(psutil.net_if_addrs().get(interface, []))}  # the first of each
    return by_family.get(socket.AF_INET) or by_family.get(socket.AF_INET6)


def is_this_host(server: ServerConfig) -> bool | None:
    """Whether ``server`` of a cluster.yaml is this machine; None if its names are unknown here.

    A configured ``hostname`` is compared with this machine's name. Otherwise ``host``, then the host of ``ssh``, must be this
    machine's name or resolve to one of its addresses.
    """
    if server.hostname is not None:
        return is_own_name(server.hostname)
    for name in (server.host, host_of_destination(server.ssh_destination)):
        if is_own_name(name):
            return True
        if addresses := addresses_of(name):
            return any(is_loopback(address) or interface_of(address) is not None for address in addresses)
    return None


def is_own_name(name: str) -> bool:
    """Whether this is the machine's own name, in any case and with or without its domain."""
    own, other = socket.gethostname().lower(), name.lower()
    if own == other:
        return True
    short_is_enough = "." not in own or "." not in other
    return short_is_enough and own.partition(".")[0] == other.partition(".")[0]


def host_of_destination(destination: str) -> str:
    """The host of a destination of ssh: ``host``, ``user@host`` or ``ssh://user@host:port``."""
    if destination.startswith("ssh://"):
        with suppress(ValueError):
            return urlsplit(destination).hostname or destination
    return destination.rpartition("@")[2]


def can_connect(address: str, port: int, seconds: float) -> str | None:
    """None if a TCP connection can be opened in time, else the reason, in lower case."""
    try:
        socket.create_connection((address, port), seconds).close()
    except (socket.gaierror, UnicodeError):
        return "unknown host name"
    except TimeoutError:
        return f"no answer within {seconds:g} s"
    except OSError as error:
        return (error.strerror or str(error)).lower()
    return None


def machine_id() -> str:
    """An identifier that processes have in common if, and only if, they share a machine and its network namespace."""
    boot, network = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/net")
    if boot.is_file() and network.exists():
        return f"{boot.read_text().strip()}-{network.stat().st_ino}"
    return f"{socket.gethostname()}-{uuid.getnode():x}"


def is_loopback(address: str) -> bool:
    """Whether only this machine itself can be reached there."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def is_public(address: str) -> bool:
    """Whether the whole Internet can have a route to it: not within a site, a carrier's network or a VPN."""
    return ipaddress.ip_address(address.partition("%")[0]).is_global


def measured_offset_us(their_clock_us: Callable[[], int]) -> int:
    """The clock of another machine minus this one's, in µs, from the fastest of several round trips, which is the most precise.
    ``their_clock_us`` asks the other machine for its time, in µs since the epoch.
    """
    samples = []
    for _ in range(CLOCK_SAMPLES):
        before_us = time.time_ns() // 1000
        theirs_us = their_clock_us()
        after_us = time.time_ns() // 1000
        samples.append((after_us - before_us, theirs_us - (before_us + after_us) // 2))
    return min(samples)[1]


def installed_version(package: str) -> str | None:
    """The version of a package, without importing it; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
