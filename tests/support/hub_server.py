"""A Hugging Face hub of the tests' own: an HTTP server that answers what huggingface_hub asks for models, and fails on request.

As on the real one, weights are stored apart: their address redirects to another one, with their SHA-256 as ETag. A model is a
directory ``ORG/MODEL`` below the root; a revision other than ``main`` is a directory ``ORG/MODEL@REVISION``.

    python -m support.hub_server ROOT --host 10.77.0.1 --port 8099 --log served.jsonl
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit

_WEIGHTS = (".safetensors", ".gguf")
_CHUNK = 1 << 16


@dataclass
class Hub:
    """The hub's models and failures, and what it has served.

    Attributes:
        gated: repositories whose terms were not accepted.
        broken: files of which one byte is wrong.
        cut_after: a transfer of weights ends after so many bytes; None for whole ones.
        down: answers with status 503.
        page: comes in the place of weights, with status 200.
        seconds_per_chunk: of 64 KiB, for slow transfers.
        served: for each transfer of weights, the address of the client, the file, its first byte, and the number of bytes sent.
        asked: the paths of all requests.
    """

    root: Path
    gated: set[str] = field(default_factory=set)
    broken: set[str] = field(default_factory=set)
    cut_after: int | None = None
    down: bool = False
    page: bytes | None = None
    seconds_per_chunk: float = 0.0
    log: Path | None = None
    url: str = ""
    served: list[tuple[str, str, int, int]] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    def directory(self, repo: str, revision: str) -> Path | None:
        """The files of a revision, which may be given as a branch or as a commit; None if there is none."""
        main = self.root / repo
        named = {"main": main} | {folder.name.partition("@")[2]: folder for folder in main.parent.glob(f"{main.name}@*")}
        named |= {commit(folder): folder for folder in list(named.values())}
        return named.get(revision)

    def served_bytes(self, client: str | None = None) -> int:
        """Bytes of weights that were sent, to one client or to all."""
        return sum(sent for address, _, _, sent in self.served if client in (None, address))


def commit(directory: Path) -> str:
    """A commit for what a directory holds (40 hex digits)."""
    listed = [f"{file.relative_to(directory)} {git_digest(file)}" for file in files_of(directory)]
    return hashlib.sha1("\n".join(listed).encode()).hexdigest()


def files_of(directory: Path) -> list[Path]:
    return sorted(file for file in directory.rglob("*") if file.is_file())


@lru_cache(maxsize=1000)
def git_digest(file: Path) -> str:
    content = file.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@lru_cache(maxsize=1000)
def sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *arguments: Any) -> None: ...

    def do_HEAD(self) -> None:
        self._answer(sends=False)

    def do_GET(self) -> None:
        self._answer(sends=True)

    def _answer(self, sends: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.asked.append(path)
        if self.hub.down:
            return self._refuse(503, "")
        if listed := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", path):
            return self._list(listed[1], listed[2] or "main")
        if found := re.fullmatch(r"/(stored/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            return self._send(found[2], found[3], found[4], is_stored=found[1] is not None, sends=sends)
        return self._refuse(404, "EntryNotFound")

    def _opened(self, repo: str, revision: str) -> Path | None:
        """The directory of a revision; None if the request has been refused."""
        if not (self.hub.root / repo).is_dir():
            self._refuse(401, "RepoNotFound")
        elif repo in self.hub.gated:
            self._refuse(403, "GatedRepo")
        elif (directory := self.hub.directory(repo, revision)) is None:
            self._refuse(404, "RevisionNotFound")
        else:
            return directory
        return None

    def _list(self, repo: str, revision: str) -> None:
        if (directory := self._opened(repo, revision)) is None:
            return
        siblings: list[dict[str, Any]] = []
        for file in files_of(directory):
            one = {"rfilename": str(file.relative_to(directory)), "size": file.stat().st_size, "blobId": git_digest(file)}
            if file.suffix in _WEIGHTS:
                one["lfs"] = {"sha256": sha256(file), "size": file.stat().st_size, "pointerSize": 134}
            siblings.append(one)
        document = json.dumps({"id": repo, "modelId": repo, "sha": commit(directory), "siblings": siblings}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(document)))
        self.end_headers()
        self.wfile.write(document)

    def _send(self, repo: str, revision: str, name: str, is_stored: bool, sends: bool) -> None:
        if (directory := self._opened(repo, revision)) is None:
            return
        file = directory / name
        if not file.is_file():
            return self._refuse(404, "EntryNotFound")
        if self.hub.page is not None and is_stored:
            return self._send_page(self.hub.page)
        size, is_weights = file.stat().st_size, file.suffix in _WEIGHTS
        first = int(self.headers.get("Range", "bytes=0-")[len("bytes=") :].partition("-")[0]) if sends else 0
        redirects = is_weights and not is_stored
        self.send_response(302 if redirects else 206 if first else 200)
        self.send_header("X-Repo-Commit", commit(directory))
        self.send_header("ETag", f'"{sha256(file) if is_weights else git_digest(file)}"')
        if redirects:
            self.send_header("X-Linked-ETag", f'"{sha256(file)}"')
            self.send_header("X-Linked-Size", str(size))
            self.send_header("Location", f"http://{self.headers['Host']}/stored/{repo}/resolve/{revision}/{quote(name)}")
            self.send_header("Content-Length", "0")
            return self.end_headers()
        if first:
            self.send_header("Content-Range", f"bytes {first}-{size - 1}/{size}")
        self.send_header("Content-Length", str(size - first))
        self.end_headers()
        if sends:
            self._write(file, name, first, is_weights)

    def _send_page(self, page: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(page)))
        self.end_headers()
        self.wfile.write(page)

    def _write(self, file: Path, name: str, first: int, is_weights: bool) -> None:
        content = bytearray(file.read_bytes())
        if name in self.hub.broken:
            content[-1] ^= 1
        last = len(content) if self.hub.cut_after is None or not is_weights else min(len(content), first + self.hub.cut_after)
        sent = 0
        try:
            while first + sent < last:
                part = content[first + sent : min(last, first + sent + _CHUNK)]
                self.wfile.write(part)
                sent += len(part)
                time.sleep(self.hub.seconds_per_chunk)
        except OSError:
            pass  # the client has gone
        self.close_connection = self.close_connection or first + sent < len(content)
        if is_weights:
            record = (self.client_address[0], name, first, sent)
            self.hub.served.append(record)
            if self.hub.log is not None:
                with self.hub.log.open("a") as log:
                    log.write(json.dumps(record) + "\n")

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", "refused")
        self.send_header("Content-Length", "0")
        self.end_headers()


def _server(hub: Hub, host: str, port: int) -> ThreadingHTTPServer:
    server = ThreadingHTTPServer((host, port), type("Handler", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.url = f"http://{host}:{server.server_port}"
    return server


@contextmanager
def running_hub(root: Path) -> Iterator[Hub]:
    """A hub on a free port of this machine, in a thread."""
    hub = Hub(root)
    with _server(hub, "127.0.0.1", 0) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        try:
            yield hub
        finally:
            server.shutdown()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("root", type=Path)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8099)
    parser.add_argument("--log", type=Path)
    parser.add_argument("--seconds-per-chunk", type=float, default=0.0)
    given = parser.parse_args()
    own = Hub(given.root, log=given.log, seconds_per_chunk=given.seconds_per_chunk)
    with _server(own, given.host, given.port) as forever:
        print(own.url, flush=True)
        forever.serve_forever()
