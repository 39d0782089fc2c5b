"""Images and containers by podman, in a storage of the tests' own that nothing outlives.

The base image, Debian, is made with debootstrap under the name that the Dockerfile gives, so no registry is needed. What this
machine's pip is configured with (mirrors, certificates, wheels) is there while an image is built, and no part of it.
"""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_TOOLS = {"podman": "podman", "debootstrap": "debootstrap"}  # and their Debian packages
_MIRROR = "http://deb.debian.org/debian"
_LONGEST_SECONDS = 900.0  # to build an image on a busy machine takes half of that
_PYPI = "https://pypi.org/simple"
_LIMITS = {"nofile": resource.RLIMIT_NOFILE, "nproc": resource.RLIMIT_NPROC}
_MOST = 16384  # a machine may forbid podman's own limits, which are higher


def lacking() -> list[str]:
    """The Debian packages that are missing, or ``root``."""
    missing = [package for tool, package in _TOOLS.items() if shutil.which(tool) is None]
    return missing + ["root"] * (os.getuid() != 0)


@dataclass(frozen=True)
class Podman:
    """Podman with the storage, the state and the configuration in ``folder``."""

    folder: Path

    def command(self, *arguments: str | Path) -> list[str]:
        """The command line for these arguments."""
        places = ("--root", self.folder / "storage", "--runroot", self.folder / "run", "--tmpdir", self.folder / "tmp")
        return ["podman", *map(str, (*places, *arguments))]

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "CONTAINERS_CONF": str(self.folder / "containers.conf")}

    def call(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        """Run it to its end, with any exit status. Raises TimeoutExpired after 15 minutes."""
        return subprocess.run(
            self.command(*arguments),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env=self.environment,
            timeout=_LONGEST_SECONDS,
        )

    def __call__(self, *arguments: str | Path) -> str:
        """Standard output, without the last line end. Fails unless the exit status is 0."""
        ended = self.call(*arguments)
        assert ended.returncode == 0, (arguments, ended.returncode, ended.stdout, ended.stderr)
        return ended.stdout.strip()

    def start(self, *arguments: str | Path) -> subprocess.Popen[str]:
        """Start it, with its standard output in a pipe."""
        return subprocess.Popen(
            self.command(*arguments), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, env=self.environment
        )

    def inspect(self, name: str) -> dict[str, Any]:
        """Podman's description of an image or container."""
        found: dict[str, Any] = json.loads(self("inspect", name))[0]
        return found

    def import_base(self, name: str) -> None:
        """An image of Debian, the release that its name ``…:RELEASE-slim`` has. Raises CalledProcessError without a mirror."""
        [release] = re.findall(r":([a-z]+)-slim$", name)
        tree = self.folder / "base"
        subprocess.run(
            ["debootstrap", "--variant=minbase", release, str(tree), _MIRROR], check=True, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, timeout=_LONGEST_SECONDS,
        )  # fmt: skip
        packed = self.folder / "base.tar"
        command = ["tar", "-C", str(tree), "--exclude=./var/cache/apt/*", "-cf", str(packed), "."]
        subprocess.run(command, check=True, timeout=_LONGEST_SECONDS)
        shutil.rmtree(tree)
        self("import", packed, name)
        packed.unlink()

    def build(self, tag: str) -> subprocess.CompletedProcess[str]:
        """Build the Dockerfile for CPUs, without the public model."""
        configured, mounts = _pip_configuration()
        (self.folder / "pip.conf").write_text("[global]\n" + "".join(f"{key} = {value}\n" for key, value in configured.items()))
        local = any(Path(at).glob("torch-*+cpu-*.whl") for at in mounts)
        return self.call(
            "build", "--format", "docker", "--layers=false", "--network", "host", "--tag", tag, "--build-arg", "SMOLLM2=",
            "--secret", f"id=pip,src={self.folder / 'pip.conf'}", *(f"--volume={at}:{there}:ro" for at, there in mounts.items()),
            *(["--build-arg", f"TORCH_INDEX={configured.get('index-url', _PYPI)}"] if local else []), ROOT,
        )  # fmt: skip

    def discard(self) -> None:
        """Remove all containers, volumes and images, and the storage."""
        self.call("rm", "--all", "--force", "--volumes", "--time", "0")
        for what in ("volume", "image"):
            self.call(what, "rm", "--all", "--force")
        mounted = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
        for place in sorted((place for place in mounted if Path(place).is_relative_to(self.folder)), reverse=True):
            subprocess.run(["umount", place], check=True)
        shutil.rmtree(self.folder)


@contextmanager
def podman(folder: Path) -> Iterator[Podman]:
    """Podman that keeps everything in ``folder``, a new one with a short name; nothing of it remains."""
    folder.mkdir()
    limits = [f'"{name}={(most := _limit(kind))}:{most}"' for name, kind in _LIMITS.items()]
    runtime = 'runtime = "runc"\n' if shutil.which("runc") else ""  # crun refuses control groups of both versions at once
    (folder / "containers.conf").write_text(
        f"[containers]\ndefault_ulimits = [{', '.join(limits)}]\n"
        f'[engine]\n{runtime}cgroup_manager = "cgroupfs"\nevents_logger = "none"\n'
    )
    made = Podman(folder)
    try:
        yield made
    finally:
        made.discard()


def _limit(kind: int) -> int:
    _, hard = resource.getrlimit(kind)
    return _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)


def _pip_configuration() -> tuple[dict[str, str], dict[str, str]]:
    """The configuration of this machine's pip without local indexes; and its directories, with their places in a container."""
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], check=True, capture_output=True, text=True).stdout
    options = dict(re.findall(r"^(?:global|install|:env:)\.([\w-]+)='(.*)'$", listed, re.MULTILINE))
    mounts = {
        place: f"/mnt/{number}-{Path(place).name}"
        for number, place in enumerate(word for value in options.values() for word in value.split())
        if os.path.isabs(place) and os.path.exists(place)
    }
    moved = {
        key: " ".join(mounts.get(word, word) for word in value.split() if not word.startswith("file:"))
        for key, value in options.items()
    }
    return {key: value for key, value in moved.items() if value}, mounts
