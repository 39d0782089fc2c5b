"""The experiments of the BiTA paper (Lin et al. 2024); its own figures are in ``bita.json``."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any, NamedTuple

import pandas as pd

from benchmarks.alternatives import LAYERS_SKIPPED
from benchmarks.papers.experiment import Absent, Experiment, Place, Table, Words
from benchmarks.papers.prompts import SUBTASKS, training_prompts
from benchmarks.reports.compared import Ablation, at, by_masks, by_prompt_tokens, by_prompting, by_tree, tree_name
from pipedec.bench.record import ROWS_FILE, Row
from pipedec.bench.report.frames import Variant, by_prompt_set, means, read_answers, variants
from pipedec.bench.sweep.rows import BITA, Tree
from pipedec.data import PromptSource, read_rows
from recipes.reference_models.corpus import ASSISTANT, BEGIN, END, USER

TITLE = "BiTA, table by table"
ABOUT = (
    "[BiTA: Bi-Directional Tuning for Lossless Acceleration in Large Language Models](https://arxiv.org/abs/2401.12522) on the "
    "shipped target of 10 million parameters; SmolLM2 ships without a BiTA. Speed-ups are of the time per token over plain "
    "decoding. Except in Figures 1 and 7 and Table 2, tokens pass in computed time through one device, as fast with 64 rows "
    "as with one ([what is emulated](../benchmarks.md#what-emulated-means)), as the paper's A800 nearly does. Means are "
    "geometric. Data sets that are not [at hand](data.md) are replaced: XSum by Spec-Bench's summaries, CIP by Vicuna-Bench, "
    "HumanEval-X by HumanEval. [Earlier measurements](../results/bita.md) have more prompts."
)
PAPER: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
SETS: tuple[str, ...] = tuple(PAPER["sets"])
EFFICIENT = "bita:shape=efficient,depth=3,children=5"  # the paper's
STEPS, BATCH = 150, 4  # of a training at laptop size
TRAINED = {  # what is trained, in words of ``pipedec train bita``
    "none": ("--prompting", "none"),
    "shallow-16": ("--prompting", "shallow"),
    **{f"deep-{tokens}": ("--prompt-tokens", str(tokens)) for tokens in (1, 2, 4, 8, 16, 32, 64)},
    "6-masks": ("--masks", "6"),
    "raw": ("--raw-prompt",),
    "paper-rates": ("--recipe", "paper", "--batch", str(BATCH), "--groups", "16"),
    "paper": ("--recipe", "paper"),
}
RECIPES = {
    "deep-16": "ours: batch 4, 16 groups, rate 0.3, deviation 0.5",
    "paper-rates": "batch 4, 16 groups, rate 0.03, deviation 0.02",
    "paper": "the paper's: batch 128, 1 group, rate 0.03, deviation 0.02",
}
TEMPLATES = {"chat": f"{BEGIN}{USER}{{Question}}{END}{ASSISTANT}", "raw": f"{BEGIN}{{Question}}"}
CONTENDERS = {  # of ``benchmarks.alternatives``, by the paper's name
    "HF AssistGen": "transformers assisted",
    "SpecDec": "pipedec stpp, 1 stage",
    "Self-SpecDec": LAYERS_SKIPPED,
    "BiTA": "pipedec bita, 1 stage",
}
OURS = ("over transformers", "over the same runtime", "tokens per pass")


class Line(NamedTuple):
    """A line of a table of speed-ups, by prompt set; ``tokens_per_pass`` of our own alone."""

    label: str
    speedups: Mapping[str, float]
    tokens_per_pass: float | None = None
    mean: float | None = None  # where it is not that of the sets


def paper_lines(part: str, sets: Sequence[str] = SETS) -> dict[str, Line]:
    """The paper's lines by label. A value beyond one for each of its sets is their mean."""
    lines = {}
    for label, values in PAPER[part].items():
        names = SUBTASKS if part == "subtasks" else SETS
        found = {name: x for name, x in zip(names, values, strict=False) if name in sets}
        lines[label] = Line(label, found, None, *values[len(names) :])
    return lines


def speedup_table(first: str, lines: Iterable[Line]) -> Table:
    """Our lines and the paper's."""
    found = list(lines)
    sets = list(dict.fromkeys(name for line in found for name in line.speedups))
    rows = [
        [
            line.label, "paper" if line.tokens_per_pass is None else "ours",
            *(f"{line.speedups[name]:.2f}×" if name in line.speedups else "–" for name in sets),
            f"{line.mean or geometric_mean(line.speedups.values()):.2f}×",
            f"{line.tokens_per_pass:.2f}" if line.tokens_per_pass else "–",
        ]
        for line in found
    ]  # fmt: skip
    return Table((first, "whose", *sets, "mean", "tokens per pass"), rows)


def our_lines(answers: pd.DataFrame, labels: Mapping[Variant, str], sets: Sequence[str] = SETS) -> list[Line]:
    """The lines of these ways to decode, over plain pipeline parallelism: of these sets, if there are any of them."""
    answers = answers[answers["prompt_set"].isin(sets)] if answers["prompt_set"].isin(sets).any() else answers
    table = by_prompt_set(answers, ["pp"])
    overall = means(table)
    return [
        Line(label, {str(name): float(x) for name, x in at(table["over pp"], one).items()}, at(overall, one)["tokens_per_pass"])
        for one, label in labels.items()
    ]


def bita_lines(place: Place, directory: str, label: Callable[[Variant], str], sets: Sequence[str] = SETS) -> list[Line]:
    """The lines of every BiTA and tree whose answers are there."""
    answers = read_answers([place.directory(directory)])
    return our_lines(answers, {one: label(one) for one in variants(answers) if one.method == BITA}, sets)


def tree_label(tree: Tree | None) -> str:
    """The tree's shape, and the candidates of each mask."""
    assert tree is not None
    return str(tree.shape) if tree.shape == "straightforward" else f"{tree_name(tree)}, k = {tree.children}"


def trained_name(one: Variant) -> str:
    """The key in ``TRAINED``, or the source of prompts."""
    assert one.bita is not None
    return one.bita.name


def methods(*names: str) -> Words:
    return [word for name in names for word in ("--methods", name)]


def sweep(place: Place, name: str, *flags: str, sets: Sequence[str] = SETS, prompts: int = 2) -> Words:
    """Plain pipeline parallelism and more, on one emulated device or on a real cluster."""
    stages = () if place.cluster else ("--stages", "1")
    return place.sweep(name, *stages, *place.size_flags(prompts), *place.prompts(*sets), *methods("pp"), *flags)


def train(place: Place, name: str, sources: Sequence[str] = ()) -> Words:
    """Train what ``TRAINED`` calls so, on all sources of prompts unless on some of them: as many steps and samples as others."""
    found, flags = training_prompts(place.data, place.out), TRAINED.get(name, ())
    chosen, samples = sources or list(found), 8000 if place.full else STEPS * BATCH
    size = ["--steps", str(samples // (128 if name == "paper" else BATCH)), "--new-tokens", "96" if place.full else "64"]
    size += ["--max-prompts", str((500 if place.full else 64) * len(found) // len(chosen))]
    ours = () if "--recipe" in flags else ("--masks", "3", "--markov-rank", "0", "--learning-rate", "0.3", "--groups", "16")
    prompts = [word for one in chosen for word in ("--prompts", f"{one}={found[one]}")]
    out, work = (str(place.directory("bita-trained") / kind / name) for kind in ("out", "work"))
    return ["pipedec", "train", "bita", *size, *ours, *flags, *prompts, "--out", out, "--work", work]


def swept(
    place: Place, directory: str, names: Iterable[str], *flags: str, trees: Sequence[str] = ("bita:shape=efficient",)
) -> list[Words]:
    """Decode with each of these trained ones, by the paper's tree unless by others."""
    bita = ((*flags, "--bita", str(place.directory("bita-trained") / "out" / name)) for name in names)
    return [sweep(place, directory, *words, *methods(*trees)) for words in bita]


def trained_commands(place: Place, names: Sequence[str], directory: str) -> list[Words]:
    return [train(place, name) for name in names] + swept(place, directory, names)


def prompting_commands(place: Place) -> list[Words]:
    return trained_commands(place, ("none", "shallow-16", "deep-16"), "bita-prompts")


def prompt_token_commands(place: Place) -> list[Words]:
    lengths = (1, 2, 4, 8, 16, 32, 64) if place.full else (1, 4, 16, 64)
    return trained_commands(place, [f"deep-{tokens}" for tokens in lengths], "bita-prompts")


def mask_commands(place: Place) -> list[Words]:
    trees = [f"bita:shape=efficient,depth={masks}" for masks in range(1, 7)]
    return [train(place, "6-masks"), *swept(place, "bita-masks", ["6-masks"], trees=trees)]


def tree_commands(place: Place) -> list[Words]:
    full = (f"bita:depth=3,shape=full,children={k}" for k in (1, 2, 3, 4))
    return [sweep(place, "bita-trees", *methods("bita:depth=3,shape=straightforward", *full, EFFICIENT, "bita:depth=3"))]


def source_commands(place: Place) -> list[Words]:
    found = list(training_prompts(place.data, place.out))
    sources = found if place.full else (found[0], found[-1])
    training = [train(place, "deep-16"), *(train(place, one, [one]) for one in sources)]
    return training + swept(place, "bita-sources", ("deep-16", *sources))


def source_tables(place: Place) -> list[Table]:
    counts = {name: len(read_rows(path)) for name, path in training_prompts(place.data, place.out).items()}
    both = (("ours", counts), ("paper", PAPER["data"]))
    rows = [[name, whose, f"{count:,}"] for whose, found in both for name, count in found.items()]
    lines = bita_lines(place, "bita-sources", lambda one: trained_name(one).replace("deep-16", "all of them"))
    return [Table(("prompts", "whose", "number"), rows), speedup_table("trained on", lines)]


def template_commands(place: Place) -> list[Words]:
    names = ("deep-16", "raw")
    asked_raw = swept(place, "bita-raw", names, "--raw-prompt")
    return [*(train(place, name) for name in names), *swept(place, "bita-chat", names), *asked_raw]


def template_tables(place: Place) -> list[Table]:
    both = (("ours", TEMPLATES), ("paper", PAPER["templates"]))
    rows = [[name, whose, f"`{text}`".replace("|", "\\|")] for whose, found in both for name, text in found.items()]
    lines = [
        line._replace(label=f"trained {line.label}, asked {asked}")
        for asked in TEMPLATES
        for line in bita_lines(place, f"bita-{asked}", lambda one: trained_name(one).replace("deep-16", "chat"))
    ]
    return [Table(("template", "whose", "text"), rows), speedup_table("template", lines)]


def recipe_tables(place: Place) -> list[Table]:
    return [speedup_table("recipe", bita_lines(place, "bita-recipes", lambda one: RECIPES[trained_name(one)]))]


def rival_commands(place: Place) -> list[Words]:
    where = place.directory("bita-rivals")
    where.mkdir(parents=True, exist_ok=True)
    files = [str(PromptSource.parse(source).path) for source in place.prompts("mt-bench")[1::2]]
    prompts = [word for file in files for word in ("--prompts", file)]
    size = [*place.size_flags(4), "--repeats", "3" if place.full else "2"]
    return [["benchmarks.alternatives", *size, *prompts, "--self-speculation", "--out", str(where / ROWS_FILE)]]


def rivals(place: Place) -> dict[str, Row]:
    """The last row of each contender."""
    lines = (place.directory("bita-rivals") / ROWS_FILE).read_text(encoding="utf-8").splitlines()
    return {row["contender"]: row for row in map(json.loads, lines)}


def rival_cells(found: Mapping[str, Row], name: str | None) -> list[str]:
    """Speed-up over transformers' greedy decoding, over plain decoding by the same runtime, and tokens per pass."""
    if name is None:
        return ["–"] * len(OURS)
    row = next(row for contender, row in found.items() if contender.endswith(name))
    bases = ("transformers greedy", "pipedec pp, 1 stage" if name.startswith("pipedec") else "transformers greedy")
    ratios = [f"{row['tokens_per_second'] / found[base]['tokens_per_second']:.2f}×" for base in bases]
    return [*ratios, f"{1 / row['passes_per_token']:.2f}"]


def overview_tables(place: Place) -> list[Table]:
    rows = [[name, *rival_cells(found, name)] for found in [rivals(place)] for name in found]
    return [Table(("contender", *OURS), rows)]


def rival_tables(place: Place) -> list[Table]:
    found = rivals(place)
    rows = [[name, *paper, *rival_cells(found, CONTENDERS.get(name))] for name, paper in PAPER["rivals"].items()]
    return [Table(("method", "paper, LLaMA-2-7B", "paper, LLaMA-2-70B", *OURS), rows)]


def medusa_tables(place: Place) -> list[Table]:
    rows = [["shipped", "ours", *rival_cells(rivals(place), CONTENDERS["BiTA"])[1:]]]
    rows += [[one.label, "paper", f"{one.mean:.2f}×", "–"] for one in paper_lines("subtasks").values() if "Vicuna" in one.label]
    return [Table(("target of BiTA", "whose", "speed-up", "tokens per pass"), rows)]


def _shipped(name: str, title: str, differs: str, part: str, sets: Sequence[str], prompts: int) -> Experiment:
    """The shipped BiTA by our tree and the paper's, beside a part of the paper's figures."""

    def commands(place: Place) -> list[Words]:
        return [sweep(place, name, *methods(BITA, EFFICIENT), sets=sets, prompts=prompts)]

    def tables(place: Place) -> list[Table]:
        ours = bita_lines(place, name, lambda one: f"shipped, {tree_label(one.tree)}", sets)
        return [speedup_table("target", [*ours, *paper_lines(part, sets).values()])]

    return Experiment(name, title, differs, commands, tables, real=True)


def _ablation(
    name: str, title: str, differs: str, commands: Callable[[Place], list[Words]], directory: str,
    choose: Callable[[pd.DataFrame], Ablation[Any]], paper: Mapping[str, Line],
    sets: Sequence[str] = SETS, label: Callable[[Any], str] = str, trains: bool = True,
) -> Experiment:  # fmt: skip
    """A line for each value of what ``choose`` finds to vary, and after it the paper's of the same label."""

    def tables(place: Place) -> list[Table]:
        found = choose(read_answers([place.directory(directory)]))
        ours = our_lines(found.answers, {one: label(value) for value, one in found.points.items()}, sets)
        lines = [line for own in ours for line in (own, paper.get(own.label)) if line is not None]
        return [speedup_table(title.partition(": ")[2].partition(",")[0], lines)]

    return Experiment(name, title, differs, commands, tables, trains=trains, real=not trains)


def _prompting(number: int, sets: Sequence[str]) -> Experiment:
    title, paper = f"Table {number}: prompting, {' and '.join(sets)}", paper_lines("promptings", sets)
    return _ablation(f"bita-table{number}", title, _TRAINED, prompting_commands, "bita-prompts", by_prompting, paper, sets)


def _trees(number: int, sets: Sequence[str]) -> Experiment:
    title, paper = f"Table {number}: decoding method, {' and '.join(sets)}", paper_lines("trees", sets)
    return _ablation(
        f"bita-table{number}", title, _TREES, tree_commands, "bita-trees", by_tree, paper, sets, tree_label, trains=False
    )


_ILLUSTRATION = "An illustration."
_HERE = "this machine"
_MEASURED = (
    "Nothing is emulated: a CPU needs time for every row, so speed-ups are lower than tokens per pass, "
    "which do not depend on the machine."
)
_TRAINED = (
    f"Trained for {STEPS} steps of {BATCH} samples at laptop size (64 prompts of each source, answers of 64 tokens), the shipped "
    "BiTA for 8,000 samples, the paper's for 1.2 million. Without a Markov table and with the paper's tree. 2 % is within noise."
)
_TREES = (
    "The shipped BiTA, of whose 4 masks 3 are used; likeliest is our tree. The full trees have 16, 60, 160 and 340 rows; up to "
    "64 the emulated device computes in the time of one, an A800 more."
)
_PAPERS_DEEP = paper_lines("promptings")["deep"]
ENTRIES: tuple[Experiment | Absent, ...] = (
    Experiment(
        "bita-fig1", "Figure 1: techniques on MT-Bench",
        f"{_MEASURED} Of the paper's bars only those in Table 2 and Figure 7 have numbers.",
        rival_commands, overview_tables, place=_HERE,
    ),
    Absent(
        "bita-fig2", "Figure 2: bi-directional tuning",
        f"{_ILLUSTRATION} [Architecture](../architecture.md) describes mask rows and learned prompt.",
    ),
    Absent("bita-fig3", "Figure 3: attention mask of the tuning", f"{_ILLUSTRATION} `pipedec/train/mask_rows.py` makes it."),
    Absent(
        "bita-fig4", "Figure 4: straightforward decoding",
        f"{_ILLUSTRATION} `bita:shape=straightforward` decodes like this; `pipedec serve` shows rows and verdicts at `/live`.",
    ),
    Absent(
        "bita-fig5", "Figure 5: the efficient tree",
        f"{_ILLUSTRATION} `bita:shape=efficient,children=3` grows this tree; `pipedec serve` shows it at `/live`.",
    ),
    Absent("bita-fig6", "Figure 6: attention mask of the decoding", f"{_ILLUSTRATION} `pipedec/tree/masks.py` makes it."),
    _shipped(
        "bita-table1", "Table 1: targets and data sets",
        "One target, 700 to 7,000 times smaller than the paper's. k: candidates of each mask. Our tree uses the 4 masks and the "
        "Markov table of the shipped BiTA, the paper's tree 3 masks.", "models", SETS, 2,
    ),
    Experiment(
        "bita-table2", "Table 2: BiTA beside other speculative decoding on MT-Bench",
        f"{_MEASURED} HF AssistGen is transformers' assisted generation and SpecDec `stpp` in one stage, both with the shipped "
        "draft. Self-SpecDec skips whole layers, found by a greedy search, where Zhang et al. skip attention and MLP apart, by a "
        "Bayesian one; its drafts count as passes by their share of the layers. It gains more than in the paper because "
        "the shipped target was grown by doubling its layers. Lookahead does not run here: its code replaces parts of an old "
        "transformers and needs CUDA; prompt lookup in Figure 1 is its nearest relative.",
        rival_commands, rival_tables, place=_HERE,
    ),
    Experiment(
        "bita-fig7", "Figure 7: BiTA beside Medusa on MT-Bench",
        f"{_MEASURED} The paper's BiTA is 19–32 % faster than what Medusa's authors report. Medusa does not run here: it needs "
        "heads that were trained for the target.",
        rival_commands, medusa_tables, place=_HERE,
    ),
    _ablation(
        "bita-fig8", "Figure 8: prompt tokens",
        f"{_TRAINED} The paper's figure has numbers of 16 tokens alone; it rises up to them, and from 8 to 64 it hardly differs.",
        prompt_token_commands, "bita-prompts", by_prompt_tokens, {"16": _PAPERS_DEEP},
    ),
    _ablation(
        "bita-fig9", "Figure 9: masks",
        f"{_TRAINED} One BiTA with 6 masks decodes with the first ones; the paper trains one for each number. Its figure has "
        "numbers of 3 masks alone. There 3 or 4 are best, since rows cost time on an A800.",
        mask_commands, "bita-masks", by_masks, {"3": _PAPERS_DEEP},
    ),
    _prompting(3, SETS[2:]),
    _trees(4, SETS[:2]),
    Experiment(
        "bita-table5", "Table 5: training data",
        f"{_TRAINED} The paper counts its data sets. Here a BiTA is also trained on sources alone (two on a laptop), with as "
        "many steps and samples. Code, docstrings and lists are questions about Python's library, problems are of GSM8K.",
        source_commands, source_tables, trains=True,
    ),
    Experiment(
        "bita-table6", "Table 6: prompt templates",
        f"{_TRAINED} The paper shows its templates, and trains on all of a model's. Here a BiTA is trained on prompts in the "
        "chat template and one on bare prompts, and each is asked in both ways. The shipped target knows no system prompt.",
        template_commands, template_tables, trains=True,
    ),
    Absent("bita-fig10", "Figure 10: rows of two passes", f"{_ILLUSTRATION} `pipedec serve` shows each pass at `/live`."),
    _shipped(
        "bita-table7", "Table 7: subtasks of MT-Bench",
        "One small target, and one prompt of each subtask at laptop size. The paper's means are over all answers.",
        "subtasks", SUBTASKS, 1,
    ),
    _prompting(8, SETS[:2]),
    _trees(9, SETS[2:]),
    Experiment(
        "bita-recipes", "Section 4.1: the paper's hyper-parameters beside ours",
        f"{_TRAINED} All three see {STEPS * BATCH} samples at laptop size, which is {STEPS * BATCH // 128} steps with the "
        "paper's batch; the paper has 9,400 steps. `pipedec train bita --recipe paper` has its values.",
        lambda place: trained_commands(place, tuple(RECIPES), "bita-recipes"), recipe_tables, trains=True,
    ),
)  # fmt: skip
