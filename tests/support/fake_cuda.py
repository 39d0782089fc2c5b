"""A simulated GPU with the calls of ``torch.cuda``: streams that carry out what they are given late, one thing after the other.

Its clock goes on only when somebody waits: ``advance``, ``synchronize``, and a little with every ``query``, as if the host were
slow. Tensors are the CPU's, and a memory that is read too early holds what it held before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass
class FakeStream:
    """Work in order; ``free_at`` is when the last of it will have been carried out."""

    cuda: FakeCuda
    free_at: float = 0.0

    def query(self) -> bool:
        self.cuda.advance(self.cuda.query_seconds)
        return self.free_at <= self.cuda.now

    def wait_event(self, event: FakeEvent) -> None:
        self.free_at = max(self.free_at, event.reached_at)

    def synchronize(self) -> None:
        self.cuda.advance(self.free_at - self.cuda.now)


@dataclass
class FakeEvent:
    """A point of a stream. Its time cannot be asked for before it has been reached."""

    cuda: FakeCuda
    reached_at: float = float("inf")

    def record(self, stream: FakeStream) -> None:
        self.reached_at = max(stream.free_at, self.cuda.now)

    def query(self) -> bool:
        self.cuda.advance(self.cuda.query_seconds)
        return self.reached_at <= self.cuda.now

    def synchronize(self) -> None:
        self.cuda.advance(self.reached_at - self.cuda.now)

    def elapsed_time(self, end: FakeEvent) -> float:
        if max(self.reached_at, end.reached_at) > self.cuda.now:
            raise RuntimeError("an event was asked for its time before it was reached")
        return (end.reached_at - self.reached_at) * 1000


@dataclass
class FakeCuda:
    """Stands for the module ``torch.cuda``.

    Attributes:
        now: seconds of the host's clock.
        query_seconds: how much the clock goes on with every ``query``.
    """

    now: float = 100.0
    query_seconds: float = 1e-5
    _streams: list[FakeStream] = field(default_factory=list)  # the present one last
    _due: list[tuple[float, Callable[[], None]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._streams.append(FakeStream(self))

    def current_stream(self, device: Any = None) -> FakeStream:
        return self._streams[-1]

    def Stream(self, device: Any = None) -> FakeStream:  # noqa: N802
        return FakeStream(self)

    def Event(self, enable_timing: bool) -> FakeEvent:  # noqa: N802
        assert enable_timing
        return FakeEvent(self)

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        self._streams.append(stream)
        yield
        self._streams.pop()

    def give(self, seconds: float, work: Callable[[], None] = lambda: None) -> None:
        """Give the present stream work that takes so long, and has its effect at the end."""
        stream = self.current_stream()
        stream.free_at = max(stream.free_at, self.now) + seconds
        self.at(stream.free_at, work)

    def at(self, seconds: float, work: Callable[[], None]) -> None:
        """Something happens when the clock has come so far."""
        self._due.append((seconds, work))

    def advance(self, seconds: float) -> None:
        """The clock goes on, and what is due happens, in order."""
        end = self.now + max(seconds, 0.0)
        while due := sorted((entry for entry in self._due if entry[0] <= end), key=lambda entry: entry[0]):
            self._due.remove(due[0])
            self.now = max(self.now, due[0][0])
            due[0][1]()
        self.now = end


@dataclass
class FakeWork:
    """A transfer that ends at a time of its own: ``wait`` lets the present stream wait, as with NCCL, and not the host."""

    cuda: FakeCuda
    ends_at: float

    def wait(self) -> None:
        stream = self.cuda.current_stream()
        stream.free_at = max(stream.free_at, self.ends_at)
