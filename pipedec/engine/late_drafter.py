"""A draft model that is loaded while requests are decoded without it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread

from pipedec.decoding import Drafter


class LateDrafter:
    """Begins to load at once, in its own thread."""

    def __init__(self, load: Callable[[], Drafter]) -> None:
        self._load = load
        self._loaded: Future[Drafter] = Future()
        Thread(target=self._run, name="draft model", daemon=True).start()

    def take(self) -> Drafter | None:
        """The draft model; None while it is being loaded. Raises the exception of a failed loading."""
        return self._loaded.result() if self._loaded.done() else None

    def _run(self) -> None:
        try:
            self._loaded.set_result(self._load())
        except BaseException as error:
            self._loaded.set_exception(error)
