"""Rows of a benchmark of faults by kind of fault: how often, how long, how well."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from pipedec.bench.record import Row

Spread = tuple[float, float, float]  # median, 95th percentile, largest


@dataclass(frozen=True)
class KindSummary:
    """All faults of one kind.

    Attributes:
        answers: how many were compared.
        noticed: seconds from the fault to the next epoch, of a supervisor to the end of the last process; None without any.
        served: to the next epoch's first work; ``waits``: to the next token of each answer that was under way.
    """

    kind: str
    faults: int
    answers: int
    noticed: Spread | None
    served: Spread | None
    waits: Spread | None
    problems: int


def summarised(rows: Sequence[Row]) -> list[KindSummary]:
    """In the order of the kinds' first faults."""
    return [_summary(kind, [row for row in rows if row["kind"] == kind]) for kind in dict.fromkeys(row["kind"] for row in rows)]


def noticed_seconds(row: Row) -> float | None:
    """From a fault to the next epoch, or to the end of the last process."""
    found: float | None = row["recovery"]["detection_s"] if row["recovery"] else row.get("gone_s")
    return found


def waits(row: Row) -> list[float]:
    """From a fault to the next token of each answer that was under way, in seconds; none if there was no recovery."""
    return [wait for wait in row["waits_s"] if wait is not None] if row["recovery"] else []


def _summary(kind: str, rows: Sequence[Row]) -> KindSummary:
    served = [row["recovery"]["served_s"] for row in rows if row["recovery"]]
    return KindSummary(
        kind, len(rows), sum(len(row["requests"]) for row in rows), _spread([noticed_seconds(row) for row in rows]),
        _spread(served), _spread([wait for row in rows for wait in waits(row)]), sum(len(row["problems"]) for row in rows),
    )  # fmt: skip


def _spread(seconds: Sequence[float | None]) -> Spread | None:
    ordered = sorted(one for one in seconds if one is not None)
    if not ordered:
        return None
    return median(ordered), ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))], ordered[-1]
