"""The experiments of the PASTA paper (Jin et al. 2025)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from pandas import DataFrame, Series

from benchmarks.papers.experiment import Absent, Experiment, Place, Table, Words
from benchmarks.papers.positions import FIXED_TOKENS, WAYS
from benchmarks.papers.thread_answers import by_prompt, prompt_flags, read_answers
from pipedec.directories import reference_pair, reference_threads
from recipes.thread_models.rounds import SUMMARY

TITLE = "PASTA, figure by figure"
ABOUT = (
    "[Learning to Keep a Promise: Scaling Language Model Decoding Parallelism with Learned Asynchronous Decoding]"
    "(https://arxiv.org/abs/2502.11517) with the shipped thread models of 10 million parameters. They learned from questions "
    "about Python's library, so held-out ones are asked beside AlpacaEval's prompts or those in their place ([data](data.md)). "
    "The paper's quality is the share of wins over the baseline by GPT-4; ours, where one is given, is by the likelihood of the "
    "answers under the model in one thread (`--judge URL` asks a server instead). One emulated device computes 64 rows in the "
    "time of one ([what is emulated](../benchmarks.md#what-emulated-means)). [Longer measurements](../results/threads.md) are of "
    "14 stages."
)
DECODED = {"one thread": "none", "APAR": "apar", "SoT": "sot", "PASTA": "pasta"}
PAPER = [  # of the text of §5.2: name, realised speed-up, wins
    ("APAR", "1.6×", "41.2%"), ("SoT", "none", "–"), ("SoT, Gemma-it", "1.61×", "12% fewer"), ("Pasta-BoN-1", "1.93×", "42.9%"),
    ("Pasta-BoN-2", "1.62×", "45.5%"), ("Pasta-BoN-∞", "1.21×", "52.3%"),
]  # fmt: skip
WEIGHTS = (1, 2, 4, 8, "inf")
EFFICIENCIES = ("speedup", "parallelism", "harmonic", "arithmetic")
RATES, EPOCHS = (1e-5, 2e-4, 2e-3, 2e-2), (1, 4, 8)
STEPS, GRID_STEPS, BATCH = 120, 10, 16  # of a training of positions, of an epoch of the grid; answers of a step
Mean = Callable[[Series], float]


def geometric(ratios: Series) -> float:
    return float(np.exp(np.log(ratios).mean()))


def arithmetic(ratios: Series) -> float:
    return float(ratios.mean())


def decode_commands(place: Place) -> list[Words]:
    prompts = prompt_flags(place, ()) + (prompt_flags(place, ("alpacaeval",)) if place.data else [])
    flags = ["--preset", "paper-14", "--stages", "1", "--no-own-work", "--methods", "pp", *place.size_flags(6, 805, tokens=320)]
    return [["benchmarks.skeleton", *flags, *prompts, "--out", str(place.directory("pasta-answers"))]]


def ratios(place: Place) -> dict[str, DataFrame]:
    """By name in ``DECODED``: realised, theoretical and parallelism of each prompt's answer (§5.1), and is_forked."""
    frame = read_answers(place, "pasta-answers")
    base, found = by_prompt(frame, "none", "pp"), {}
    for name, dialect in DECODED.items():
        answers = by_prompt(frame, dialect, "pp")
        found[name] = DataFrame({
            "realised": base["decode_ms"] / answers["decode_ms"], "theoretical": base["tokens"] / answers["longest_chain"],
            "parallelism": answers["parallelism"], "is_forked": answers["is_forked"],
        })  # fmt: skip
    return found


def trade_off_tables(place: Place) -> list[Table]:
    rows = []
    for name, found in ratios(place).items():
        for answers, chosen in (("all", found), ("in several threads", found[found["is_forked"]])):
            if len(chosen) and not (name == "one thread" and answers != "all"):
                figures = [f"{geometric(chosen[one]):.2f}×" for one in ("realised", "theoretical", "parallelism")]
                rows.append([name, "ours", f"{answers}, {len(chosen)}", *figures, "–"])
    rows += [[name, "paper", "805", speed, "–", "–", wins] for name, speed, wins in PAPER]
    columns = ("decoding", "whose", "answers", "realised speed-up", "theoretical speed-up", "parallelism", "wins")
    return [Table(columns, rows, note="*Realised* is per answer in computed time.")]


def arithmetic_tables(quantity: str) -> Callable[[Place], list[Table]]:
    def tables(place: Place) -> list[Table]:
        found = ratios(place)
        rows = [[name, *(f"{mean(one[quantity]):.2f}×" for mean in (arithmetic, geometric))] for name, one in found.items()]
        return [Table(("decoding", "arithmetic mean", "geometric mean"), rows)]

    return tables


def answer_file(place: Place) -> Path:
    """The annotated answers to learn from, which ``annotate_commands`` write."""
    return place.out / "prompts" / "pasta.jsonl"


def annotate_commands(place: Place) -> list[Words]:
    problems = None if place.data is None else place.data / "gsm8k" / "train.jsonl"
    known = ["--problems", str(problems)] if problems is not None and problems.is_file() else []
    library, recipes = str(place.out / "prompts" / "library.jsonl"), "recipes.thread_models"
    return [
        ["recipes.reference_models", "questions", *known, "--out", library],
        [recipes, "annotate", "--dialect", "pasta", "--in", library, *known, "--out", str(answer_file(place))],
    ]


def tune(place: Place, directory: str, name: str, *flags: str) -> Words:
    """Fine-tune a small model on the annotated answers."""
    out, work = (str(place.directory(directory) / kind / name) for kind in ("out", "work"))
    size = ["--batch", str(BATCH), "--max-length", "384", "--held-out-prompts", "265" if place.full else "8", "--threads", "1"]
    return [
        "recipes.thread_models", "pasta-sft", "--in", str(answer_file(place)), *size, *flags, "--out", out, "--work", work,
    ]  # fmt: skip


def reports(place: Place, directory: str) -> dict[str, dict[str, Any]]:
    """The ``training.json`` of every model of a directory, by name."""
    paths = sorted(place.directory(directory).glob("out/*/training.json"), key=lambda path: path.stat().st_mtime)
    return {path.parent.name: json.loads(path.read_text(encoding="utf-8")) for path in paths}


def position_commands(place: Place) -> list[Words]:
    tuned = []
    for name, way in WAYS.items():
        dialect = way.write(place.out / "prompts" / f"{name}.json")
        flags = ["--dialect", str(dialect), *(["--true-lengths"] if way.knows else [])]
        flags += ["--steps", str(4000 if place.full else STEPS)]
        tuned.append(tune(place, "pasta-positions", name, "--target", str(reference_threads() / "draft"), *flags))
    return annotate_commands(place) + tuned


def position_tables(place: Place) -> list[Table]:
    rows = []
    found = reports(place, "pasta-positions")
    for name in WAYS:
        loss, answers = found[name]["held_out_loss"]["pasta"], found[name]["held_out"]["pasta"]
        forked = [one for one in answers.values() if one["forked"]]
        speed = "–" if WAYS[name].knows else f"{geometric(Series([one['speedup'] for one in forked])):.2f}×"
        rows.append([name.capitalize(), f"{loss['loss']:.3f}", f"{loss['control_loss']:.3f}", speed])
    return [Table(("positions", "loss of text", "loss of control tokens", "theoretical speed-up"), rows)]


def bonbon(place: Place, name: str, *flags: str) -> list[Words]:
    model = str(reference_threads() / "target")
    size = ["--samples", "10", "--held-out-prompts", "265"] if place.full else ["--samples", "6", "--held-out-prompts", "16"]
    size += ["--max-tokens", "320", "--threads", "1", "--seed", "5"] + ([] if place.full else ["--max-prompts", "48"])
    where = ["--out", str(place.directory(name) / "out"), "--work", str(place.directory(name) / "work")]
    models = ["--in", str(answer_file(place)), "--model", model, "--baseline", model]
    return [*annotate_commands(place), ["recipes.thread_models", "pasta-bonbon", *models, *flags, *size, *where]]


def round_commands(place: Place) -> list[Words]:
    return bonbon(place, "pasta-rounds", "--lambda", ",".join(map(str, WEIGHTS)), "--rounds", "2")


def efficiency_commands(place: Place) -> list[Words]:
    return bonbon(place, "pasta-efficiencies", "--lambda", "2", "--efficiency", ",".join(EFFICIENCIES))


def preferred_tables(name: str, *varied: str, rounds: tuple[int, ...] = (0, 1, 2)) -> Callable[[Place], list[Table]]:
    """The points of a trade-off by what is ``varied``: keys of its summary."""

    def tables(place: Place) -> list[Table]:
        points = json.loads((place.directory(name) / "out" / SUMMARY).read_text(encoding="utf-8"))
        named = ("λ" if one == "lambda" else one for one in varied)
        columns = (*named, "wins", "theoretical speed-up", "parallelism", "in circles")
        rows = [
            [*(shown(point[one]) for one in varied), f"{point['win_rate']:.1%}",
             f"{point['speedup']:.3f}×", f"{point['parallelism']:.2f}", f"{point['circles']:.0%}"]
            for point in points if point["round"] in rounds
        ]  # fmt: skip
        return [Table(columns, rows)]

    return tables


def shown(value: Any) -> str:
    """A value of a summary; None of the model before."""
    if value is None:
        return "–"
    return "∞" if value == "inf" else f"{value:g}" if isinstance(value, float) else str(value)


def grid_commands(place: Place) -> list[Words]:
    tuned = [
        tune(place, "pasta-grid", f"{rate:g}-{epochs}", "--target", str(reference_pair() / "draft"), "--plain-share", "1",
             "--learning-rate", f"{rate:g}", "--steps", str(epochs * (1000 if place.full else GRID_STEPS)))
        for rate in RATES for epochs in EPOCHS
    ]  # fmt: skip
    return annotate_commands(place) + tuned


def grid_tables(place: Place) -> list[Table]:
    found = reports(place, "pasta-grid")
    losses = {name: f"{report['held_out_loss']['plain']['loss']:.3f}" for name, report in found.items()}
    rows = [[f"{rate:g}", *(losses[f"{rate:g}-{epochs}"] for epochs in EPOCHS)] for rate in RATES]
    return [Table(("learning rate", *(f"epochs: {epochs}" for epochs in EPOCHS)), rows, "loss of held-out answers in one thread")]


_ILLUSTRATION, _HERE = "An illustration.", "this machine"
_BONBON = (
    "One model for each line, trained from the shipped one by BoNBoN: at laptop size on 6 samples of each of 48 prompts, and "
    "measured on 16 held-out questions of each kind, so that differences of some percent are noise: six steps "
    "hardly change the model. "
    "[265 questions](../results/threads.md#preference-training-bonbon) were asked once, with 128 prompts to train on."
)
_MEANS = "Realised is in computed time; the answers are those of Figure 4. The paper's points have no numbers."
ENTRIES: tuple[Experiment | Absent, ...] = (
    Absent(
        "pasta-fig1", "Figure 1: an annotated answer and its threads",
        f"{_ILLUSTRATION} `pipedec generate --threads pasta --show-threads` prints an answer like this.",
    ),
    Absent(
        "pasta-fig2", "Figure 2: the interpreter's KV cache and masks",
        f"{_ILLUSTRATION} `pipedec/threads/threaded.py` gives threads their positions, `pipedec/tree/masks.py` makes the masks.",
    ),
    Absent(
        "pasta-fig3", "Figure 3: data and training",
        f"{_ILLUSTRATION} [The recipe](../../recipes/reference_models/README.md) has the same stages.",
    ),
    Experiment(
        "pasta-fig4", "Figure 4: quality over realised speed-up, theoretical speed-up and parallelism",
        "The shipped model learned both dialects, and answers in one thread, too. SoT is "
        "Skeleton-of-Thought. This small model writes more in threads than in one, so that answers gain less than "
        "text tokens (APAR, Figure 4). Answers are cut at 320 tokens at laptop size. The paper's are of Gemma 7B on an H100.",
        decode_commands, trade_off_tables,
    ),
    Experiment(
        "pasta-fig4-weights", "Figure 4: models by the weight of quality λ",
        f"{_BONBON} The first line is the model before. The paper: with λ = 1, 1.93× and 42.9% wins; 2: 1.62×, "
        "45.5%; ∞: 1.21×, 52.3%.",
        round_commands, preferred_tables("pasta-rounds", "lambda", rounds=(0, 1)), trains=True, place=_HERE,
    ),
    Experiment(
        "pasta-fig5-rounds", "Figure 5, left: rounds of preference training",
        f"{_BONBON} Round 2 begins with the model of round 1. The paper's points at 10 % and 60 % of a round are not measured; "
        "it finds that each adds to quality and speed.",
        round_commands, preferred_tables("pasta-rounds", "round", "lambda"), trains=True, place=_HERE,
    ),
    Experiment(
        "pasta-fig5-positions", "Figure 5, middle: positions after a promise",
        f"A small model, the shipped draft in threads, learns {STEPS} steps of {BATCH} answers at laptop size with each way to "
        f"know where a child ends: a fixed length ({FIXED_TOKENS} tokens, slightly above the median of these answers, as the "
        "paper's 40 is), a stated one, exact or in tens, or the true one. Losses are of held-out written answers, which state "
        "true lengths: Oracle-1X and Oracle-10X would learn what Pred-1X and Pred-10X learn. While decoding, lengths "
        "are unknown, so the oracle has no speed-up. Positions hardly change the loss of this text; exact lengths are "
        "harder to state than tens, which the draft had learned before. The paper, by the quality of answers: predictions are as "
        "good as oracles, and tens best.",
        position_commands, position_tables, trains=True, place=_HERE,
    ),
    Experiment(
        "pasta-fig5-scores", "Figure 5, right: the efficiency term of the score",
        f"{_BONBON} λ = 2. The paper: the speed-up alone and the harmonic mean are alike, parallelism alone is slow.",
        efficiency_commands, preferred_tables("pasta-efficiencies", "efficiency"), trains=True, place=_HERE,
    ),
    Absent(
        "pasta-fig6", "Figure 6: KV cache of a naive interpreter",
        f"{_ILLUSTRATION} It shows slots that batched decoding wastes; threads share one pool here.",
    ),
    *(
        Experiment(
            f"pasta-fig{number}", f"Figure {number}: {title}, arithmetic means", _MEANS, decode_commands, arithmetic_tables(name)
        )
        for number, title, name in (
            (7, "realised speed-up", "realised"), (8, "theoretical speed-up", "theoretical"), (9, "parallelism", "parallelism"),
        )
    ),
    Experiment(
        "pasta-appendix-c", "Appendix C: learning rates and epochs of the baseline",
        f"The shipped draft learns the same answers in one thread; an epoch is {GRID_STEPS} steps of {BATCH} answers at laptop "
        "size, none of which comes again. Ours is by held-out loss, over the paper's rate and higher ones, which a model of 2 "
        "million parameters needs; the paper by wins, over 1e-4, 1e-5 and 1e-6 and 1, 4 and 8 epochs, of which 1e-5 and 4 won.",
        grid_commands, grid_tables, trains=True, place=_HERE,
    ),
)  # fmt: skip
