"""What decode threads are worth: the figures of a run as a Markdown document and as JSON.

Owns the statistics, and the APAR paper's numbers beside ours. *Forked* answers are those of two threads or more; every table
has them beside all answers. Ratios are geometric means over prompts (PASTA §5.1), other figures plain ones; time per token is
all milliseconds over all text tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, geometric_mean

from pipedec.bench.report.markdown import markdown_table
from pipedec.bench.report.prompt_sets import PROMPT_SETS
from pipedec.bench.threads_rows import BASELINE, SEQUENTIAL, Question, ThreadRow, ThreadRows

ALL, FORKED = "all", "forked"
# "APAR: LLMs Can Do Auto-Parallel Auto-Regressive Decoding", Tables 1, 2, 7 and 8: APAR-7B. Cached and attended tokens are
# means over the categories that it accelerates.
PAPER_LINES = (
    ["apar, the paper's 7B", "Vicuna bench", "", "", "5.1", "81%", "303 / 417", "27%", "166 / 256", "35%", "", "", "", ""],
    ["apar, the paper's 7B", "MT-bench", "", "", "2.7", "37%", "502 / 571", "12%", "418 / 497", "16%", "", "", "", ""],
)
_ABOUT = (
    "Emulated, computed clock: times are arithmetic, tokens and rows are real. Decoding alone, without the prompt. To a prompt "
    "in a dialect all methods and pipelines gave the same answer. Forked: answers of two threads or more; cut: at max_tokens. "
    "Ratios are geometric means over prompts; APAR's saved tokens are those of the categories that it accelerates."
)


@dataclass(frozen=True)
class Structure:
    """What the answers in a dialect look like, whatever decoded them.

    Attributes:
        threads: of an answer, the main one included; ``forked_share`` is that of answers with two or more.
        cached, attended: tokens of ``ThreadMetrics``; *flat* is the same text in one thread.
        parallelism, theoretical_speedup: PASTA's; the latter over the sequential answer, None if there is none.
        cut_share: of answers that end at ``max_tokens``.
        anomalies: in all.
    """

    dialect: str
    prompt_set: str
    answers: str
    count: int
    threads: float
    forked_share: float
    cached: float
    cached_flat: float
    attended: float
    attended_flat: float
    parallelism: float
    theoretical_speedup: float | None
    cut_share: float
    anomalies: int


@dataclass(frozen=True)
class Speed:
    """What the answers of a method on a pipeline cost in a dialect.

    Attributes:
        occupancy: share of group-timesteps with rows.
        rows_per_busy: mean rows of these.
        over_same, over_pp: speed-ups per answer over the same method, and over plain pipeline parallelism, in one thread.
        over_same_token, over_pp_token: the same per text token.
    """

    stages: int
    dialect: str
    method: str
    answers: str
    count: int
    ms_per_answer: float
    ms_per_token: float
    timesteps: float
    hit_rate: float | None
    occupancy: float
    rows_per_busy: float
    over_same: float | None
    over_pp: float | None
    over_same_token: float | None
    over_pp_token: float | None


@dataclass(frozen=True)
class Four:
    """With threads and without, with speculation and without, over the same prompts: ms per text token, ms per answer.

    Speed-ups are over neither.
    """

    stages: int
    dialect: str
    method: str
    answers: str
    count: int
    ms_per_token: dict[str, float]
    ms_per_answer: dict[str, float]
    speedup_token: dict[str, float]
    speedup_answer: dict[str, float]


COMBINATIONS = ("neither", "threads", "speculation", "both")


def structures(rows: ThreadRows) -> list[Structure]:
    """By dialect: every prompt set, then all sets; all answers, then forked ones."""
    sets = list(dict.fromkeys(name for name, _ in rows.questions))
    found = []
    for dialect in rows.dialects:
        answers = rows.answers(dialect)
        for name in [*sets, None] if len(sets) > 1 else sets:
            members = [row for row in answers.values() if name in (row.question[0], None)]
            for kind, chosen in ((ALL, members), (FORKED, [row for row in members if row.forked])):
                if chosen:
                    found.append(_structure(rows, dialect, name or ALL, kind, chosen))
    return found


def speeds(rows: ThreadRows) -> list[Speed]:
    """By stages, dialect and method; answers in one thread first."""
    dialects = [SEQUENTIAL] * rows.is_sequential_known + rows.dialects
    found = []
    for stages in rows.stages:
        for dialect in dialects:
            for method in rows.methods:
                for kind, questions in _selections(rows, dialect):
                    chosen = _members(rows, stages, dialect, method, questions)
                    if chosen:
                        found.append(_speed(rows, kind, chosen))
    return found


def combinations(rows: ThreadRows) -> list[Four]:
    """By stages, dialect and speculative method, over the prompts that all four answered."""
    found = []
    for stages in rows.stages:
        for dialect in rows.dialects:
            for method in rows.speculative:
                for kind, questions in _selections(rows, dialect):
                    four = _four(rows, stages, dialect, method, kind, questions)
                    found += [four] if four else []
    return found


def document(rows: ThreadRows) -> str:
    """All figures as JSON."""
    figures = {
        "structure": [asdict(one) for one in structures(rows)],
        "speed": [asdict(one) for one in speeds(rows)],
        "combinations": [asdict(one) for one in combinations(rows)],
        "anomalies": {dialect: _anomalies(rows.answers(dialect).values()) for dialect in rows.dialects},
    }
    return json.dumps(figures, indent=1) + "\n"


def markdown(rows: ThreadRows) -> str:
    """All figures as tables."""
    first = rows.all[0]
    parts = [f"Preset {first.preset}, {first.models}. {_ABOUT}"]
    parts += ["## Answers in threads", _structure_table(structures(rows)), *_anomaly_text(rows)]
    parts += ["## What they cost", _speed_table(speeds(rows))]
    fours = combinations(rows)
    if fours:
        parts += ["## Threads, speculation, both", _four_table(fours)]
    return "\n\n".join(parts) + "\n"


def _structure(rows: ThreadRows, dialect: str, prompt_set: str, kind: str, chosen: Sequence[ThreadRow]) -> Structure:
    sequential = rows.answers(SEQUENTIAL)
    theoretical = [
        row.metrics.theoretical_speedup(sequential[row.question].metrics.tokens) for row in chosen if row.question in sequential
    ]
    return Structure(
        dialect=dialect,
        prompt_set=prompt_set,
        answers=kind,
        count=len(chosen),
        threads=fmean(row.metrics.threads for row in chosen),
        forked_share=fmean(row.forked for row in chosen),
        cached=fmean(row.metrics.max_cached_tokens for row in chosen),
        cached_flat=fmean(row.metrics.max_cached_tokens_flat for row in chosen),
        attended=fmean(row.metrics.attended_tokens for row in chosen),
        attended_flat=fmean(row.metrics.attended_tokens_flat for row in chosen),
        parallelism=_mean(row.metrics.parallelism for row in chosen) or 0.0,
        theoretical_speedup=_mean(theoretical),
        cut_share=fmean(row.finish_reason == "length" for row in chosen),
        anomalies=sum(sum(row.anomalies.values()) for row in chosen),
    )


def _speed(rows: ThreadRows, kind: str, chosen: Sequence[ThreadRow]) -> Speed:
    first = chosen[0]
    judged = sum(row.hits + row.misses for row in chosen)
    same, plain = (
        [rows.find(row.stages, SEQUENTIAL, method, row.question) for row in chosen] for method in (first.method, BASELINE)
    )
    return Speed(
        stages=first.stages,
        dialect=first.dialect,
        method=first.method,
        answers=kind,
        count=len(chosen),
        ms_per_answer=fmean(row.decode_ms for row in chosen),
        ms_per_token=_ms_per_token(chosen),
        timesteps=fmean(row.timesteps for row in chosen),
        hit_rate=sum(row.hits for row in chosen) / judged if judged else None,
        occupancy=_share(sum(row.busy for row in chosen), sum(row.places for row in chosen)),
        rows_per_busy=_share(sum(row.rows for row in chosen), sum(row.busy for row in chosen)),
        over_same=_speedup(chosen, same, _answer_ms),
        over_pp=_speedup(chosen, plain, _answer_ms),
        over_same_token=_speedup(chosen, same, _token_ms),
        over_pp_token=_speedup(chosen, plain, _token_ms),
    )


def _four(
    rows: ThreadRows, stages: int, dialect: str, method: str, kind: str, questions: Iterable[Question]
) -> Four | None:  # fmt: skip
    ways = {
        "neither": (SEQUENTIAL, BASELINE), "threads": (dialect, BASELINE),
        "speculation": (SEQUENTIAL, method), "both": (dialect, method),
    }  # fmt: skip
    quartets = [{name: rows.find(stages, *way, question) for name, way in ways.items()} for question in questions]
    whole = [{name: row for name, row in quartet.items() if row is not None} for quartet in quartets]
    whole = [quartet for quartet in whole if len(quartet) == len(ways)]
    if not whole:
        return None
    members = {name: [quartet[name] for quartet in whole] for name in ways}
    neither = members["neither"]
    return Four(
        stages=stages,
        dialect=dialect,
        method=method,
        answers=kind,
        count=len(whole),
        ms_per_token={name: _ms_per_token(found) for name, found in members.items()},
        ms_per_answer={name: fmean(row.decode_ms for row in found) for name, found in members.items()},
        speedup_token={name: _speedup(found, neither, _token_ms) or 0.0 for name, found in members.items()},
        speedup_answer={name: _speedup(found, neither, _answer_ms) or 0.0 for name, found in members.items()},
    )


def _selections(rows: ThreadRows, dialect: str) -> Iterator[tuple[str, list[Question]]]:
    yield ALL, rows.questions
    if dialect != SEQUENTIAL:
        yield FORKED, rows.forked(dialect)


def _members(rows: ThreadRows, stages: int, dialect: str, method: str, questions: Iterable[Question]) -> list[ThreadRow]:
    found = (rows.find(stages, dialect, method, question) for question in questions)
    return [row for row in found if row is not None]


def _speedup(
    rows: Iterable[ThreadRow], bases: Iterable[ThreadRow | None], cost: Callable[[ThreadRow], float | None]
) -> float | None:
    """The mean ratio of what ``bases`` cost and what ``rows`` do, over those that both have; None if none has both."""
    ratios = []
    for row, base in zip(rows, bases, strict=True):
        ours, theirs = cost(row), base and cost(base)
        if ours and theirs:
            ratios.append(theirs / ours)
    return _mean(ratios)


def _answer_ms(row: ThreadRow) -> float:
    return row.decode_ms


def _token_ms(row: ThreadRow) -> float | None:
    return row.ms_per_token


def _ms_per_token(rows: Sequence[ThreadRow]) -> float:
    return _share(sum(row.decode_ms for row in rows), sum(row.decoded_text for row in rows))


def _mean(ratios: Iterable[float]) -> float | None:
    """Geometric; None if there are no ratios above 0."""
    positive = [ratio for ratio in ratios if ratio > 0]
    return geometric_mean(positive) if positive else None


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _anomalies(rows: Iterable[ThreadRow]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for row in rows:
        for name, count in row.anomalies.items():
            counts[name] = counts.get(name, 0) + count
    return counts


def _anomaly_text(rows: ThreadRows) -> Iterator[str]:
    told = {dialect: _anomalies(rows.answers(dialect).values()) for dialect in rows.dialects}
    parts = [
        f"{dialect}: {', '.join(f'{count} {name}' for name, count in counts.items())}"
        for dialect, counts in told.items()
        if counts
    ]
    if parts:
        yield f"Anomalies: {'; '.join(parts)}."


def _structure_table(found: Iterable[Structure]) -> str:
    lines = [
        [
            one.dialect, PROMPT_SETS.get(one.prompt_set, one.prompt_set), one.answers, str(one.count),
            f"{one.threads:.1f}", f"{one.forked_share:.0%}",
            f"{one.cached:.0f} / {one.cached_flat:.0f}", f"{1 - _share(one.cached, one.cached_flat):.0%}",
            f"{one.attended:.0f} / {one.attended_flat:.0f}", f"{1 - _share(one.attended, one.attended_flat):.0%}",
            f"{one.parallelism:.2f}", _times(one.theoretical_speedup), f"{one.cut_share:.0%}",
            str(one.anomalies),
        ]
        for one in found
    ]  # fmt: skip
    titles = [
        "dialect", "prompts", "answers", "number", "threads", "of two or more", "max cached / flat", "saved", "attended / flat",
        "saved", "parallelism", "theoretical speed-up", "cut", "anomalies",
    ]  # fmt: skip
    papers = PAPER_LINES if any(line[0] == "apar" for line in lines) else ()
    return markdown_table(titles, [*lines, *papers], left=(0, 1, 2))


def _speed_table(found: Iterable[Speed]) -> str:
    lines = [
        [
            str(one.stages), _dialect_name(one.dialect), one.method, one.answers, str(one.count), f"{one.ms_per_answer:.0f}",
            f"{one.ms_per_token:.1f}", f"{one.timesteps:.0f}", "–" if one.hit_rate is None else f"{one.hit_rate:.0%}",
            f"{one.occupancy:.0%}", f"{one.rows_per_busy:.1f}",
            *map(_times, (one.over_same, one.over_pp, one.over_same_token, one.over_pp_token)),
        ]
        for one in found
    ]  # fmt: skip
    titles = [
        "stages", "dialect", "method", "answers", "number", "ms/answer", "ms/text token", "timesteps", "hit rate", "occupancy",
        "rows where busy", "answer, over one thread", "answer, over pp in one", "text token, over one thread",
        "text token, over pp in one",
    ]  # fmt: skip
    return markdown_table(titles, lines, left=(1, 2, 3))


def _four_table(found: Iterable[Four]) -> str:
    lines = []
    for one in found:
        begin = [str(one.stages), one.dialect, one.method, one.answers, str(one.count)]
        for name, times, speedups in (
            ("text token", one.ms_per_token, one.speedup_token), ("answer", one.ms_per_answer, one.speedup_answer),
        ):  # fmt: skip
            ratios = (f"{speedups[way]:.2f}×" for way in COMBINATIONS[1:])
            lines.append([*begin, name, *(f"{times[way]:.1f}" for way in COMBINATIONS), *ratios])
    titles = ["stages", "dialect", "speculation by", "answers", "number", "ms per", *COMBINATIONS]
    return markdown_table([*titles, *(f"{way}, over neither" for way in COMBINATIONS[1:])], lines, left=(1, 2, 3, 5))


def _dialect_name(name: str) -> str:
    return "one thread" if name == SEQUENTIAL else name


def _times(ratio: float | None) -> str:
    return "–" if ratio is None else f"{ratio:.2f}×"
