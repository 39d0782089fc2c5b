"""What happens in every timestep of a run of the shipped models: rows of each stage and draft forward, KV cells, counters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from msgspec.structs import asdict

from golden.pipelines import Models
from pipedec.core.completion import Metrics
from pipedec.core.request import TokenizedRequest
from pipedec.decoding.events import Record, Timestep

COUNTERS = ("timesteps", "hits", "misses", "draft_tokens", "cached_tokens", "pauses")
STATS = ("prompt_rows", "root_rows", "draft_rows", "mask_rows", "drafts", "accepted_tokens", "accepted_per_pos")
DIGITS = 3


def counted(metrics: Metrics) -> dict[str, int]:
    """The counters of an answer, but for its seconds."""
    return {name: getattr(metrics, name) for name in COUNTERS}


def line(stages: Mapping[int, int], drafted: Iterable[int], kv_cells: int) -> str:
    """A timestep in few characters: ``stage:rows`` of those that compute, ``draft`` rows of each forward, cells in use."""
    computing = " ".join(f"{stage}:{rows}" for stage, rows in sorted(stages.items()) if rows) or "-"
    return f"{computing} | {' '.join(map(str, drafted)) or '-'} | {kv_cells}"


def watched(models: Models, arrivals: Mapping[int, Iterable[TokenizedRequest]]) -> dict[str, Any]:
    """The schedule of requests that arrive at these timesteps in a pipeline that has learned nothing yet."""
    kv, pruned = models.new_kv(), [stage.pruned_rows for stage in models.stages]
    pipeline = models.pipeline(kv)
    watcher = _Watcher(lambda: kv.used_slots)
    pipeline.scheduler.listeners.append(watcher.note)
    for _ in pipeline.run_all(arrivals):
        continue
    pipeline.forget_prefixes()
    stats, drafted = asdict(pipeline.stats()), watcher.drafted
    return {
        "answers": [counted(answer.metrics) for _, answer in sorted(pipeline.answers.items())],
        "emulated ms": round(pipeline.emulated_ms or 0.0, DIGITS),
        "draft forwards": len(drafted),
        "draft rows": sum(drafted),
        "pruned by stage": [stage.pruned_rows - before for stage, before in zip(models.stages, pruned, strict=True)],
        **{name: stats[name] for name in STATS},
        "steps": watcher.lines,
    }


class _Watcher:
    """A listener that keeps what the record is made of.

    Attributes:
        lines: of the timesteps.
        drafted: rows of each draft forward.
    """

    def __init__(self, kv_cells: Any) -> None:
        self.lines: list[str] = []
        self.drafted: list[int] = []
        self._kv_cells = kv_cells

    def note(self, record: Record) -> None:
        if not isinstance(record, Timestep):
            return
        assert record.load is not None
        drafted = [load.rows for load in record.load.drafted]
        self.drafted += drafted
        computed = {rank: load.rows for rank, load in record.load.computed.items()}
        self.lines.append(line(computed, drafted, self._kv_cells()))
