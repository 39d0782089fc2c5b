"""This machine in its network: its addresses and interfaces, the name it goes by, and what it can connect to.

Asks the operating system. Knows no rank, no plan and no Redis.
"""

from __future__ import annotations

import ipaddress
import socket
import time
import uuid
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from pipedec.config import ServerConfig

_DISCARD_PORT = 9  # nothing is sent there: a route depends on an address alone


def addresses_of(host: str) -> list[str]:
    """The IP addresses that a name resolves to here; the address itself if it is one; empty for an unknown name."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return []
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


def routed_address(host: str, port: int = _DISCARD_PORT) -> str | None:
    """The address of this machine from which it reaches ``host``; None if the name is unknown or no route leads there."""
    with suppress(OSError, UnicodeError):
        for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
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
    entries = psutil.net_if_addrs().get(interface, [])
    for family in (socket.AF_INET, socket.AF_INET6):
        for entry in entries:
            if entry.family == family:
                return str(entry.address)
    return None


def is_this_host(server: ServerConfig) -> bool | None:
    """Whether ``server`` of a cluster.yaml is this machine; None if that cannot be decided.

    A configured ``hostname`` decides alone. Else ``host``, and then the destination of ``ssh``, is this machine's name or is
    looked up.
    """
    if server.hostname is not None:
        return is_own_name(server.hostname)
    for name in (server.host, host_of_destination(server.ssh_destination)):
        if is_own_name(name):
            return True
        if addresses := addresses_of(name):
            return any(map(_is_own, addresses))
    return None


def is_own_name(name: str) -> bool:
    """Whether this machine calls itself so; the domain need not be given, and case does not matter."""
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
    """None if a TCP connection can be opened in time, else why not, in words."""
    deadline = time.monotonic() + seconds
    try:
        candidates = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return "unknown host name"
    reason = f"no answer within {seconds:g} s"
    for family, kind, protocol, _, place in candidates:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.settimeout(max(0.001, deadline - time.monotonic()))
                probe.connect(place)
                return None
        except TimeoutError:
            return f"no answer within {seconds:g} s"
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
    return reason


def machine_id() -> str:
    """The same for processes that share a machine and its network, and for no others."""
    boot, network = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/net")
    if boot.is_file() and network.exists():
        return f"{boot.read_text().strip()}-{network.stat().st_ino}"
    return f"{socket.gethostname()}-{uuid.getnode():x}"


def is_loopback(address: str) -> bool:
    """Whether only this machine itself can be reached there."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _is_own(address: str) -> bool:
    return is_loopback(address) or interface_of(address) is not None
