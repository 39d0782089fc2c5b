"""A Redis server that keeps its data."""

from __future__ import annotations

from pathlib import Path

from pipedec.scheduler import EmbeddedRedis


class LastingServer(EmbeddedRedis):
    """One that keeps its data in ``folder``, and has them again when the next one is started there.

    Args:
        more: further lines of the server's configuration.
    """

    def __init__(self, folder: Path, port: int | None = None, password: str | None = None, more: tuple[str, ...] = ()) -> None:
        settings = (f"dir {folder}", "appendonly yes", "appendfsync always", "aof-use-rdb-preamble no", *more)
        super().__init__(port=port, password=password, settings=settings)
