"""A run of faults: its order, the rows that it writes, one for each fault, and their summary by kind."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Annotated

from msgspec import Meta

from benchmarks.output import check_known, pipeline_row
from pipedec.bench.options import Counts, Positive
from pipedec.bench.record import ROWS_FILE, Row, append_rows, drop_unfinished_line, header, key_of, plain
from pipedec.core.errors import UserError
from pipedec.core.request import DEFAULT_METHOD
from pipedec.core.values import check_fields
from pipedec.flags import Help
from pipedec.plan.spec import PipelineSpec, run_description
from soak.faults.kinds import KINDS, plan_fault, possible_kinds
from soak.faults.load import ANSWERS, PROMPTS, make_questions
from soak.faults.session import Session
from soak.faults.usage import growth, leaks

KV_BYTES = 64 << 20  # of each rank, by default: all of it has soon been used


@dataclass(frozen=True)
class FaultsConfig:
    """Which faults, under which load. Raises UserError for a number out of range or an unknown name."""

    count: Annotated[Positive | None, Help("Number of faults.")] = 24  # None for as many as ``hours`` allow
    hours: Annotated[Annotated[float, Meta(gt=0)] | None, Help("Or for how long there are faults.", "HOURS")] = None
    kinds: Annotated[tuple[str, ...], Help(f"Kinds of faults: {', '.join(KINDS)} (default: all possible).")] = field(
        default_factory=possible_kinds
    )
    concurrency: Annotated[Counts, Help("Numbers of requests that are asked together.")] = (1, 3, 8)
    answers: Annotated[tuple[str, ...], Help("Kinds of answers.")] = ANSWERS
    methods: Annotated[tuple[str, ...], Help("Methods, which take turns.")] = (DEFAULT_METHOD,)
    dialect: str = "apar"  # of answers in threads
    prompts: Annotated[tuple[str, ...], Help("A prompt; may be repeated (default: six).", "TEXT", "--prompt", repeated=True)] = (
        field(default_factory=lambda: PROMPTS)
    )
    max_tokens: Annotated[Positive, Help("Tokens of an answer; one in threads may end early.")] = 160
    seed: Annotated[int, Help("Seed of the choice of faults and their moments.")] = 0

    def __post_init__(self) -> None:
        check_fields(self)
        for kind in self.kinds:
            check_known("kind of fault", kind, KINDS)
            if kind not in possible_kinds():
                raise UserError(f"--kinds {kind} needs root, ss of iproute2, and a kernel that closes sockets: leave it out")
        if (self.count is None) == (self.hours is None):
            raise UserError("how many faults? give --count N or --hours H")

    @property
    def identity(self) -> Row:
        """The settings that must be equal for a run to continue another."""
        return {name: value for name, value in plain(self).items() if name not in ("count", "hours")}

    def wants(self, index: int, seconds: float) -> bool:
        """Return True if fault ``index`` is still to come after so many seconds."""
        return index < self.count if self.count is not None else seconds < 3600 * (self.hours or 0)


def run_faults(config: FaultsConfig, spec: PipelineSpec, out: Path, on_news: Callable[[str], None]) -> list[Row]:
    """Run what is missing in ``out`` of the faults, and return the rows of all of them.

    Raises PipedecError if the cluster does not start, or the undisturbed twin does not answer.
    """
    spec = spec.replaced(kv_cache_memory=spec.settings.limits.kv_cache_memory or KV_BYTES)
    questions = make_questions(config.prompts, config.answers, config.methods, config.max_tokens, config.dialect)
    pipeline = pipeline_row(run_description(spec))
    key = key_of([config.identity, pipeline])
    rows = _known(out / ROWS_FILE, key)
    first = header("faults", {**plain(config), "pipeline": pipeline, "kv_bytes": spec.settings.limits.kv_cache_memory})
    with Session(spec, questions, out, key) as session:
        on_news("undisturbed answers")
        session.open()
        seconds = rows[-1]["at_s"] if rows else 0.0
        while config.wants(len(rows), seconds):
            fault = plan_fault(len(rows), config.seed, config.kinds, config.concurrency, len(questions), spec.settings.cut.stages)
            on_news(f"fault {fault.index}: {fault.kind.name}, {len(fault.questions)} requests")
            began = time.perf_counter()
            row = session.trial(fault)
            seconds += time.perf_counter() - began
            rows.append({**first, "key": key, "index": fault.index, "at_s": round(seconds, 3), **row})
            append_rows(out / ROWS_FILE, rows[-1:])
    return rows


def _known(path: Path, key: str) -> list[Row]:
    """The faults of earlier runs that this one continues."""
    drop_unfinished_line(path)
    if not path.is_file():
        return []
    rows: list[Row] = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [row for row in rows if row["key"] == key]


def faults_found(rows: Sequence[Row]) -> list[str]:
    """A line for each difference, hang and leak in the rows of ``run_faults``."""
    found = [f"fault {row['index']} ({row['kind']}): {problem}" for row in rows for problem in row["problems"]]
    return [*found, *leaks(grown(rows))]


def grown(rows: Sequence[Row]) -> Row:
    """``usage.growth`` of the rows of ``run_faults``."""
    return growth(rows, rows[0]["config"]["kv_bytes"])


def summarised(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """A line for each kind, in the order of their first faults.

    The kind, its faults, the answers that were compared, seconds as median, 95th percentile and maximum, and its problems. The
    seconds are from a fault to the next epoch, of a supervisor to the end of the last process; to the next epoch's first work;
    and to the next token of each answer that was under way.
    """
    lines = []
    for kind in dict.fromkeys(row["kind"] for row in rows):
        own = [row for row in rows if row["kind"] == kind]
        recovered = [row for row in own if row["recovery"]]
        noticed = [row["recovery"]["detection_s"] if row["recovery"] else row.get("gone_s") for row in own]
        served, waits = [row["recovery"]["served_s"] for row in recovered], [wait for row in recovered for wait in row["waits_s"]]
        answers, problems = (str(sum(len(row[name]) for row in own)) for name in ("requests", "problems"))
        lines.append((kind, str(len(own)), answers, *map(_spread, (noticed, served, waits)), problems))
    return lines


def _spread(seconds: Sequence[float | None]) -> str:
    ordered = sorted(one for one in seconds if one is not None)
    if not ordered:
        return "-"
    figures = median(ordered), ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))], ordered[-1]
    return ", ".join(f"{value:.2f}" for value in figures)
