"""Several hosts on one machine: each has a network, a host name and mounts of its own, and an sshd; a switch joins them.

They are Linux namespaces without names, which the kernel removes with their last process. A reaper in a session of its own ends
those processes when this process closes a pipe to it, by whatever end. The switch is a bridge that the reaper holds, or a process
that delays frames. Hosts share the file system but for what is mounted for one of them. Their names resolve as Debian installs
them: each host's own to 127.0.1.1.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import IO, Any

from support.instruction_sets import LIMITS
from support.slow_links import TUN, Link, SlowSwitch, address_of

TOOLS = ("ip", "tc", "sshd", "ssh", "ssh-keygen", "unshare", "nsenter", "mount", "hostname")
PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"  # where the tools are, though not on every PATH
DROP = ("action", "mirred", "egress", "redirect", "dev", "dropped")
START_SECONDS = 30.0
QUEUE_FRAMES = 10_000  # that wait for a slow switch before one is lost
PASSED_ON = ("PIPEDEC_TESTS", "PYTHONPATH", "OMP_NUM_THREADS", *LIMITS)  # sshd passes nothing on of its own accord

# Runs in the namespaces of a new host: $1 its name, $2 its directory, $3 the configuration of its sshd, $4 sshd.
BECOME_A_HOST = """
mount --bind "$2/hosts" /etc/hosts
mount --bind "$2/resolv.conf" /etc/resolv.conf
mount -t sysfs sysfs /sys
hostname "$1"
ip link set lo up
echo ready
exec "$4" -D -e -f "$3"
"""


def lacking(slow_links: bool = False) -> list[str]:
    """What this machine has not got that hosts need, in words."""
    found = [] if os.geteuid() == 0 else ["root"]
    found += [tool for tool in TOOLS if shutil.which(tool, path=PATH) is None]
    found += [str(TUN)] if slow_links and not TUN.exists() else []
    return found or ([] if _may_unshare() else ["leave to make network namespaces with bridges, mounts and host names"])


def _may_unshare() -> bool:
    """Tries what a host is made of; nothing of it outlives the command."""
    attempt = """
    mount -t sysfs sysfs /sys && mount --bind /etc/hosts /etc/hosts && hostname try
    ip link add br0 type bridge && ip link add one type veth peer name two && tc qdisc add dev one ingress
    """
    command = ["unshare", "--net", "--uts", "--mount", "sh", "-e", "-c", attempt]
    return subprocess.run(command, capture_output=True, check=False, env={"PATH": PATH}).returncode == 0


class Hosts:
    """Hosts 0 … n − 1, named ``host-1`` … ``host-n``, at 10.77.0.1 … 10.77.0.n, which nobody else on the machine sees.

    Attributes:
        names: what ``hostname`` prints on each.
        ssh_config: for ``ssh -F``, on any of the hosts; ``PIPEDEC_SSH`` names it to commands that ``run`` and ``popen`` start.
    """

    def __init__(self, count: int, directory: Path, reaper: subprocess.Popen[bytes], slow: SlowSwitch | None) -> None:
        self.names = [f"host-{index + 1}" for index in range(count)]
        self.ssh_config = directory / "ssh_config"
        self._directory = directory
        self._reaper = reaper
        self._slow = slow
        self._links: dict[tuple[int, int], Link] = {}  # of pairs in ascending order; only with a slow switch
        self._key = directory / "key"
        self._holders: list[subprocess.Popen[bytes]] = []

    def start(self, links: Link | None) -> None:
        """Make the hosts, joined by ``links`` or by a bridge; each can be reached over ssh from then on."""
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # sshd gives up its rights there
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self._key], check=True)
        self.ssh_config.write_text(
            f"Host *\n  IdentityFile {self._key}\n  IdentitiesOnly yes\n  StrictHostKeyChecking no\n"
            "  UserKnownHostsFile /dev/null\n  LogLevel ERROR\n"
        )
        if self._slow is None:
            self._in_switch("ip", "link", "add", "br0", "type", "bridge")
            self._in_switch("ip", "link", "set", "br0", "up")
        else:
            self._reap_later(self._slow.process.pid)
        for index in range(len(self.names)):
            self._start_host(index)
        if links is not None:
            self._links = dict.fromkeys(combinations(range(len(self.names)), 2), links)
            for first, second in self._links:
                self.link(first, second)
        for index in range(len(self.names)):
            _wait_for_line(self._directory / self.names[index] / "sshd.log", b"Server listening")

    def address(self, index: int) -> str:
        return f"10.77.0.{index + 1}"

    def directory(self, index: int) -> Path:
        """A directory of this host's own, removed at the end."""
        return self._directory / self.names[index]

    def run(
        self, index: int, *command: str | Path, environment: Mapping[str, str] | None = None, **kwargs: Any
    ) -> subprocess.CompletedProcess[str]:
        """``subprocess.run`` on a host: with captured text, without input, for a minute at most, unless ``kwargs`` differ."""
        usual: dict[str, Any] = {"text": True, "stdin": subprocess.DEVNULL, "timeout": 60, "check": False}
        if "stdout" not in kwargs:
            usual["capture_output"] = True
        if "input" in kwargs:
            del usual["stdin"]
        return subprocess.run(self._entering(index, command), env=self._environment(index, environment), **usual | kwargs)

    def popen(
        self, index: int, *command: str | Path, environment: Mapping[str, str] | None = None, **kwargs: Any
    ) -> subprocess.Popen[Any]:
        """``subprocess.Popen`` on a host; a signal sent to it reaches the command itself."""
        return subprocess.Popen(self._entering(index, command), env=self._environment(index, environment), **kwargs)

    def command_lines(self) -> list[str]:
        """Of every process on the hosts."""
        pids = _inside({_network_of(holder.pid) for holder in self._holders})
        found = []
        for pid in pids:
            with suppress(OSError):
                found.append(Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").replace("\0", " "))
        return found

    def bind(self, index: int, source: Path, target: Path) -> None:
        """Let one host find ``source`` where the others have ``target``: a file or a directory."""
        self.run(index, "mount", "--bind", source, target, check=True)

    def unbind(self, index: int, target: Path) -> None:
        """Undo ``bind``."""
        self.run(index, "umount", target, check=True)

    def link(self, first: int, second: int, **changes: Any) -> None:
        """Change attributes of the link between two hosts that were joined by links, from now on."""
        pair = min(first, second), max(first, second)
        self._links[pair] = replace(self._links[pair], **changes)
        assert self._slow is not None
        self._slow.set_link(*pair, self._links[pair])

    def unplug(self, index: int) -> None:
        """Take the network cable out, which leads to a bridge."""
        self._in_switch("ip", "link", "set", f"port{index}", "down")

    def plug(self, index: int) -> None:
        self._in_switch("ip", "link", "set", f"port{index}", "up")

    def kill_python(self, index: int) -> None:
        """Kill what runs Python on a host."""
        for pid in list(_inside({_network_of(self._holders[index].pid)})):
            with suppress(OSError):
                if "python" in os.readlink(f"/proc/{pid}/exe"):
                    os.kill(pid, signal.SIGKILL)

    def block_ports(self, index: int) -> None:
        """A firewall on a host, which drops connections to all ports but ssh's; it says nothing to the client."""
        tcp, opening = ("u32", "match", "ip", "protocol", "6", "0xff"), ("match", "u8", "0x02", "0x12", "at", "33")  # SYN, no ACK
        self._filter(index, 1, *tcp, "match", "u16", "22", "0xffff", "at", "22", "flowid", "1:1")
        self._filter(index, 2, *tcp, *opening, *DROP)

    def deafen(self, index: int, source: int) -> None:
        """Let nothing from host ``source`` arrive on a host any more; the other direction still works."""
        self._filter(index, 1, "u32", "match", "ip", "src", f"{self.address(source)}/32", *DROP)

    def slow_down(self, index: int, megabits: int) -> None:
        """Let a host send no more than this per second."""
        limit = ["rate", f"{megabits}mbit", "burst", "16kb", "latency", "200ms"]
        self._on(index, "tc", "qdisc", "add", "dev", "eth0", "root", "tbf", *limit)

    def speed_up(self, index: int) -> None:
        """Undo ``slow_down``."""
        self._on(index, "tc", "qdisc", "delete", "dev", "eth0", "root")

    def _filter(self, index: int, priority: int, *rule: str) -> None:
        """A rule for what arrives at a host."""
        if self.run(index, "ip", "link", "show", "dropped").returncode:
            self._on(index, "ip", "link", "add", "dropped", "type", "veth", "peer", "name", "dropped-end")
            self._on(index, "ip", "link", "set", "dropped", "up")  # without its other end it loses everything
            self._on(index, "tc", "qdisc", "add", "dev", "eth0", "ingress")
        command = ["tc", "filter", "add", "dev", "eth0", "parent", "ffff:", "protocol", "ip", "prio", str(priority)]
        self._on(index, *command, *rule)

    def unblock(self, index: int) -> None:
        """Remove the firewall, or let a host hear again."""
        self._on(index, "tc", "filter", "delete", "dev", "eth0", "parent", "ffff:")

    def _start_host(self, index: int) -> None:
        name, directory = self.names[index], self.directory(index)
        directory.mkdir()
        (directory / "state").mkdir(mode=0o700)
        others = "".join(f"{self.address(other)} {self.names[other]}\n" for other in range(len(self.names)) if other != index)
        (directory / "hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 {name}\n{others}")
        (directory / "resolv.conf").touch()
        (directory / "sshd_config").write_text(self._sshd_config(index))
        with (directory / "sshd.log").open("wb") as log:
            holder = subprocess.Popen(
                ["unshare", "--net", "--uts", "--mount", "sh", "-e", "-c", BECOME_A_HOST, "sh", name, directory,
                 directory / "sshd_config", str(shutil.which("sshd", path=PATH))],
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, start_new_session=True, env=_tools(),
            )  # fmt: skip
        self._holders.append(holder)
        assert holder.stdout is not None
        with holder.stdout as stdout:
            assert stdout.readline() == b"ready\n", (directory / "sshd.log").read_text()
        self._reap_later(holder.pid)
        if self._slow is None:
            port = f"port{index}"
            self._in_switch("ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", str(holder.pid))
            self._in_switch("ip", "link", "set", port, "master", "br0", "up")
        else:
            moved = ("netns", str(holder.pid), "name", "eth0", "address", address_of(index), "txqueuelen", str(QUEUE_FRAMES))
            self._in_switch("ip", "link", "set", self._slow.add_port(index), *moved)
        self._on(index, "ip", "address", "add", f"{self.address(index)}/24", "dev", "eth0")
        self._on(index, "ip", "link", "set", "eth0", "up")
        if self._slow is not None:  # as behind a router, nobody asks over a slow link for an address
            for other in range(len(self.names)):
                known = (self.address(other), "lladdr", address_of(other), "nud", "permanent")
                self._on(index, "ip", "neighbor", "add", *known, "dev", "eth0")

    def _reap_later(self, pid: int) -> None:
        """Let the reaper kill what is in the network of this process."""
        assert self._reaper.stdin is not None
        self._reaper.stdin.write(f"{_network_of(pid)}\n".encode())

    def _sshd_config(self, index: int) -> str:
        environment = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
        environment["PIPEDEC_STATE_DIR"] = str(self.directory(index) / "state")
        pairs = " ".join(f'"{name}={value}"' for name, value in environment.items())
        return (
            f"HostKey {self._key}\nAuthorizedKeysFile {self._key}.pub\nStrictModes no\nUsePAM no\nPidFile none\n"
            f"PermitRootLogin yes\nPasswordAuthentication no\nSetEnv {pairs}\n"
        )

    def _environment(self, index: int, more: Mapping[str, str] | None) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if name != "GLOO_SOCKET_IFNAME"}
        own = {
            "PATH": PATH,
            "PIPEDEC_STATE_DIR": str(self.directory(index) / "state"),
            "PIPEDEC_SSH": f"ssh -F {self.ssh_config}",
        }
        return inherited | own | dict(more or {})

    def _entering(self, index: int, command: tuple[str | Path, ...]) -> list[str | Path]:
        enter = ["nsenter", "--target", str(self._holders[index].pid), "--net", "--uts", "--mount"]
        return [*enter, "env", "-C", os.getcwd(), *command]

    def _on(self, index: int, *command: str) -> None:
        subprocess.run(self._entering(index, command), check=True, stdin=subprocess.DEVNULL, env=_tools())

    def _in_switch(self, *command: str) -> None:
        enter = ["nsenter", "--target", str((self._slow.process if self._slow else self._reaper).pid), "--net"]
        subprocess.run([*enter, *command], check=True, stdin=subprocess.DEVNULL, env=_tools())

    def close(self) -> None:
        """Wait for what the reaper has killed."""
        for holder in self._holders:
            holder.wait(START_SECONDS)


@contextmanager
def namespace_hosts(count: int, links: Link | None = None) -> Iterator[Hosts]:
    """Hosts for as long as the block runs, joined by ``links``, each pair alike at first, or by a bridge.

    Raises CalledProcessError if a command that makes them fails; see ``lacking``.
    """
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hosts-", ignore_cleanup_errors=True)))
        slow = None if links is None else stack.enter_context(closing(SlowSwitch()))
        reaper = subprocess.Popen(
            ["unshare", "--net", sys.executable, "-m", __name__, directory], bufsize=0, cwd=Path(__file__).parents[1],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        assert reaper.stdin is not None and reaper.stdout is not None
        hosts = Hosts(count, directory, reaper, slow)
        stack.callback(hosts.close)
        stack.callback(reaper.wait, START_SECONDS)
        stack.callback(reaper.stdin.close)
        with reaper.stdout as stdout:
            assert stdout.readline() == b"ready\n", "the reaper did not start"
        hosts.start(links)
        yield hosts


def _tools() -> dict[str, str]:
    """The environment for commands that make hosts."""
    return {**os.environ, "PATH": PATH}


def _network_of(pid: int | str) -> str:
    return os.readlink(f"/proc/{pid}/ns/net")


def _wait_for_line(path: Path, text: bytes) -> None:
    deadline = time.monotonic() + START_SECONDS
    while text not in path.read_bytes():
        assert time.monotonic() < deadline, path.read_text()
        time.sleep(0.01)


def _reap(networks: set[str]) -> None:
    """Kill every process in these network namespaces, until there is none."""
    deadline = time.monotonic() + START_SECONDS
    while (pids := list(_inside(networks))) and time.monotonic() < deadline:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _inside(networks: set[str]) -> Iterator[int]:
    for entry in os.listdir("/proc"):
        with suppress(OSError):
            if entry.isdigit() and _network_of(entry) in networks:
                yield int(entry)


def _main(stdin: IO[bytes], directory: str) -> None:
    """The reaper: reads the network namespaces of the hosts until its parent closes the pipe or ends, then removes all."""
    print("ready", flush=True)
    _reap({line.decode().strip() for line in stdin})
    shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    _main(sys.stdin.buffer, sys.argv[1])
