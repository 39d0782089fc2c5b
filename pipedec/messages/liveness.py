"""The activities of ranks, and the recoveries from lost ones."""

from __future__ import annotations

from pipedec.core import Record


class ActivityReport(Record, frozen=True):
    """The activity of a rank, as its lease reports it.

    Attributes:
        kind: ``idle``, ``computing``, ``warming`` (computing what may take long because it is computed for the first time),
            ``waiting`` (for a transfer), ``loading``, ``meeting`` or ``connecting`` (to another host).
        peer: the rank that it waits for, or whose host it tries to reach.
        seconds: how long it had lasted at the time of the report.
        longest_seconds: of its completed timesteps.
        warmed_seconds: how long ago it was warming last; None if it has not been.
        age_seconds: the age of the report, by Redis' clock.
    """

    kind: str
    peer: int | None = None
    seconds: float = 0.0
    longest_seconds: float = 0.0
    warmed_seconds: float | None = None
    age_seconds: float = 0.0

    @property
    def began(self) -> float:
        """Seconds since the activity began, if it still lasts."""
        return self.seconds + self.age_seconds

    def __str__(self) -> str:
        """For example ``waiting for rank 2, 3.1 s``."""
        return f"{self.kind}{'' if self.peer is None else f' for rank {self.peer}'}, {self.began:.1f} s"


class Recovery(Record, frozen=True):
    """An epoch that has begun because ranks, or Redis, were lost.

    Attributes:
        epoch: its number.
        lost: ranks whose processes are replaced.
        at_us: when the one before it ended, on Redis's clock, in µs since 1970.
        served_us: when its ranks served; None if they do not yet.
    """

    epoch: int
    lost: tuple[int, ...]
    reason: str
    at_us: int
    served_us: int | None = None

    @property
    def seconds(self) -> float | None:
        """How long the run was not served; None while it is not."""
        return None if self.served_us is None else (self.served_us - self.at_us) / 1e6
