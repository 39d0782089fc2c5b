"""The experiments of the PipeDec paper (Yin et al. 2025)."""

from __future__ import annotations

from functools import partial

import pandas as pd

from benchmarks.papers.experiment import Absent, Experiment, Place, Table, Words
from pipedec.bench.report.frames import by_prompt_set, means, read_answers

TITLE = "PipeDec, figure by figure"
ABOUT = (
    "[PipeDec: Low-Latency Pipeline-based Inference with Dynamic Speculative Decoding towards Large-scale Models]"
    "(https://arxiv.org/abs/2504.04104) on the shipped pair of models, whose tokens pass through the paper's clusters in computed "
    "time; [what is emulated](../benchmarks.md#what-emulated-means)."
)
SETS = ("humaneval", "drop", "mmlu", "wmt14", "triviaqa", "gsm8k")
PRESETS = ("paper-7", "paper-14", "paper-21")
METHODS = ("pp", "stpp", "pipedec", "pipedec-bestfirst")
DISPATCHES = ("windows", "tasks")


def latency_commands(place: Place) -> list[Words]:
    """All methods on the three clusters, by both dispatchers."""
    asked = [*place.size_flags(), *place.prompts(*SETS), "--methods", ",".join(METHODS)]
    if place.cluster:
        return [place.sweep("pipedec-latency", *asked)]
    return [place.sweep("pipedec-latency", *asked, "--dispatch", one, presets=PRESETS) for one in DISPATCHES]


def latency_tables(place: Place) -> list[Table]:
    """Figure 5: ms per token by prompt set, one line for each cluster, method and dispatcher."""
    answers = read_answers([place.directory("pipedec-latency")])
    table = by_prompt_set(answers, ("pp", "stpp"))
    overall = means(table)
    names = list(dict.fromkeys(table.index.get_level_values("prompt_set")))
    rows = [
        [
            one.pipeline.name, one.method, *(f"{table.loc[(one, name), 'tpot_ms']:.1f}" for name in names),
            f"{overall.loc[one, 'tpot_ms']:.1f}", *(f"{overall.loc[one, f'over {base}']:.2f}×" for base in ("pp", "stpp")),
        ]
        for one in overall.index
    ]  # fmt: skip
    return [Table(("cluster", "method", *names, "mean", "over pp", "over stpp"), rows, "ms per token")]


ENTRIES: tuple[Experiment | Absent, ...] = (
    Absent("pipedec-fig1", "Figure 1: two pipelines side by side", "An illustration; `pipedec bench timeline` draws the same of a run ([picture](../timeline.png))."),
    Absent("pipedec-fig2", "Figure 2: an example of the system's operation", "An illustration; `pipedec serve` shows the same of a running cluster at `/live` ([live.md](../live.md))."),
    Experiment(
        "pipedec-fig5", "Figure 5: latency by prompt set, clusters of 7, 14 and 21 stages",
        "The paper: 4.46–7.79× over PP (mean 6.17×) and 2.2–2.69× over STPP (mean 2.53×) with 14 stages.",
        latency_commands, latency_tables, real=True,
    ),
)  # fmt: skip
