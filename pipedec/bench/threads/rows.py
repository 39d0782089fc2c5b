"""The rows of ``pipedec bench threads`` as one data frame, an answer per row. Knows no statistics and no pictures."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pandas as pd
from pandas import DataFrame, Series

from pipedec.bench.record import Row

SCHEMA = "pipedec.threads/2"
SEQUENTIAL = "none"  # instead of a dialect, of answers in one thread
BASELINE = "pp"
QUESTION = ["prompt_set", "prompt_index"]
# With threads and without, with speculation and without.
COMBINATIONS = ("neither", "threads", "speculation", "both")


def read_frame(records: Iterable[Row]) -> DataFrame:
    """Lines of the file as a frame; of several rows for one answer the last.

    Columns: preset, model, stages; dialect and method, ordered categories (``SEQUENTIAL`` first, then as they appear); the
    question, prompt_set and prompt_index; the fields of ``ThreadMetrics``; is_forked, two threads or more; anomalies, a count by
    name; is_cut, ended at ``max_tokens``; prefill_ms, emulated, until the first token; decode_ms, from then on; prompts_ms, the
    part of it that passed until further requests for the answer had begun; tokens_ms, the rest of it; answer_ms, with
    prefill; decoded_text, text tokens except the first token of the answer; ms_per_token, NaN without such tokens; timesteps,
    hits, misses; fill, the rows of each group in each timestep; rows, their sum; busy, the group-timesteps with rows;
    group_timesteps, all of them.
    """
    frame = DataFrame(map(_columns, records)).drop_duplicates(["stages", "dialect", "method", *QUESTION], keep="last")
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


def _columns(record: Row) -> dict[str, Any]:
    fill = record["fill"]
    copied = (
        "preset", "dialect", "method", *QUESTION, "anomalies", "prefill_ms", "decode_ms", "prompts_ms", "decoded_text",
        "timesteps", "hits", "misses", "fill",
    )  # fmt: skip
    return {
        **{name: record[name] for name in copied},
        **record["metrics"],
        "stages": record["cluster"]["stages"],
        "model": record["cluster"]["model"],
        "is_forked": record["metrics"]["threads"] >= 2,
        "is_cut": record["finish_reason"] == "length",
        "rows": sum(map(sum, fill)),
        "busy": sum(rows > 0 for timestep in fill for rows in timestep),
        "group_timesteps": sum(map(len, fill)),
    }
