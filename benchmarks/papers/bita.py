"""The experiments of the BiTA paper (Lin et al. 2024), and the paper's figures."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
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
    "shipped target of 10 million parameters: SmolLM2 ships without a BiTA. Speed-ups are of the time per token over plain "
    "decoding. Except in Figures 1 and 7 and Table 2, the target's tokens pass in computed time through one device, whose passes "
    "take as long with 64 rows as with one ([what is emulated](../benchmarks.md#what-emulated-means)): the paper's A800 runs LLMs of "
    "7B to 13B like this. Means are geometric. XSum is replaced by Spec-Bench's summaries, CIP by Vicuna-Bench and HumanEval-X by "
    "HumanEval where they are not [at hand](data.md). Earlier measurements are in [results/bita.md](../results/bita.md)."
)
SETS = ("xsum", "mt-bench", "cip", "humaneval-x")
EFFICIENT = "bita:shape=efficient,depth=3,children=5"
OURS = ("over transformers", "over the same runtime", "tokens per pass")
STEPS, BATCH = 150, 4  # of a training at laptop size
TRAINED = {  # what is trained, in the words of ``pipedec train bita``
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
_ILLUSTRATION = "An illustration. "
_MEASURED = (
    "Measured on this machine, nothing emulated: on a CPU rows cost time, so that speed-ups are lower than tokens per pass. "
    "Tokens per pass do not depend on the machine."
)
_TRAINED = (
    f"A laptop trains for {STEPS} steps of {BATCH} samples (64 prompts of each source, answers of 64 tokens), without a Markov table, as "
    "in the paper, which trains for 9,400 steps of 128: the shipped BiTA learned from 8,000 samples. The tree is the paper's, and 2 % is within noise."
)

Speedups = Mapping[str, float]


def by_sets(sets: Sequence[str], speedups: Mapping[str, Sequence[float]]) -> dict[str, dict[str, float]]:
    """Speed-ups by name and prompt set."""
    return {name: dict(zip(sets, values, strict=True)) for name, values in speedups.items()}


PAPER_MODELS = by_sets(SETS, {
    "LLaMA-2-7B": (2.19, 2.38, 2.29, 2.73), "LLaMA-2-13B": (2.29, 2.41, 2.39, 2.88), "Vicuna-33B": (2.20, 2.47, 2.10, 3.00),
    "Falcon-40B": (2.28, 2.75, 2.32, 3.07), "LLaMA-2-70B": (2.55, 2.72, 2.58, 3.31),
})  # fmt: skip
PAPER_PROMPTINGS = by_sets(SETS, {
    "none": (1.95, 2.00, 1.94, 2.12), "shallow": (2.03, 2.06, 2.01, 2.31), "deep": (2.19, 2.38, 2.29, 2.73),
})  # fmt: skip
PAPER_TREES = by_sets(SETS, {
    "straightforward": (1.63, 1.82, 1.89, 2.06), "full, k = 1": (1.81, 2.04, 2.02, 2.39), "full, k = 2": (2.02, 2.23, 2.14, 2.58),
    "full, k = 3": (1.97, 2.05, 1.93, 2.29), "full, k = 4": (1.69, 1.64, 1.50, 1.79), "efficient, k = 5": (2.19, 2.38, 2.29, 2.73),
})  # fmt: skip
PAPER_SUBTASKS = by_sets(SUBTASKS, {
    "LLaMA-2-7B": (2.68, 2.94, 2.21, 2.69, 2.33, 2.11, 2.37, 2.26), "Vicuna-7B": (2.57, 3.00, 2.28, 2.46, 2.23, 1.90, 2.25, 2.23),
    "LLaMA-2-13B": (2.67, 2.96, 2.35, 2.73, 2.37, 2.13, 2.46, 2.06), "Vicuna-13B": (2.76, 2.88, 2.32, 2.90, 2.58, 2.18, 2.36, 2.48),
    "Vicuna-33B": (3.24, 3.02, 2.23, 3.32, 2.40, 2.17, 2.21, 2.23), "Falcon-40B": (2.93, 2.74, 2.67, 3.43, 2.95, 2.78, 2.31, 2.52),
    "LLaMA-2-70B": (3.15, 3.26, 2.51, 3.27, 2.60, 2.49, 2.70, 2.39),
})  # fmt: skip
PAPER_RIVALS = {  # on MT-Bench: LLaMA-2-7B, LLaMA-2-70B, and the contender here
    "HF AssistGen": ("–", "1.53×", "transformers assisted"),
    "SpecDec": ("–", "1.79×", "pipedec stpp, 1 stage"),
    "Self-SpecDec": ("1.11×", "1.15×", LAYERS_SKIPPED),
    "Lookahead": ("1.70×", "1.22×", ""),
    "BiTA": ("2.38×", "2.72×", "pipedec bita, 1 stage"),
}
PAPER_OVERALL = {
    "LLaMA-2-7B": 2.38, "Vicuna-7B": 2.35, "LLaMA-2-13B": 2.41, "Vicuna-13B": 2.54, "Vicuna-33B": 2.47, "Falcon-40B": 2.75,
    "LLaMA-2-70B": 2.72,
}  # fmt: skip
PAPER_DATA = {"LIMA": 1029, "Alpaca-GPT4": 52002, "CodeAlpaca": 20022, "OpenPlatypus": 24926, "CIP (of 257,999)": 50000}
PAPER_TEMPLATES = {
    "LLaMA-2, full": "<s>[INST] <<SYS>>\\n{System prompt}\\n<</SYS>>\\n\\n{Question} [/INST]",
    "LLaMA-2, short": "<s>[INST] {Question} [/INST]",
    "Vicuna, full": "<s>{System prompt} USER: {Question} ASSISTANT:",
    "Vicuna, short": "<s>USER: {Question} ASSISTANT:",
    "Falcon": "User: {Question}\\nAssistant:",
}
TEMPLATE_NAMES = {"deep-16": "chat", "raw": "raw"}  # of what is trained
OUR_TEMPLATES = {"chat": f"{BEGIN}{USER}{{Question}}{END}{ASSISTANT}", "raw": f"{BEGIN}{{Question}}"}


class Line(NamedTuple):
    """A line of a table of speed-ups; ``tokens_per_pass`` of our own alone. ``mean``: where it is another than that of the sets."""

    label: str
    speedups: Speedups
    tokens_per_pass: float | None = None
    mean: float | None = None


def speedup_table(first: str, lines: Iterable[Line], title: str = "") -> Table:
    """Our lines and the paper's, by prompt set."""
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
    return Table((first, "whose", *sets, "mean", "tokens per pass"), rows, title)


def our_lines(answers: pd.DataFrame, labels: Mapping[Variant, str]) -> list[Line]:
    """The lines of these ways to decode, over plain pipeline parallelism."""
    table = by_prompt_set(answers, ["pp"])
    overall = means(table)
    return [
        Line(label, {str(name): float(x) for name, x in at(table["over pp"], one).items()}, at(overall, one)["tokens_per_pass"])
        for one, label in labels.items()
    ]


def bita_lines(place: Place, directory: str, label: Callable[[Variant], str]) -> list[Line]:
    """The lines of every BiTA and tree whose answers are there."""
    answers = read_answers([place.directory(directory)])
    return our_lines(answers, {one: label(one) for one in variants(answers) if one.method == BITA})


def beside(ours: Iterable[Line], paper: Mapping[str, Speedups], sets: Sequence[str] = SETS) -> list[Line]:
    """Each of our lines, and after it the paper's of the same label; of these sets, if we have any of them."""
    lines: list[Line] = []
    for line in ours:
        lines.append(line._replace(speedups={name: x for name, x in line.speedups.items() if name in sets} or line.speedups))
        if line.label in paper:
            lines.append(Line(line.label, {name: x for name, x in paper[line.label].items() if name in sets}))
    return lines


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


def swept(place: Place, directory: str, names: Iterable[str], *flags: str, trees: Sequence[str] = ("bita:shape=efficient",)) -> list[Words]:
    """Decode with each of these trained ones, by the paper's tree unless by others."""
    bita = ((*flags, "--bita", str(place.directory("bita-trained") / "out" / name)) for name in names)
    return [sweep(place, directory, *words, *methods(*trees)) for words in bita]


def trained_commands(place: Place, names: Sequence[str], directory: str) -> list[Words]:
    return [train(place, name) for name in names] + swept(place, directory, names)


def ablation_tables(
    place: Place, directory: str, choose: Callable[[pd.DataFrame], Ablation[Any]], first: str, paper: Mapping[str, Speedups],
    sets: Sequence[str] = SETS, label: Callable[[Any], str] = str,
) -> list[Table]:  # fmt: skip
    """A line for each value of what varies."""
    found = choose(read_answers([place.directory(directory)]))
    lines = our_lines(found.answers, {one: label(value) for value, one in found.points.items()})
    return [speedup_table(first, beside(lines, paper, sets))]


def shipped_commands(place: Place, directory: str, sets: Sequence[str], prompts: int) -> list[Words]:
    return [sweep(place, directory, *methods("bita", EFFICIENT), sets=sets, prompts=prompts)]


def shipped_tables(place: Place, directory: str, paper: Mapping[str, Speedups], overall: Mapping[str, float]) -> list[Table]:
    ours = bita_lines(place, directory, lambda one: f"shipped pair, {tree_label(one.tree)}")
    return [speedup_table("target", [*ours, *(Line(name, found, mean=overall.get(name)) for name, found in paper.items())])]


def tree_commands(place: Place) -> list[Words]:
    full = (f"bita:depth=3,shape=full,children={k}" for k in (1, 2, 3, 4))
    return [sweep(place, "bita-trees", *methods("bita:depth=3,shape=straightforward", *full, EFFICIENT, "bita:depth=3"))]


def prompt_token_commands(place: Place) -> list[Words]:
    lengths = (1, 2, 4, 8, 16, 32, 64) if place.full else (1, 4, 16, 64)
    return trained_commands(place, [f"deep-{tokens}" for tokens in lengths], "bita-prompts")


def mask_commands(place: Place) -> list[Words]:
    trees = [f"bita:shape=efficient,depth={masks}" for masks in range(1, 7)]
    return [train(place, "6-masks"), *swept(place, "bita-masks", ["6-masks"], trees=trees)]


def source_commands(place: Place) -> list[Words]:
    sources = list(training_prompts(place.data, place.out))
    training = [train(place, "deep-16"), *(train(place, one, [one]) for one in sources)]
    return training + swept(place, "bita-sources", ("deep-16", *sources))


def source_tables(place: Place) -> list[Table]:
    counts = {name: len(read_rows(path)) for name, path in training_prompts(place.data, place.out).items()}
    rows = [[name, whose, f"{count:,}"] for whose, of in (("ours", counts), ("paper", PAPER_DATA)) for name, count in of.items()]
    lines = bita_lines(place, "bita-sources", lambda one: trained_name(one).replace("deep-16", "all of them"))
    return [Table(("prompts", "whose", "number"), rows), speedup_table("trained on", lines)]


def template_commands(place: Place) -> list[Words]:
    names = list(TEMPLATE_NAMES)
    asked_raw = swept(place, "bita-raw", names, "--raw-prompt")
    return [*(train(place, name) for name in names), *swept(place, "bita-chat", names), *asked_raw]


def template_tables(place: Place) -> list[Table]:
    shown = {"ours": OUR_TEMPLATES, "paper": PAPER_TEMPLATES}
    rows = [[name, whose, f"`{text}`".replace("|", "\\|")] for whose, found in shown.items() for name, text in found.items()]
    lines = [
        line._replace(label=f"{line.label}, asked {asked}")
        for asked in OUR_TEMPLATES
        for line in bita_lines(place, f"bita-{asked}", lambda one: f"trained {TEMPLATE_NAMES[trained_name(one)]}")
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


def rival_cells(found: Mapping[str, Row], name: str) -> list[str]:
    """Speed-up over transformers' greedy decoding, over plain decoding by the same runtime, and tokens per pass."""
    row = next((row for contender, row in found.items() if name and contender.endswith(name)), None)
    if row is None:
        return ["–", "–", "–"]
    bases = "transformers greedy", "pipedec pp, 1 stage" if name.startswith("pipedec") else "transformers greedy"
    ratios = [f"{row['tokens_per_second'] / found[base]['tokens_per_second']:.2f}×" for base in bases]
    return [*ratios, f"{1 / row['passes_per_token']:.2f}"]


def rival_tables(place: Place) -> list[Table]:
    found = rivals(place)
    rows = [[name, *paper, *rival_cells(found, ours)] for name, (*paper, ours) in PAPER_RIVALS.items()]
    return [Table(("method", "paper, 7B", "paper, 70B", *OURS), rows)]


def overview_tables(place: Place) -> list[Table]:
    rows = [[name, *rival_cells(found, name)] for found in [rivals(place)] for name in found]
    return [Table(("contender", *OURS), rows)]


def medusa_tables(place: Place) -> list[Table]:
    ours = ["BiTA, shipped pair", "ours", *rival_cells(rivals(place), "pipedec bita, 1 stage")[1:]]
    rows = [ours, *([f"BiTA, {name}", "paper", f"{PAPER_OVERALL[name]:.2f}×", "–"] for name in PAPER_OVERALL if "Vicuna" in name)]
    return [Table(("method and target", "whose", "speed-up", "tokens per pass"), rows)]


def _prompting(number: int, sets: Sequence[str]) -> Experiment:
    return Experiment(
        f"bita-table{number}", f"Table {number}: prompting, {' and '.join(sets)}", _TRAINED,
        partial(trained_commands, names=("none", "shallow-16", "deep-16"), directory="bita-prompts"),
        partial(ablation_tables, directory="bita-prompts", choose=by_prompting, first="prompting", paper=PAPER_PROMPTINGS, sets=sets),
        trains=True,
    )  # fmt: skip


def _tree(number: int, sets: Sequence[str]) -> Experiment:
    return Experiment(
        f"bita-table{number}", f"Table {number}: decoding method, {' and '.join(sets)}",
        "The shipped BiTA, of whose 4 masks 3 are used. Likeliest is our tree. The full trees have 16, 60, 160 and 340 rows: the "
        "emulated device computes 64 in the time of one, an A800 more.",
        tree_commands, partial(ablation_tables, directory="bita-trees", choose=by_tree, first="tree", paper=PAPER_TREES, sets=sets, label=tree_label),
        real=True,
    )  # fmt: skip


ENTRIES: tuple[Experiment | Absent, ...] = (
    Experiment(
        "bita-fig1", "Figure 1: techniques on MT-Bench",
        f"{_MEASURED} The paper's bars have no numbers but those of Table 2 and Figure 7; its base models are LLMs.",
        rival_commands, overview_tables,
    ),
    Absent("bita-fig2", "Figure 2: bi-directional tuning", f"{_ILLUSTRATION}[Architecture](../architecture.md) describes mask rows and prompt."),
    Absent("bita-fig3", "Figure 3: attention mask of the tuning", f"{_ILLUSTRATION}`pipedec/train/mask_rows.py` makes this mask."),
    Absent("bita-fig4", "Figure 4: straightforward decoding", f"{_ILLUSTRATION}`pipedec generate --method bita:shape=straightforward` decodes like this; `pipedec serve` shows rows and verdicts at `/live`."),
    Absent("bita-fig5", "Figure 5: the efficient tree", f"{_ILLUSTRATION}`pipedec generate --method bita:shape=efficient,children=3` grows it; `pipedec serve` shows it at `/live`."),
    Absent("bita-fig6", "Figure 6: attention mask of the decoding", f"{_ILLUSTRATION}`pipedec/tree/masks.py` makes this mask."),
    Experiment(
        "bita-table1", "Table 1: speed-up by target and data set",
        "One target, 700 to 7000 times smaller than the paper's. k: candidates of each mask. The shipped BiTA has 4 masks and a "
        "Markov table, which our tree uses; the paper's tree uses 3 masks.",
        partial(shipped_commands, directory="bita-shipped", sets=SETS, prompts=2),
        partial(shipped_tables, directory="bita-shipped", paper=PAPER_MODELS, overall={}), real=True,
    ),
    Experiment(
        "bita-table2", "Table 2: BiTA beside other speculative decoding on MT-Bench",
        f"{_MEASURED} HF AssistGen is transformers' assisted generation with the shipped draft, SpecDec `stpp` with it in one stage. "
        "Self-SpecDec skips whole layers, found by a greedy search on the target's answers, where Zhang et al. skip attention and "
        "MLP apart, found by Bayesian optimisation; its drafts count as passes by their share of the layers. It gains more "
        "than in the paper because the shipped target was grown by doubling its layers. Lookahead does not run here: its code "
        "replaces LLaMA's forward of transformers 4.34 and needs CUDA; prompt lookup in Figure 1 is its nearest relative.",
        rival_commands, rival_tables,
    ),
    Experiment(
        "bita-fig7", "Figure 7: BiTA beside Medusa on MT-Bench",
        f"{_MEASURED} The paper finds BiTA 19–32 % faster than what Medusa's authors report. Medusa does not run here: its heads "
        "are trained, and there are none for the shipped target.",
        rival_commands, medusa_tables,
    ),
    Experiment(
        "bita-fig8", "Figure 8: number of prompt tokens",
        f"{_TRAINED} The paper's figure has no numbers except those of 16; its speed-ups rise up to 16 tokens, and differ little from 8 to 64.",
        prompt_token_commands, partial(ablation_tables, directory="bita-prompts", choose=by_prompt_tokens, first="prompt tokens", paper={"16": PAPER_PROMPTINGS["deep"]}), trains=True,
    ),
    Experiment(
        "bita-fig9", "Figure 9: number of masks",
        f"{_TRAINED} One BiTA with 6 masks decodes with the first of them; the paper trains one for each number. Its figure "
        "has no numbers except those of 3; 3 or 4 masks are best there, since more rows cost time on an A800: here 64 rows take as long as one.",
        mask_commands, partial(ablation_tables, directory="bita-masks", choose=by_masks, first="masks", paper={"3": PAPER_PROMPTINGS["deep"]}), trains=True,
    ),
    _prompting(3, SETS[2:]),
    _tree(4, SETS[:2]),
    Experiment(
        "bita-table5", "Table 5: training data",
        f"{_TRAINED} The paper counts its data sets. Here a BiTA is also trained on each source alone, with equal steps and samples. "
        "Code, docstrings and lists are questions about Python's library, problems are GSM8K's training split.",
        source_commands, source_tables, trains=True,
    ),
    Experiment(
        "bita-table6", "Table 6: prompt templates",
        f"{_TRAINED} The paper shows its templates, and trains on all of a model's. Here a BiTA is trained on prompts in the chat "
        "template and another on bare ones, and each is asked in both ways. The shipped target knows no system prompt.",
        template_commands, template_tables, trains=True,
    ),
    Absent("bita-fig10", "Figure 10: rows of two passes", f"{_ILLUSTRATION}`pipedec serve` shows the rows of every pass at `/live`."),
    Experiment(
        "bita-table7", "Table 7: subtasks of MT-Bench",
        "One small target, and one prompt of each subtask at laptop size. The paper's means are over all answers.",
        partial(shipped_commands, directory="bita-subtasks", sets=SUBTASKS, prompts=1),
        partial(shipped_tables, directory="bita-subtasks", paper=PAPER_SUBTASKS, overall=PAPER_OVERALL), real=True,
    ),
    _prompting(8, SETS[:2]),
    _tree(9, SETS[2:]),
    Experiment(
        "bita-recipes", "Section 4.1: the paper's hyper-parameters beside ours",
        f"{_TRAINED} All see as many samples ({STEPS * BATCH} at laptop size), so the paper's batch of 128 leaves {STEPS * BATCH // 128} "
        "steps; the paper trains for 4 epochs of 300,000 samples, 9,400 steps. `pipedec train bita --recipe paper` has its values.",
        partial(trained_commands, names=tuple(RECIPES), directory="bita-recipes"), recipe_tables, trains=True,
    ),
)  # fmt: skip
