"""The speed-up by decode threads: the rows of a run as one data frame, and its statistics as a Markdown document and as JSON.

*Forked* answers have two threads or more; every table has them beside all answers. Ratios are geometric means over prompts
(PASTA §5.1), other figures arithmetic ones; time per token is all milliseconds over all text tokens. Frames are those of
``read_frame``; NaN means that there is nothing to compare with.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from pandas import DataFrame, Series

from benchmarks.output import markdown_table
from benchmarks.threads.benchmark import SEQUENTIAL
from pipedec.bench.record import Row
from pipedec.bench.report.style import BASELINE, PROMPT_SETS

QUESTION = ["prompt_set", "prompt_index"]
# With threads and without, with speculation and without.
COMBINATIONS = ("neither", "threads", "speculation", "both")
ALL, FORKED = "all", "forked"
_COMPUTED = "Emulated, computed clock: times are arithmetic, tokens and rows are real."
_MEASURED = "Measured on a running cluster; how full its stages are is not known."
_ABOUT = (
    "An answer's time begins with its first token: its prompt comes before. To a prompt in a dialect all methods and pipelines "
    "gave the same answer. Forked: answers of two threads or more; cut: at max_tokens. Ratios are geometric means over prompts."
)
_COSTS = ["decode_ms", "ms_per_token"]
_TIMES = [*_COSTS, "tokens_ms", "answer_ms"]
_STRUCTURE_COLUMNS = (
    ("dialect", "{dialect}"), ("prompts", "{prompt_set}"), ("answers", "{answers}"), ("number", "{count}"),
    ("threads", "{threads:.1f}"), ("of two or more", "{forked_share:.0%}"),
    ("max cached / flat", "{cached:.0f} / {cached_flat:.0f}"), ("saved", "{cached_saved:.0%}"),
    ("attended / flat", "{attended:.0f} / {attended_flat:.0f}"), ("saved", "{attended_saved:.0%}"),
    ("parallelism", "{parallelism:.2f}"), ("theoretical speed-up", "{theoretical_speedup:.2f}×"),
    ("cut", "{cut_share:.0%}"), ("anomalies", "{anomalies}"),
)  # fmt: skip
_SPEED_COLUMNS = (
    ("stages", "{stages}"), ("dialect", "{dialect}"), ("method", "{method}"), ("answers", "{answers}"), ("number", "{count}"),
    ("ms/answer", "{ms_per_answer:.0f}"), ("of these, later prompts", "{ms_of_prompts:.0f}"), ("prompt, ms", "{ms_before:.0f}"),
    ("ms/text token", "{ms_per_token:.1f}"), ("timesteps", "{timesteps:.0f}"), ("hit rate", "{hit_rate:.0%}"),
    ("occupancy", "{occupancy:.0%}"), ("rows where busy", "{rows_per_busy:.1f}"),
    ("answer, over one thread", "{over_same:.2f}×"), ("answer, over pp in one", "{over_pp:.2f}×"),
    ("without later prompts", "{over_pp_tokens:.2f}×"), ("with all prompts", "{over_pp_whole:.2f}×"),
    ("text token, over one thread", "{over_same_token:.2f}×"), ("text token, over pp in one", "{over_pp_token:.2f}×"),
)  # fmt: skip


def read_frame(records: Iterable[Row]) -> DataFrame:
    """Lines of the file as a frame; of several rows for one answer the last.

    Columns: preset, None for a running cluster; model, stages; dialect and method, ordered categories (``SEQUENTIAL`` first, then
    as they appear); the question, prompt_set and prompt_index; the fields of ``ThreadMetrics``; is_forked, two threads or more;
    anomalies, a count by name; is_cut, ended at ``max_tokens``; prefill_ms, until the first token; decode_ms, from then on;
    prompts_ms, the part of it that passed until further requests for the answer had begun; tokens_ms, the rest of it; answer_ms,
    with prefill; decoded_text, text tokens except the first token of the answer; ms_per_token, NaN without such tokens;
    timesteps, hits, misses; fill, the rows of each group in each timestep, empty for a running cluster; rows, their sum; busy,
    the group-timesteps with rows; group_timesteps, all of them.
    """
    copied = (
        "preset", "dialect", "method", *QUESTION, "anomalies", "prefill_ms", "decode_ms", "prompts_ms", "decoded_text",
        "timesteps", "hits", "misses", "fill",
    )  # fmt: skip
    frame = DataFrame(
        {
            **{name: record[name] for name in copied},
            **record["metrics"],
            "stages": record["cluster"]["stages"],
            "model": record["cluster"]["model"],
            "is_forked": record["metrics"]["threads"] >= 2,
            "is_cut": record["finish_reason"] == "length",
            "rows": sum(map(sum, record["fill"])),
            "busy": sum(rows > 0 for timestep in record["fill"] for rows in timestep),
            "group_timesteps": sum(map(len, record["fill"])),
        }
        for record in records
    )
    frame = frame.drop_duplicates(["stages", "dialect", "method", *QUESTION], keep="last")
    frame["tokens_ms"] = frame["decode_ms"] - frame["prompts_ms"]
    frame["answer_ms"] = frame["decode_ms"] + frame["prefill_ms"]
    frame["ms_per_token"] = ratio(frame["decode_ms"], frame["decoded_text"])
    for name, first in (("dialect", SEQUENTIAL), ("method", None), ("prompt_set", None)):
        categories = sorted(frame[name].unique(), key=lambda value: value != first)
        frame[name] = pd.Categorical(frame[name], categories, ordered=True)
    return frame.reset_index(drop=True)


def threaded_answers(frame: DataFrame) -> DataFrame:
    """One row per dialect and question, sequential answers excluded: neither method nor pipeline changes an answer's text."""
    return frame[frame["dialect"] != SEQUENTIAL].drop_duplicates(["dialect", *QUESTION])


def quartets(frame: DataFrame) -> DataFrame:
    """Questions answered in all four ``COMBINATIONS``: the index of each answer, and stages, dialect, method and is_forked."""
    is_threaded, is_speculative = frame["dialect"] != SEQUENTIAL, frame["method"] != BASELINE
    numbered = frame[["stages", "dialect", "method", *QUESTION, "is_forked"]].reset_index(names="both")
    found = numbered[is_threaded & is_speculative]
    for way, answers, same in (
        ("threads", is_threaded & ~is_speculative, ["dialect"]), ("speculation", ~is_threaded & is_speculative, ["method"]),
        ("neither", ~is_threaded & ~is_speculative, []),
    ):  # fmt: skip
        keys = ["stages", *same, *QUESTION]
        found = found.merge(numbered[answers][[*keys, "both"]].rename(columns={"both": way}), on=keys)
    return found


def ratio(part: Series, whole: Series) -> Series:
    """NaN where ``whole`` is 0."""
    return part / whole.where(whole > 0)


def structures(frame: DataFrame) -> DataFrame:
    """The structure of each dialect's answers, by prompt set and in all: all answers, then forked ones.

    Columns: dialect, prompt_set, answers, count; threads, the main one included; forked_share; cached and attended, tokens of
    ``ThreadMetrics``, *flat* for the same text in one thread; parallelism and theoretical_speedup, PASTA's, the latter over the
    sequential answer; cut_share; anomalies, in all.
    """
    sequential = frame[frame["dialect"] == SEQUENTIAL].drop_duplicates(QUESTION)
    answers = threaded_answers(frame).merge(sequential[[*QUESTION, "tokens"]], "left", QUESTION, suffixes=("", "_sequential"))
    answers["theoretical_speedup"] = ratio(answers["tokens_sequential"], answers["longest_chain"])
    answers["anomalies"] = answers["anomalies"].map(lambda counts: sum(counts.values()))
    sets = list(frame["prompt_set"].cat.categories)
    answers["prompt_set"] = answers["prompt_set"].cat.add_categories([ALL])
    if len(sets) > 1:
        answers = pd.concat(
            [answers, answers.assign(prompt_set=pd.Categorical([ALL] * len(answers), [*sets, ALL], ordered=True))]
        )
    groups = _with_forked(answers).groupby(["dialect", "prompt_set", "answers"], observed=True)
    found = groups.agg(
        count=("threads", "size"),
        threads=("threads", "mean"),
        forked_share=("is_forked", "mean"),
        cached=("max_cached_tokens", "mean"),
        cached_flat=("max_cached_tokens_flat", "mean"),
        attended=("attended_tokens", "mean"),
        attended_flat=("attended_tokens_flat", "mean"),
        parallelism=("parallelism", _geometric_mean),
        theoretical_speedup=("theoretical_speedup", _geometric_mean),
        cut_share=("is_cut", "mean"),
        anomalies=("anomalies", "sum"),
    )
    return found.fillna({"parallelism": 0.0}).reset_index()


def speeds(frame: DataFrame) -> DataFrame:
    """The costs of answers by method, pipeline and dialect, answers in one thread first.

    Columns: stages, dialect, method, answers, count, ms_per_answer, ms_of_prompts, ms_before, ms_per_token, timesteps, hit_rate;
    occupancy, the share of group-timesteps with rows, and rows_per_busy, the mean rows of these; over_same and over_pp,
    speed-ups per answer over the same method and over plain pipeline parallelism, both in one thread; over_same_token and
    over_pp_token, the same per text token; over_pp_tokens and over_pp_whole, over_pp without the prompts of further requests
    and with the first request's. ms_per_answer contains ms_of_prompts, the time of the former, but not ms_before, that of the
    latter.
    """
    sequential = frame[frame["dialect"] == SEQUENTIAL]
    answers = frame
    for base, rows, keys in (
        ("same", sequential, ["stages", "method", *QUESTION]),
        ("pp", sequential[sequential["method"] == BASELINE], ["stages", *QUESTION]),
    ):
        answers = answers.merge(rows[[*keys, *_TIMES]], "left", keys, suffixes=("", f"_{base}"))
        for unit, time in (("", "decode_ms"), ("_token", "ms_per_token"), ("_tokens", "tokens_ms"), ("_whole", "answer_ms")):
            answers[f"over_{base}{unit}"] = ratio(answers[f"{time}_{base}"], answers[time])
    groups = _with_forked(answers).groupby(["stages", "dialect", "method", "answers"], observed=True)
    sums = groups[["decode_ms", "decoded_text", "hits", "misses", "busy", "group_timesteps", "rows"]].sum()
    ratios = ("over_same", "over_pp", "over_same_token", "over_pp_token", "over_pp_tokens", "over_pp_whole")
    found = groups.agg(
        count=("decode_ms", "size"),
        ms_per_answer=("decode_ms", "mean"),
        ms_of_prompts=("prompts_ms", "mean"),
        ms_before=("prefill_ms", "mean"),
        timesteps=("timesteps", "mean"),
        **{name: (name, _geometric_mean) for name in ratios},
    )
    found.insert(4, "ms_per_token", ratio(sums["decode_ms"], sums["decoded_text"]).fillna(0.0))
    found.insert(6, "hit_rate", ratio(sums["hits"], sums["hits"] + sums["misses"]))
    found.insert(7, "occupancy", ratio(sums["busy"], sums["group_timesteps"]))
    found.insert(8, "rows_per_busy", ratio(sums["rows"], sums["busy"]))
    return found.reset_index()


def combinations(frame: DataFrame) -> list[Row]:
    """Time per text token and per answer in each of the ``COMBINATIONS``, and speed-ups over ``neither``.

    By stages, dialect and speculative method, over the questions that were answered in all four.
    """
    groups = _with_forked(quartets(frame)).groupby(["stages", "dialect", "method", "answers"], observed=True)
    found = []
    for group, four in groups:
        answers = {way: frame.loc[four[way]].reset_index(drop=True) for way in COMBINATIONS}
        totals = {way: one[["decode_ms", "decoded_text"]].sum() for way, one in answers.items()}
        speedups = {
            cost: {way: _geometric_mean(ratio(answers["neither"][cost], one[cost]), none=0.0) for way, one in answers.items()}
            for cost in _COSTS
        }
        found.append({
            **dict(zip(("stages", "dialect", "method", "answers"), group, strict=True)),
            "count": len(four),
            "ms_per_token": {way: float(one["decode_ms"] / (one["decoded_text"] or np.inf)) for way, one in totals.items()},
            "ms_per_answer": {way: float(one["decode_ms"].mean()) for way, one in answers.items()},
            "speedup_token": speedups["ms_per_token"],
            "speedup_answer": speedups["decode_ms"],
        })  # fmt: skip
    return found


def anomalies(frame: DataFrame) -> dict[str, Counter[str]]:
    """Anomalies by dialect and name."""
    found: dict[str, Counter[str]] = {dialect: Counter() for dialect in frame["dialect"].cat.categories if dialect != SEQUENTIAL}
    for answer in threaded_answers(frame)[::-1].itertuples():
        found[str(answer.dialect)].update(answer.anomalies)  # type: ignore[arg-type]
    return found


def document(frame: DataFrame) -> str:
    """All figures as JSON."""
    figures = {
        "structure": _records(structures(frame)),
        "speed": _records(speeds(frame)),
        "combinations": combinations(frame),
        "anomalies": anomalies(frame),
    }
    return json.dumps(figures, indent=1) + "\n"


def markdown(frame: DataFrame, about: str = "", papers: Mapping[str, Sequence[list[str]]] | None = None) -> str:
    """All figures as tables. ``about`` is appended to the text above them, ``papers`` has further lines by dialect."""
    preset, model = frame["preset"][0], frame["model"][0]
    began = _MEASURED if preset is None else f"Preset {preset}, {model}. {_COMPUTED}"
    parts = [f"{began} {_ABOUT}{about and ' '}{about}"]
    found = structures(frame)
    found = found.assign(
        prompt_set=[PROMPT_SETS.get(name, name) for name in found["prompt_set"]],
        cached_saved=1 - ratio(found["cached"], found["cached_flat"]).fillna(0.0),
        attended_saved=1 - ratio(found["attended"], found["attended_flat"]).fillna(0.0),
    )
    more = [line for dialect, lines in (papers or {}).items() if (found["dialect"] == dialect).any() for line in lines]
    parts += ["## Answers in threads", _table(found, _STRUCTURE_COLUMNS, (0, 1, 2), more)]
    counted = {
        dialect: ", ".join(f"{count} {name}" for name, count in counts.items()) for dialect, counts in anomalies(frame).items()
    }
    if any(counted.values()):
        parts.append(f"Anomalies: {'; '.join(f'{dialect}: {counts}' for dialect, counts in counted.items() if counts)}.")
    costs = speeds(frame)
    costs["dialect"] = costs["dialect"].astype(str).replace(SEQUENTIAL, "one thread")
    parts += ["## What they cost", _table(costs, _SPEED_COLUMNS, (1, 2, 3))]
    if fours := combinations(frame):
        lines = []
        for one in fours:
            begin = [str(one[name]) for name in ("stages", "dialect", "method", "answers", "count")]
            for unit, name in (("token", "text token"), ("answer", "answer")):
                times = (f"{one[f'ms_per_{unit}'][way]:.1f}" for way in COMBINATIONS)
                speedups = (f"{one[f'speedup_{unit}'][way]:.2f}×" for way in COMBINATIONS[1:])
                lines.append([*begin, name, *times, *speedups])
        titles = ["stages", "dialect", "speculation by", "answers", "number", "ms per", *COMBINATIONS]
        titles += [f"{way}, over neither" for way in COMBINATIONS[1:]]
        parts += ["## Threads, speculation, both", markdown_table(titles, lines, left=(1, 2, 3, 5))]
    return "\n\n".join(parts) + "\n"


def _with_forked(answers: DataFrame) -> DataFrame:
    """All answers, then the forked ones once more; the column ``answers`` is ``ALL`` or ``FORKED``."""
    return pd.concat([answers.assign(answers=ALL), answers[answers["is_forked"]].assign(answers=FORKED)])


def _geometric_mean(ratios: Series, none: float = np.nan) -> float:
    """The geometric mean of the ratios above 0; ``none`` if there are none."""
    positive = ratios[ratios > 0]
    return float(np.exp(np.log(positive).mean())) if len(positive) else none


def _records(frame: DataFrame) -> list[dict[Any, Any]]:
    """The rows of a frame as plain values, None for NaN."""
    return frame.astype(object).where(frame.notna(), None).to_dict("records")


def _table(found: DataFrame, columns: Sequence[tuple[str, str]], left: Sequence[int], more: Sequence[list[str]] = ()) -> str:
    """A line for each row, – where a number is missing, and ``more`` lines after them."""

    def cell(template: str, values: Row) -> str:
        try:
            return template.format_map(values)
        except TypeError:  # None has no digits
            return "–"

    lines = [[cell(template, one) for _, template in columns] for one in _records(found)]
    return markdown_table([title for title, _ in columns], [*lines, *more], left)
