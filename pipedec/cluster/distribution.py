"""Copies missing checkpoint files from this machine to the hosts of a cluster.yaml, over ssh. Loads no torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from pipedec import __version__
from pipedec.checkpoints import CheckpointPart, content_digest
from pipedec.cluster.inbox import PIECE_BYTES, WantedFile
from pipedec.cluster.node_link import News, NodeLink
from pipedec.config import ClusterConfig
from pipedec.core.errors import PipedecError, UserError
from pipedec.directories import cache_directory
from pipedec.gguf import is_gguf, is_named

INBOX_MODULE = "pipedec.cluster.inbox"
CONNECT_SECONDS = 30.0
COMPARE_SECONDS = 3600.0  # for a host to digest its files, or one that it has received
END_SECONDS = 5.0

Wanted = tuple[WantedFile, Path]  # a file as a host should have it, and its path here


class Sources:
    """The checkpoints on this machine; ``models`` are their paths on the hosts, by key."""

    def __init__(self, models: Mapping[str, str]) -> None:
        self._models = models
        self._digests: dict[Path, str] = {}

    def wanted(self, parts: Iterable[CheckpointPart], checking: Callable[[Path], None] = lambda file: None) -> list[Wanted]:
        """Every file of these parts of checkpoints. Calls ``checking`` with each file before its digest is computed. Raises
        UserError if a checkpoint is not here at all, or damaged.
        """
        found = []
        for part in parts:
            place = self._models[part.key]
            for source in () if is_named(place) else (*part.describing_files(), *part.files()):
                path = Path(place) if is_gguf(part.model) else Path(place) / source.relative_to(part.model)
                size = 0
                if source.is_file():
                    size = source.stat().st_size
                    if source not in self._digests:
                        checking(source)
                        self._digests[source] = content_digest(source, cache_directory())
                found.append((WantedFile(str(path), size, self._digests.get(source)), source))
        return found


@dataclass(frozen=True)
class Missing:
    """How many files a host lacks, their total size in bytes, and how many of these bytes it already has."""

    files: int
    num_bytes: int
    bytes_there: int


class Delivery:
    """The transfer of checkpoint files to one host, over a connection that ends with the ``with`` block. Raises UserError if this
    machine has no ssh.
    """

    def __init__(self, config: ClusterConfig, host: str, files: Sequence[Wanted]) -> None:
        self._host = host
        self._files = {file.path: (file, source) for file, source in files}
        self._news: SimpleQueue[News] = SimpleQueue()
        self._link = NodeLink(config.server(host), config.launch, self._news, module=INBOX_MODULE)
        self._missing: Mapping[str, int] = {}

    def __enter__(self) -> Delivery:
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is not None:  # another thread may be sending
            self._link.wait(0.0)
        self._link.end()
        self._link.wait(time.monotonic() + END_SECONDS)

    def compare(self) -> Missing:
        """Ask the host what it lacks. Raises UserError if it cannot receive files (with the reason), or if this machine lacks one
        of them, too; PipedecError if it does not answer in time.
        """
        hello = self._await("hello", CONNECT_SECONDS)
        if hello["pipedec"] != __version__:
            raise UserError(f"{self._host} has pipedec {hello['pipedec']}, but here it is {__version__}: install the same")
        self._link.order("compare", files=[asdict(file) for file, _ in self._files.values()])
        self._missing = self._await("compared", COMPARE_SECONDS)["missing"]
        files = [self._files[path][0] for path in self._missing]
        if lost := [file.path for file in files if file.digest is None]:
            raise UserError(f"{self._host} lacks {lost[0]}, and so does this machine: download it, or give --from DIR")
        return Missing(len(files), sum(file.num_bytes for file in files), sum(self._missing.values()))

    def send(self, sent: Callable[[int], None]) -> None:
        """Send what ``compare`` has found; calls ``sent`` with the number of bytes of each piece. Raises as ``compare``."""
        for path, offset in self._missing.items():
            file, source = self._files[path]
            self._link.order("take", file=asdict(file), offset=offset)
            with source.open("rb") as content:
                content.seek(offset)
                while (piece := content.read(PIECE_BYTES)) and self._link.write(piece):
                    sent(len(piece))
            self._await("taken", COMPARE_SECONDS)

    def _await(self, kind: str, seconds: float) -> dict[str, Any]:
        try:
            _, news = self._news.get(timeout=seconds)
        except Empty:
            raise PipedecError(f"{self._host} did not answer within {seconds:.0f} s: see `pipedec doctor`") from None
        if news is None:
            raise UserError(self._link.why_it_ended())
        if news["news"] != kind:
            raise UserError(f"{self._host}: {news.get('message', news['news'])}")
        return news
