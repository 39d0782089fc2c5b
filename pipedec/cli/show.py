"""The terminal of a command: what goes to standard error, progress, and Ctrl-C and SIGTERM."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

console = Console(stderr=True, highlight=False)


def show_sentence(sentence: str | None) -> None:
    """Print a sentence on a line of its own, if there is one."""
    if sentence is not None:
        console.print(sentence, soft_wrap=True, markup=False)


@contextmanager
def loading_bars(bars: Mapping[str, Collection[int]]) -> Iterator[Callable[[int, str, int, int], None]]:
    """Progress bars over the weights of ranks and their warm-up, by title; yields the callback for a cluster's ``start``.

    Without a terminal, each of several bars is a line when it is full.
    """
    columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn()
    reported: dict[int, tuple[str, int, int]] = {}
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        tasks = {title: progress.add_task(f"{title}: starting", total=None) for title in bars}

        def update(rank: int, what: str, done: int, total: int) -> None:
            reported[rank] = what, done, total
            title = next(title for title, ranks in bars.items() if rank in ranks)
            alike = [reported[other] for other in bars[title] if other in reported and reported[other][0] == what]
            completed, in_all = sum(one[1] for one in alike), sum(one[2] for one in alike)
            described = f"{title}: warming up" if what == "warming" else f"{title}: {what} weights"
            shown = f"{described}, {completed} of {in_all} forwards" if what == "warming" else described
            progress.update(tasks[title], description=shown, completed=completed, total=in_all)
            if completed == in_all and len(bars) > 1 and not console.is_terminal:
                console.print(f"{described}: done", soft_wrap=True)

        yield update


class Interrupts:
    """From its creation on, SIGTERM raises KeyboardInterrupt like Ctrl-C, even where Ctrl-C is ignored (in a background job).

    Python drops, and prints, an exception that a signal handler raises in a finalizer or in the callback of a weak reference;
    every import has such callbacks. Here it is not printed, and a command that waits checks for missed ones in every turn.
    """

    def __init__(self) -> None:
        self.has_come = False
        self._raises = True
        self._print_unraisable = sys.unraisablehook
        sys.unraisablehook = self._dropped
        signal.signal(signal.SIGTERM, self._interrupt)
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._interrupt)

    def raise_missed(self) -> None:
        """Raises KeyboardInterrupt if a signal has come."""
        if self.has_come:
            raise KeyboardInterrupt

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Signals raise nothing here: raised within a lock's code, the exception could leave the lock held for ever.
        Call ``raise_missed`` in every turn.
        """
        self._raises = False
        try:
            yield
        finally:
            self._raises = True

    def _dropped(self, dropped: sys.UnraisableHookArgs) -> None:
        if not (self.has_come and isinstance(dropped.exc_value, KeyboardInterrupt)):
            self._print_unraisable(dropped)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self.has_come = True
        if self._raises:
            raise KeyboardInterrupt
