"""The experiments of the PipeDec paper (Yin et al. 2025)."""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan
from pathlib import Path

import pandas as pd

from benchmarks.agreement import SCHEMA as AGREEMENT
from benchmarks.agreement import ranks_by_set, shares
from benchmarks.load.benchmark import SCHEMA as LOAD
from benchmarks.papers.experiment import Absent, Experiment, Place, Table, Words
from benchmarks.reports.compared import at
from pipedec.bench.record import ROWS_FILE, read_records
from pipedec.bench.report.frames import by_prompt_set, means, prompt_sets, read_answers, variants
from pipedec.train.measuring import TOP_K

TITLE = "PipeDec, figure by figure"
ABOUT = (
    "[PipeDec: Low-Latency Pipeline-based Inference with Dynamic Speculative Decoding towards Large-scale Models]"
    "(https://arxiv.org/abs/2504.04104). The shipped pair's tokens pass through the paper's clusters in computed time "
    "([what is emulated](../benchmarks.md#what-emulated-means)), without rank 0's own work, which adds 2 to 5 ms to a timestep. "
    "`--launch cluster.yaml --partitions …` or `--running` measures a real cluster instead. The paper's text gives few "
    "numbers of its figures; they are beside ours. [Data sets](data.md) that are not at hand are replaced by parts of Spec-Bench."
)
SETS = ("humaneval", "drop", "mmlu", "wmt14", "triviaqa", "gsm8k")
PRESETS = ("paper-7", "paper-14", "paper-21")
METHODS = ("pp", "stpp", "pipedec", "pipedec-bestfirst")
DISPATCHES = {"windows": "", "tasks": ", single tasks"}
SLM = Path(__file__).parent / "slm.yaml"
SAMPLED = ("--temperature", "0.6", "--top-p", "0.9", "--top-k", "80")  # §4.3.3
LOADS = (1, 2, 4, 8, 16, 32, 64)


def _swept(place: Place, name: str, *flags: str, presets: Sequence[str] = ("paper-14",)) -> list[Words]:
    """The commands of a sweep by both dispatchers; a real cluster has one of its own."""
    if place.cluster:
        return [place.sweep(name, *flags)]
    return [place.sweep(name, *flags, "--dispatch", one, presets=presets) for one in DISPATCHES]


def agreement_commands(place: Place) -> list[Words]:
    running = place.cluster if "--running" in place.cluster else ()
    lengths = {"short": "80", "long": "2048" if place.full else "512"}
    return [
        ["benchmarks.agreement", *running, "--samples", "10" if place.full else "2", "--max-tokens", tokens,
         *place.prompts(*SETS), "--out", str(place.directory(f"pipedec-agreement-{name}"))]
        for name, tokens in lengths.items()
    ]  # fmt: skip


def agreement_tables(place: Place) -> list[Table]:
    rows = []
    for name in ("short", "long"):
        path = place.directory(f"pipedec-agreement-{name}") / ROWS_FILE
        ranks = ranks_by_set([row for _, row in read_records(path, AGREEMENT)])
        rows += [[name, one, *(f"{share:.1%}" for share in shares(found)), str(len(found))] for one, found in ranks.items()]
    columns = ("answers", "prompts", *(f"k = {k}" for k in TOP_K), "tokens")
    return [Table(columns, rows, "the target's next token is among the draft's top k")]


def tree_commands(place: Place) -> list[Words]:
    widths, children = ((8, 16, 32, 64, 128), (2, 4, 8, 16)) if place.full else ((8, 32, 128), (2, 4, 16))
    trees = [word for w in widths for c in children for word in ("--methods", f"pipedec:width={w},children={c}")]
    sets = SETS if place.full else ("humaneval", "triviaqa", "wmt14")
    return [place.sweep("pipedec-tree", *place.size_flags(), *place.prompts(*sets), *trees)]


def tree_tables(place: Place) -> list[Table]:
    answers = read_answers([place.directory("pipedec-tree")])
    overall = means(by_prompt_set(answers))
    cells: dict[int, dict[int, str]] = {}
    for one in variants(answers):
        assert one.tree is not None and one.tree.width is not None and one.tree.children is not None
        row = at(overall, one)
        cells.setdefault(one.tree.width, {})[one.tree.children] = f"{row['tpot_ms']:.1f} ms, {row['hit_rate']:.1%}"
    children = sorted(next(iter(cells.values())))
    rows = [[str(width), *(found[count] for count in children)] for width, found in sorted(cells.items())]
    return [Table(("width", *(f"{count} children" for count in children)), rows, "ms per token, hit rate")]


def latency_commands(place: Place) -> list[Words]:
    asked = [*place.size_flags(), *place.prompts(*SETS)]
    swept = _swept(place, "pipedec-latency", *asked, "--methods", ",".join(METHODS), presets=PRESETS)
    slm = ["--cluster", str(SLM), "--preset", "slm", "--clock", "computed", "--no-own-work", "--methods", "pp"]
    small = ["pipedec", "bench", "sweep", *slm, *asked, "--out", str(place.directory("pipedec-slm"))]
    return [*swept, small]


def latency_tables(place: Place) -> list[Table]:
    answers = read_answers([place.directory("pipedec-latency")])
    table = by_prompt_set(answers, ("pp", "stpp"))
    overall, names = means(table), prompt_sets(answers)
    small = by_prompt_set(read_answers([place.directory("pipedec-slm")]))
    slm_ms = means(small)["tpot_ms"].iloc[0]
    slm = ["1 L40", "8B alone (SLM)", *(f"{ms:.1f}" for ms in small["tpot_ms"]), f"{slm_ms:.1f}", "–", "–"]
    rows = [
        [
            one.pipeline.name, one.method, *(f"{ms:.1f}" for ms in at(table, one)["tpot_ms"][names]),
            f"{at(overall, one)['tpot_ms']:.1f}", *(_times(at(overall, one)[f"over {base}"]) for base in ("pp", "stpp")),
        ]
        for one in variants(answers)
    ]  # fmt: skip
    columns = ("cluster", "method", *names, "mean", "over pp", "over stpp")
    latencies = Table(columns, [*_once(rows), slm], "ms per token")
    return [latencies, *_claims(table, overall, slm_ms)]


def _claims(table: pd.DataFrame, overall: pd.DataFrame, slm_ms: float) -> list[Table]:
    """Claims of the text on PipeDec-14 and PipeDec-7, beside the paper's policy and the default one here."""
    found = {(one.method, one.pipeline.name): one for one in overall.index.to_list()}
    if ("pipedec", "paper-14") not in found:
        return []  # a cluster with other partitions

    def ranges(method: str, base: str) -> str:
        one = found[method, "paper-14"]
        by_set = table.loc[one, f"over {base}"]
        return f"{by_set.min():.2f}–{by_set.max():.2f}×, mean {overall.loc[one, f'over {base}']:.2f}×"

    def ms(method: str, cluster: str) -> float:
        return float(overall.loc[found[method, cluster], "tpot_ms"])

    rows = [
        ["14 stages over PP", "4.46–7.79×, mean 6.17×", *(ranges(method, "pp") for method in METHODS[2:])],
        ["14 stages over STPP", "2.2–2.69×, mean 2.53×", *(ranges(method, "stpp") for method in METHODS[2:])],
        ["14 stages over 7", "1.64×", *(f"{ms(one, 'paper-7') / ms(one, 'paper-14'):.2f}×" for one in METHODS[2:])],
        ["14 stages beside the SLM", "about equal", *(f"{slm_ms / ms(one, 'paper-14'):.2f}×" for one in METHODS[2:])],
    ]
    return [Table(("speed-up", "the paper", *METHODS[2:]), rows, "claims of the text")]


def accuracy_tables(place: Place) -> list[Table]:
    answers = read_answers([place.directory("pipedec-latency")])
    table, names = by_prompt_set(answers), prompt_sets(answers)
    rows = [
        [one.pipeline.name, one.method, *(f"{rate:.1%}" for rate in at(table, one)["hit_rate"][names])]
        for one in variants(answers)
        if one.method in METHODS[1:]
    ]
    return [Table(("cluster", "method", *names), _once(rows), "hit rate")]


def stochastic_commands(place: Place) -> list[Words]:
    sets = SETS if place.full else ("humaneval", "wmt14", "triviaqa", "gsm8k")
    asked = [*place.size_flags(), *place.prompts(*sets), "--methods", ",".join(METHODS[1:])]
    repeats = ("--repeats", "5" if place.full else "2")
    return [*_swept(place, "pipedec-greedy", *asked), *_swept(place, "pipedec-stochastic", *asked, *SAMPLED, *repeats)]


def stochastic_tables(place: Place) -> list[Table]:
    ways = {way: read_answers([place.directory(f"pipedec-{way}")]) for way in ("greedy", "stochastic")}
    tables = {way: means(by_prompt_set(answers, ("stpp",))) for way, answers in ways.items()}
    rows = []
    for one in variants(ways["greedy"]):
        for way, table in tables.items():
            row = at(table, one)
            figures = f"{row['tpot_ms']:.1f}", f"{row['hit_rate']:.1%}", _times(row["over stpp"])
            rows.append([one.pipeline.name, one.method, way, *figures])
    return [Table(("cluster", "method", "decoding", "ms per token", "hit rate", "over stpp"), _once(rows))]


def throughput_commands(place: Place) -> list[Words]:
    loads = LOADS if place.full else (1, 4, 16)
    tokens = place.size_flags(tokens=24)[2:]
    return [
        ["benchmarks.load", "--preset", "paper-14", "--no-own-work", "--dispatch", one, *tokens, *place.prompts(*SETS),
         "--method", ",".join(METHODS), "--concurrency", ",".join(map(str, loads)), "--requests", "64" if place.full else "16",
         "--recording", str(place.directory("pipedec-recording")), "--out", str(place.directory(f"pipedec-load-{one}"))]
        for one in DISPATCHES
    ]  # fmt: skip


def throughput_tables(place: Place) -> list[Table]:
    lines: dict[tuple[str, str], dict[int, str]] = {}
    for one, name in DISPATCHES.items():
        for _, row in read_records(place.directory(f"pipedec-load-{one}") / ROWS_FILE, LOAD):
            cells = lines.setdefault((f"paper-14{name}", row["policy"]), {})
            cells[row["pattern"]["concurrency"]] = f"{row['tokens_per_s']:.1f}, {row['tpot_ms']['mean']:.0f} ms"
    loads = sorted(next(iter(lines.values())))
    rows = [[*key, *(cells[load] for load in loads)] for key, cells in lines.items()]
    columns = ("cluster", "method", *(f"{load} at once" for load in loads))
    return [Table(columns, _once(rows), "tokens per second, ms per token")]


def _once(rows: list[list[str]]) -> list[list[str]]:
    """Without the rows of single tasks that equal those of windows, as all do of methods that prune nothing."""
    windows = [row for row in rows if DISPATCHES["tasks"] not in row[0]]
    return [row for row in rows if row in windows or [row[0].removesuffix(DISPATCHES["tasks"]), *row[1:]] not in windows]


def _times(ratio: float) -> str:
    return "–" if isnan(ratio) else f"{ratio:.2f}×"


ENTRIES: tuple[Experiment | Absent, ...] = (
    Absent(
        "pipedec-fig1", "Figure 1: two pipelines side by side",
        "An illustration. `pipedec bench timeline` draws a run in the same way ([picture](../timeline.png)).",
    ),
    Absent(
        "pipedec-fig2", "Figure 2: the system at work",
        "An illustration. The [live page](../live.md) of a running cluster shows tree, stages and rows in the same way.",
    ),
    Experiment(
        "pipedec-fig3", "Figure 3: top-k accuracy of a small model for the target",
        "The paper asks Llama 3.1 8B for the 70B's tokens, on a text of 30,000 tokens and one of 80: "
        "top 8 is nearly always right. Ours is the shipped pair. "
        "Any other pair: `python -m benchmarks.agreement --target DIR --draft DIR "
        "--prompts FILE`; with `--redis` and `--run` the answers come from a running cluster.",
        agreement_commands, agreement_tables, real=True,
    ),
    Experiment(
        "pipedec-fig4", "Figure 4: width and children of the tree",
        "The paper shows means over its six data sets: latency falls, then rises with the width; the hit rate rises throughout; "
        "32 and 16 are chosen. The laptop's size has half of the grid and three sets.",
        tree_commands, tree_tables, real=True,
    ),
    Experiment(
        "pipedec-fig5", "Figure 5: latency by data set, 7, 14 and 21 stages",
        "`stpp` is a tree of width 32 and 16 children, of the best depth: the paper leaves its shape open. On the small pair "
        "the draft is right less often on DROP's and WMT14's stand-ins. *Single tasks* is the paper's dispatcher, whose stages "
        "prune at once; where nothing is pruned, its rows are the same and left out. "
        "What Redis takes is not in computed time ([measured](../results/overhead.md)).",
        latency_commands, latency_tables, real=True,
    ),
    Experiment(
        "pipedec-fig6", "Figure 6: hit rates by data set",
        "From the answers of Figure 5; the dispatcher does not change them. The paper's radar chart has no numbers; "
        "`python -m benchmarks.reports` draws ours "
        "([picture](../benchmarks/accuracy.png)).",
        latency_commands, accuracy_tables, real=True,
    ),
    Experiment(
        "pipedec-fig7", "Figure 7: greedy and stochastic decoding",
        "Temperature 0.6, top-p 0.9, top-k 80, as in the paper, which repeats each prompt five times and finds small losses. "
        "Here drafts know the noise with which the target chooses, so sampled tokens are predicted, too.",
        stochastic_commands, stochastic_tables, real=True,
    ),
    Experiment(
        "pipedec-fig8", "Figure 8: throughput of concurrent requests, 4 GB left for keys and values",
        "The paper: with at most 8 requests in memory PipeDec reaches about the throughput of STPP. Recorded answers pass "
        "through the emulated cluster; its memory for keys and values is "
        "what a card of 24 GB has left. A real cluster is measured over "
        "HTTP ([how](../benchmarks.md#measuring-a-real-cluster)).",
        throughput_commands, throughput_tables,
    ),
)  # fmt: skip
