"""The pods of a LeaderWorkerSet as processes of this machine, and a kubelet that starts containers again when they end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipedec.scheduler.redis_process import free_port

Manifest = Mapping[str, Any]


@dataclass
class Container:
    """A container's command with its whole environment, and the process that runs it, once it is started."""

    command: Sequence[str]
    environment: Mapping[str, str]
    log: Path
    process: subprocess.Popen[bytes] | None = None
    num_starts: int = 0

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=dict(self.environment), start_new_session=True
            )
        self.num_starts += 1

    def keep(self) -> None:
        """Start it again if it has ended."""
        if self.process is not None and self.process.poll() is not None:
            self.start()

    def kill(self) -> None:
        """As a kernel out of memory does: all of its processes at once."""
        if (process := self.process) is not None:  # ``keep`` may start another one meanwhile
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(20)


@dataclass
class PodGroup:
    """One group of a LeaderWorkerSet, with a free port for each of ``ports`` and a directory for each mount.

    Args:
        settings: what ``envFrom`` adds.
        secrets: by key.
    """

    manifest: Manifest
    settings: Mapping[str, str]
    secrets: Mapping[str, str]
    directory: Path
    ports: dict[int, int] = field(default_factory=lambda: {port: free_port() for port in (6379, 8000, 29500)})

    def __post_init__(self) -> None:
        template = self.manifest["spec"]["leaderWorkerTemplate"]
        self.size: int = template["size"]
        self.containers: dict[tuple[int, str], Container] = {}
        for index in range(self.size):
            pod = template["workerTemplate" if index else "leaderTemplate"]["spec"]
            for container in [*pod.get("initContainers", ()), *pod["containers"]]:
                self.containers[index, container["name"]] = self._container(index, container)

    def start(self) -> None:
        for container in self.containers.values():
            container.start()

    def keep(self) -> None:
        """Start what has ended again, as kubelets do."""
        for container in self.containers.values():
            container.keep()

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Within the block a thread starts containers again."""
        ended = threading.Event()

        def keep() -> None:
            while not ended.wait(0.1):
                self.keep()

        keeper = threading.Thread(target=keep)
        keeper.start()
        try:
            yield
        finally:
            ended.set()
            keeper.join()

    def stop(self) -> None:
        for container in self.containers.values():
            container.kill()

    def output(self) -> str:
        return "".join(f"--- {one.log.name}\n{one.log.read_text()}" for one in self.containers.values() if one.log.exists())

    def _container(self, index: int, container: Manifest) -> Container:
        name = container["name"]
        environment = {
            **os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "LWS_LEADER_ADDRESS": "127.0.0.1", "LWS_GROUP_SIZE": str(self.size), "LWS_WORKER_INDEX": str(index),
            **(self.settings if "envFrom" in container else {}),
        }  # fmt: skip
        for variable in container["env"]:
            value = variable.get("value")
            if value is None:
                value = self.secrets.get(variable["valueFrom"]["secretKeyRef"]["key"])
            if value is not None:
                environment[variable["name"]] = self._here(value, index, container)
        command = [self._here(word, index, container) for word in (*container["command"], *container["args"])]
        return Container(command, environment, self.directory / f"{index}-{name}.log")

    def _here(self, text: str, index: int, container: Manifest) -> str:
        """With ports and mounts of this machine instead of the container's."""
        for port, free in self.ports.items():
            text = re.sub(rf"\b{port}\b", str(free), text)
        mounts = {mount["mountPath"]: self.directory / f"pod-{index}" / mount["name"] for mount in container["volumeMounts"]}
        for path in mounts.values():
            path.mkdir(parents=True, exist_ok=True)
        return re.sub(rf"(?<![\w/.])({'|'.join(mounts)})(?=/|\s|$)", lambda found: str(mounts[found[1]]), text)
