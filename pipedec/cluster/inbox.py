"""The process that ``pipedec distribute`` starts on a host: reports which checkpoint files are missing, and receives them.

It speaks JSON, one object per line: orders on standard input, news on standard output; the bytes of a file follow the order
that announces them. An incomplete file is kept as ``NAME.DIGEST.part`` and continued by the next call. Loads no torch.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from pipedec import __version__
from pipedec.checkpoints import content_digest, remember
from pipedec.cluster.node import take_standard_streams
from pipedec.core.errors import PipedecError, UserError
from pipedec.directories import cache_directory
from pipedec.hardware import GIGA

PIECE_BYTES = 1 << 20
DIGEST_DIGITS = 12  # in the name of an incomplete file
_SPARE_BYTES = 1 << 26  # of the disk that stay free


@dataclass(frozen=True)
class WantedFile:
    """A file as it should be on this host; ``digest`` is its ``content_digest``, None if the launching machine lacks the file."""

    path: str
    num_bytes: int
    digest: str | None

    @property
    def part(self) -> Path:
        return Path(f"{self.path}.{(self.digest or '')[:DIGEST_DIGITS]}.part")

    def is_here(self) -> bool:
        """Whether this host has it, with the same content."""
        path = Path(self.path)
        if not path.is_file():
            return False
        if self.digest is None:
            return True
        try:
            return path.stat().st_size == self.num_bytes and content_digest(path, cache_directory()) == self.digest
        except UserError:
            return False

    @property
    def bytes_here(self) -> int:
        """Bytes that an earlier call has left."""
        return min(self.part.stat().st_size, self.num_bytes) if self.digest is not None and self.part.is_file() else 0


def main() -> None:
    """Entry point: ``python -m pipedec.cluster.inbox``."""
    orders, say = take_standard_streams()
    try:
        say("hello", pipedec=__version__)
        for line in orders:
            match json.loads(line):
                case {"order": "compare", "files": files}:
                    missing = [wanted for file in files if not (wanted := WantedFile(**file)).is_here()]
                    _check_room(file for file in missing if file.digest is not None)
                    say("compared", missing={file.path: file.bytes_here for file in missing})
                case {"order": "take", "file": file, "offset": offset}:
                    _receive(WantedFile(**file), offset, orders)
                    say("taken", path=file["path"])
    except PipedecError as error:
        say("failed", message=str(error))
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        say("failed", message=f"{place}{error.strerror}: checkpoints must be where this user may write")
    except KeyboardInterrupt:
        return


def _receive(file: WantedFile, offset: int, stream: BinaryIO) -> None:
    """Append the bytes from ``offset`` on to what is here, and move the file into place if its digest is right. Raises UserError
    if it is not, if the stream ends early, or if another process writes the file.
    """
    path, part = Path(file.path), file.part
    path.parent.mkdir(parents=True, exist_ok=True)
    for other in path.parent.glob(f"{path.name}.*.part"):
        if other != part:
            other.unlink()  # of another content
    part.touch()
    with part.open("r+b") as output:
        try:
            fcntl.flock(output, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            shared = "if hosts share this directory, call pipedec distribute again when it is whole"
            raise UserError(f"{part} is being written by another host or call: {shared}") from None
        output.seek(offset)
        output.truncate()
        left = file.num_bytes - offset
        while left:
            piece = stream.read(min(left, PIECE_BYTES))
            if not piece:
                raise UserError(f"{file.path} has not come whole: call pipedec distribute again")
            output.write(piece)
            left -= len(piece)
    digests: dict[str, str] = {}
    try:
        is_right = content_digest(part, None, path.name, digests) == file.digest
    except UserError:
        is_right = False
    if not is_right:
        part.unlink()
        raise UserError(f"{file.path} has come with other bytes than it was sent with: call pipedec distribute again")
    part.replace(path)
    remember(path, digests, cache_directory())


def _check_room(files: Iterable[WantedFile]) -> None:
    """Raises UserError if a directory cannot be written, or its file system has no room for what is missing."""
    needed: dict[int, tuple[Path, int]] = {}
    for file in files:
        directory = next(parent for parent in Path(file.path).parents if parent.exists())
        if not os.access(directory, os.W_OK):
            raise UserError(f"{directory} cannot be written: give this user the right to, or create {Path(file.path).parent}")
        device = directory.stat().st_dev
        _, before = needed.get(device, (directory, 0))
        needed[device] = directory, before + file.num_bytes - file.bytes_here
    for directory, num_bytes in needed.values():
        free = shutil.disk_usage(directory).free - _SPARE_BYTES
        if num_bytes > free:
            left, missing = max(free, 0) / GIGA, num_bytes / GIGA
            raise UserError(f"{directory} has {left:.2f} GB left, but {missing:.2f} GB are missing: make room there")


if __name__ == "__main__":
    main()
