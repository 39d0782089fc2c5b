"""``pipedec serve`` as a process, with its log, and clients of it."""

from __future__ import annotations

import json
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import psutil

from pipedec.cluster.local import LocalCluster
from support.processes import wait_until
from support.programs import Started

PROMPT = "Natalia sold 12 clips in April."
START_SECONDS = 150.0


class Serving:
    """A server that was started; its standard output is read all the time."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.log: list[dict[str, Any]] = []
        self.text = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.text += line.decode()
            self.log.append(json.loads(line))

    def events(self, name: str) -> list[dict[str, Any]]:
        return [line for line in list(self.log) if line["event"] == name]

    def wait_for(self, event: str) -> Serving:
        """Wait until the log has such a line."""
        assert wait_until(lambda: self.events(event) or self.process.poll() is not None, START_SECONDS), event
        assert self.events(event), self.ended()
        return self

    @property
    def url(self) -> str:
        return str(self.events("listening")[0]["url"])

    @property
    def client(self) -> httpx2.Client:
        return httpx2.Client(base_url=self.url, timeout=60)

    def end(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def ended(self, seconds: float = 30.0) -> tuple[int, str]:
        """Exit status and standard error, without a traceback in it."""
        assert self.process.stderr is not None
        assert self.process.wait(seconds) is not None
        self._reader.join(10)
        err = self.process.stderr.read().decode()
        assert "Traceback" not in err, err
        return self.process.returncode, err

    def finish(self) -> str:
        """End it in order, and return what it has written to standard error."""
        self.end()
        status, err = self.ended()
        assert status == 0, err
        return err

    @property
    def descendants(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)


def in_front_of(cluster: LocalCluster, started: Started, *flags: str | Path) -> Serving:
    """A front-end of a running cluster that takes requests."""
    address = cluster.address
    flags = ("--redis", address.redis_url, "--run", address.run_id, "--served-model-name", "tiny", *flags)
    return Serving(started("serve", *flags, *(() if "--uds" in flags else ("--port", "0")))).wait_for("ready")


def body(max_tokens: int, **fields: Any) -> dict[str, Any]:
    """Of a request for a greedy answer of this length."""
    return {"model": "tiny", "prompt": PROMPT, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, **fields}


class Stream:
    """The events of a streamed completion, one after the other."""

    def __init__(self, response: httpx2.Response) -> None:
        assert response.status_code == 200
        self._lines = response.iter_lines()
        self.text = ""
        self.finish_reason: str | None = None
        self.error: dict[str, Any] | None = None
        self.is_done = False

    def read(self) -> bool:
        """Take the next event; False at the end."""
        for line in self._lines:
            if line.startswith("data: "):
                self._take(line.removeprefix("data: "))
                return True
        return False

    def _take(self, data: str) -> None:
        assert not self.is_done
        if data == "[DONE]":
            self.is_done = True
            return
        event = json.loads(data)
        self.error = event.get("error", self.error)
        for choice in event.get("choices", []):
            self.text += choice["text"]
            self.finish_reason = choice["finish_reason"] or self.finish_reason

    def read_all(self) -> Stream:
        while self.read():
            continue
        return self


@contextmanager
def streaming(client: httpx2.Client, max_tokens: int, **fields: Any) -> Iterator[Stream]:
    """A streamed completion of which the first event has arrived."""
    with client.stream("POST", "/v1/completions", json=body(max_tokens, stream=True, **fields)) as response:
        stream = Stream(response)
        assert stream.read()
        yield stream


def metric(client: httpx2.Client, name: str) -> float:
    """The sum of a metric's values."""
    lines = client.get("/metrics").text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((name + "{", name + " ")))


def is_idle(cluster: LocalCluster) -> bool:
    """Whether no request runs or waits."""
    assert cluster.scheduler is not None
    status = cluster.scheduler.status()
    return not status.running and not status.waiting
