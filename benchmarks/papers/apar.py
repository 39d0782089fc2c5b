"""The experiments of the APAR paper (Liu et al. 2024); its own figures are in ``apar.json``."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pandas import DataFrame

from benchmarks.papers.experiment import Absent, Experiment, Place, Table, Words
from benchmarks.papers.prompts import SUBTASKS, VICUNA_TASKS
from benchmarks.papers.thread_answers import DRAFTED, LIBRARY, answer_commands, by_prompt, prompt_flags, read_answers, speed
from benchmarks.threads.load import SCHEMA as LOAD
from pipedec.bench.record import ROWS_FILE, Row, read_records

TITLE = "APAR, figure by figure"
ABOUT = (
    "[APAR: LLMs Can Do Auto-Parallel Auto-Regressive Decoding](https://arxiv.org/abs/2401.06761) with the shipped thread models "
    "of 10 million parameters, which learned from questions about Python's library. The paper's prompts they rarely answer in "
    "several threads, so held-out questions about the library, whose answers are lists or texts, are asked, too. One emulated "
    "device computes 64 rows in the time of one ([what is emulated](../benchmarks.md#what-emulated-means)). "
    "[Longer measurements](../results/threads.md) are of 14 stages."
)
PAPER: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
MODELS = ("APAR-7B", "APAR-13B")
BENCHES = {"vicuna": ("Vicuna bench", VICUNA_TASKS), "mt": ("MT-bench", SUBTASKS)}
ALL, _LIBRARY = "all", "library: "
_SHORT = {"vicuna-common-sense": "CS", "vicuna-counterfactual": "CF", "stem": "STEM"}  # of the paper's tables
LOADS, LIMITS = (1, 4, 16), (768, 1536, 3072, 6144)


def commands(*benches: str) -> Callable[[Place], list[Words]]:
    """Answers to the prompts of these benches."""
    return lambda place: answer_commands(place, {f"apar-{name}": BENCHES[name][1] for name in benches}, "none,apar")


def task_of(prompt_set: str) -> str:
    """The paper's name of a prompt set."""
    name = _SHORT.get(prompt_set, prompt_set.removeprefix("vicuna-").capitalize())
    return f"{_LIBRARY}{prompt_set}" if prompt_set in ("lists", "texts") else name


def tasks(frame: DataFrame) -> list[tuple[str, DataFrame]]:
    """The answers of each prompt set by its name, then all of them."""
    by_set = [(task_of(str(name)), part) for name, part in frame.groupby("prompt_set", observed=True)]
    overall = f"{_LIBRARY}{ALL}" if by_set[0][0].startswith(_LIBRARY) else ALL
    return [*by_set, (overall, frame)] if len(by_set) > 1 else by_set


def benches(place: Place, chosen: Sequence[str]) -> list[tuple[str, DataFrame]]:
    """The answers to each of these benches, and to questions about the library, as far as they are there."""
    named = [*((BENCHES[name][0], f"apar-{name}") for name in chosen), ("questions about the library", LIBRARY)]
    found = ((title, directory) for title, directory in named if (place.directory(directory) / ROWS_FILE).is_file())
    return [(title, read_answers(place, directory)) for title, directory in found]


def threaded(frame: DataFrame) -> DataFrame:
    """The answers in APAR's threads: neither method nor device changes their tokens."""
    return by_prompt(frame, "apar", "pp").reset_index()


def speed_tables(place: Place) -> list[Table]:
    ways = {"original": ("none", "pp"), "APAR": ("apar", "pp"), "draft": ("none", DRAFTED), "draft, APAR": ("apar", DRAFTED)}
    found = []
    for title, frame in benches(place, tuple(BENCHES)):
        answered = {way: by_prompt(frame, *asked).reset_index() for way, asked in ways.items()}
        rows = []
        for task, _ in tasks(answered["original"]):
            speeds = [speed(dict(tasks(part))[task]) for part in answered.values()]
            forked = dict(tasks(answered["APAR"]))[task]["is_forked"].mean()
            ratios = [f"{one:.1f} ({one / speeds[0]:.2f}×)" for one in speeds[1:]]
            rows.append([task, f"{speeds[0]:.1f}", *ratios, f"{forked:.0%}"])
        found.append(Table(("task", *ways, "in several threads"), rows, f"{title}: text tokens per second"))
    return found


def load_commands(place: Place) -> list[Words]:
    loads, limits = ((1, 8, 32, 128), tuple(16 * one for one in LIMITS)) if place.full else (LOADS, LIMITS)
    most = max(loads)
    flags = ["--preset", "paper-14", "--stages", "1", "--no-own-work", "--dialects", "none,apar", "--methods", "pp"]
    flags += [*place.size_flags(tokens=160)[2:], *prompt_flags(place, ())[:2]]
    return [
        ["benchmarks.threads.load", *flags, "--concurrency", concurrency, *limit, "--out", str(place.directory(f"apar-{name}"))]
        for name, concurrency, limit in (
            ("memory", str(most), ("--kv-tokens", ",".join(map(str, limits)))), ("concurrency", ",".join(map(str, loads)), ()),
        )
    ]  # fmt: skip


def load_rows(place: Place, name: str, axis: str) -> dict[Any, dict[str, Row]]:
    """The rows of a load by the value of ``axis``, then by dialect."""
    found: dict[Any, dict[str, Row]] = {}
    for _, row in read_records(place.directory(f"apar-{name}") / ROWS_FILE, LOAD):
        found.setdefault(row[axis], {})[row["dialect"]] = row
    return found


def load_tables(place: Place) -> list[Table]:
    columns = ("one thread", "APAR", "APAR over one thread")
    memory, concurrency = [], []
    for limit, row in load_rows(place, "memory", "kv_tokens").items():
        first, second = (row[one]["text_tokens_per_s"] for one in ("none", "apar"))
        memory.append([str(limit), f"{first:.1f}", f"{second:.1f}", f"{second / first - 1:+.0%}"])
    for count, row in load_rows(place, "concurrency", "concurrency").items():
        late = [row[one]["latency_ms"] for one in ("none", "apar")]
        cells = [f"{one['mean']:.0f} ({one['p25']:.0f}–{one['p75']:.0f})" for one in late]
        concurrency.append([str(count), *cells, f"{late[1]['mean'] / late[0]['mean'] - 1:+.0%}"])
    return [
        Table(("KV cache, tokens", *columns), memory, "5a: text tokens per second"),
        Table(("requests at once", *columns), concurrency, "5b: ms per text token, mean (25 %–75 %)"),
    ]


def length_tables(place: Place) -> list[Table]:
    rows = []
    for title, frame in benches(place, tuple(BENCHES)):
        first, second = (by_prompt(frame, dialect, "pp")["text_tokens"] for dialect in ("none", "apar"))
        quartiles = [f"{one.mean():.1f} ({one.quantile(0.25):.0f}–{one.quantile(0.75):.0f})" for one in (first, second)]
        rows.append([title, "ours", *quartiles, f"{second.mean() / first.mean() - 1:+.1%}"])
        for name, (apar, original) in zip(MODELS, PAPER["lengths"].get(_key(title), ()), strict=False):
            rows.append([title, f"paper, {name}", f"{original:.1f}", f"{apar:.1f}", f"{apar / original - 1:+.1%}"])
    return [Table(("prompts", "whose", "one thread", "APAR", "difference"), rows, "text tokens, mean (25 %–75 %)")]


def _key(title: str) -> str:
    return next((name for name, (shown, _) in BENCHES.items() if shown == title), "")


def thread_tables(bench: str) -> Callable[[Place], list[Table]]:
    def tables(place: Place) -> list[Table]:
        columns = ("task", "#T, ours", "%P, ours", *(f"{column}, {model}" for model in MODELS for column in ("#T", "%P")))
        rows = []
        for task, part in (row for _, frame in benches(place, (bench,)) for row in tasks(threaded(frame))):
            paper = PAPER["threads"][bench].get("Mean" if task == ALL else task)
            rows.append([task, f"{part['threads'].mean():.1f}", f"{part['is_forked'].mean():.2f}", *_cells(paper, 4)])
        return [Table(columns, rows)]

    return tables


def _cells(numbers: Sequence[float] | None, count: int) -> list[str]:
    return ["–"] * count if numbers is None else [f"{one:g}" for one in numbers]


def saved_tables(figure: str, bench: str, model: int) -> Callable[[Place], list[Table]]:
    """``figure``: of ``apar.json``; ``model``: of ``MODELS``."""

    def tables(place: Place) -> list[Table]:
        columns = ("task", *(f"{name}, {of}" for of in ("ours", MODELS[model]) for name in ("APAR", "AR", "saved")))
        rows = []
        for task, part in (row for _, frame in benches(place, (bench,)) for row in tasks(threaded(frame))):
            paper = PAPER[figure][bench][model].get("Mean" if task == ALL else task)
            shown = ["–"] * 3 if paper is None else [*map(str, paper[:2]), f"{paper[2]}%"]
            rows.append([task, *_saved(part, figure), *shown])
        return [Table(columns, rows)]

    return tables


def _saved(answers: DataFrame, figure: str) -> list[str]:
    """APAR, the same text in one thread, and what is saved."""
    name = {"cached": "max_cached_tokens", "attended": "attended_tokens"}[figure]
    threads, flat = answers[name].mean(), answers[f"{name}_flat"].mean()
    return [f"{threads:.1f}", f"{flat:.1f}", f"{1 - threads / flat:.1%}"]


def summary_tables(figure: str) -> Callable[[Place], list[Table]]:
    def tables(place: Place) -> list[Table]:
        rows = []
        for title, frame in benches(place, tuple(BENCHES)):
            answers = threaded(frame)
            rows.append([title, "ours", *_saved(answers, figure)])
            if len(forked := answers[answers["is_forked"]]):
                rows.append([title, "ours, in several threads", *_saved(forked, figure)])
            for model, numbers in zip(MODELS, PAPER[figure].get(_key(title), ()), strict=False):
                threads, flat, saved = numbers["Mean(>1%)"]
                rows.append([title, f"paper, {model}", str(threads), str(flat), f"{saved}%"])
        return [Table(("benchmark", "whose", "APAR", "flattened", "saved"), rows)]

    return tables


_ILLUSTRATION = "An illustration."
_JUDGED = (
    "GPT-4 grades the answers of models of 7B and 13B here; the shipped ones have 10 million parameters. "
    "[Their answers](../results/threads.md#shape-of-the-answers) are compared by length."
)
_PARAMETERS = "Hyper-parameters: [beside ours](recipes.md#apar)."
_FLAT = "AR: the same text in one thread. Means are over all answers, the paper's over tasks."
_NAMES = {"cached": "max cached tokens", "attended": "attended tokens"}


def _detailed(number: int, figure: str, bench: str, model: int) -> Experiment:
    title = f"Table {number}: {_NAMES[figure]}, {MODELS[model]} on {BENCHES[bench][0]}"
    return Experiment(f"apar-table{number}", title, _FLAT, commands(bench), saved_tables(figure, bench, model), real=True)


ENTRIES: tuple[Experiment | Absent, ...] = (
    Absent(
        "apar-fig1", "Figure 1: decoding, an overview",
        f"{_ILLUSTRATION} `pipedec generate --threads apar --show-threads` shows the threads of an answer.",
    ),
    Absent("apar-fig2", "Figure 2: training inputs", f"{_ILLUSTRATION} `recipes/thread_models/rows.py` makes rows and masks."),
    Absent("apar-fig3", "Figure 3: decoding step by step", f"{_ILLUSTRATION} `pipedec serve` shows an answer at `/live`."),
    Experiment(
        "apar-fig4", "Figure 4: generation speed in a memory-bound scenario",
        "In brackets: over *original*. Our draft model with `pipedec-bestfirst` stands in the place of Medusa's heads. The "
        "paper's bars have no numbers. Its text: APAR 2× on Vicuna bench and 1.4× on MT-bench, Medusa-APAR 4× and 2.9×.",
        commands(*BENCHES), speed_tables, real=True,
    ),
    Experiment(
        "apar-fig5", "Figure 5: throughput over KV memory, latency over concurrency",
        "Requests begin together and wait, or are paused, while there is no memory; all ask for lists. 5a has "
        f"{LOADS[-1]} requests on a laptop. The paper, on an A100 with 1,000 queries of ShareGPT: throughput 20–70 % higher at "
        "equal memory, latency 20–35 % lower; marked +23 % and +33 % (5a), −28 % and −21 % (5b).",
        load_commands, load_tables,
    ),
    Experiment(
        "apar-fig6", "Figure 6: response lengths",
        "Answers are cut at 320 tokens at laptop size. The paper draws densities and gives these means.",
        commands(*BENCHES), length_tables, real=True,
    ),
    *(
        Experiment(
            f"apar-table{number}", f"Table {number}: average {_NAMES[figure]}",
            "The paper leaves out tasks in which APAR saves less than 1 %: of ours, answers in one thread.",
            commands(*BENCHES), summary_tables(figure), real=True,
        ) for number, figure in ((1, "cached"), (2, "attended"))
    ),
    Absent("apar-table3", "Table 3: generation quality on MT-bench", _JUDGED),
    Absent("apar-table4", "Table 4: generation quality on Vicuna bench", _JUDGED),
    Absent("apar-table5", "Table 5: training of APAR models", _PARAMETERS),
    Absent("apar-table6", "Table 6: training of Medusa heads", f"{_PARAMETERS} Medusa's heads are not implemented."),
    *(
        Experiment(
            f"apar-table{number}", f"Table {number}: parallel generation on {BENCHES[bench][0]}",
            "#T: threads per answer; %P: share of answers in two threads or more. Means are over all answers.",
            commands(bench), thread_tables(bench), real=True,
        ) for number, bench in ((7, "vicuna"), (8, "mt"))
    ),
    *(
        _detailed(first + model, figure, bench, model)
        for first, figure, bench in (
            (9, "cached", "vicuna"), (11, "cached", "mt"), (13, "attended", "vicuna"), (15, "attended", "mt"),
        )
        for model in range(2)
    ),
)  # fmt: skip
