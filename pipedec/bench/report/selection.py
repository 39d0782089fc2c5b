"""Which answers a figure or table shows: one tree and one BiTA per method, the pipelines to compare, the cases that all answered.

Knows the frame of answers (``frames``). Every function returns a part of the frame.
"""

from __future__ import annotations

from collections import Counter

import pandas as pd

from pipedec.bench.report.frames import Variant, by_variant, count_answers, select, variants
from pipedec.bench.report.looks import pipelined
from pipedec.bench.report.statistics import totals
from pipedec.bench.sweep.rows import BITA, SMALL_MODEL, PipelineColumns, TrainedBita, Tree
from pipedec.methods import BitaOptions

REFERENCE_GROUPS = 14  # the pipeline on which the paper compares methods
REFERENCE_TREE = (32, 16)  # its width and children there
# "BiTA: Bi-Directional Tuning for Lossless Acceleration in Large Language Models"
PAPER_PROMPT = ("deep", 16)  # prompting and prompt tokens (§4.1)
PAPER_TREE = ("efficient", 5)  # shape and candidates of each mask


def one_tree_each(answers: pd.DataFrame) -> pd.DataFrame:
    """One tree per method and pipeline: the paper's if it ran, else the one with most answers, of equals the fastest."""
    tpot_ms = by_variant(totals(answers, "variant")["tpot_ms"])
    counts = count_answers(answers)

    def preference(variant: Variant) -> tuple[object, ...]:
        tree = variant.tree
        return tree is None or (tree.width, tree.children) != REFERENCE_TREE, -counts[variant], tpot_ms[variant]

    best: dict[tuple[str, PipelineColumns], Variant] = {}
    for variant in sorted(variants(answers), key=preference):
        best.setdefault((variant.method, variant.pipeline), variant)
    return select(answers, best.values())


def one_bita(answers: pd.DataFrame) -> pd.DataFrame:
    """For figures that compare methods: of ``bita`` only the answers by one BiTA with one tree.

    Preferred are the paper's prompt and a tree of the default shape; else the choice with most answers, of equals the fastest.
    """
    choices: dict[tuple[TrainedBita | None, Tree | None], list[Variant]] = {}
    for one in variants(answers):
        if one.method == BITA:
            choices.setdefault((one.bita, one.tree), []).append(one)

    def preference(choice: tuple[TrainedBita | None, Tree | None]) -> tuple[object, ...]:
        found = select(answers, choices[choice]).sort_index()
        return -bita_preference(*choice), -len(found), found["decode_ms"].sum() / found["tokens"].sum(), found.index[0]

    chosen = choices[min(choices, key=preference)] if choices else []
    return answers[(answers["method"] != BITA) | answers["variant"].isin(chosen)]


def headline(answers: pd.DataFrame) -> pd.DataFrame:
    """What the paper's comparison shows: pipelined methods on every pipeline, the others on the reference pipeline alone.

    The reference is the pipeline that most other methods ran on; of equals the one with 14 stages, else the longest. Presets
    with another number of stages than their own are left to ``stage_sweep``, unless the rows hold nothing else.
    """
    answers = one_tree_each(answers)
    everywhere = variants(answers)
    uncut = [one for one in everywhere if not one.pipeline.recut or one.method == SMALL_MODEL] or everywhere
    counts = Counter(one.pipeline for one in uncut if not pipelined(one.method) and one.method != SMALL_MODEL)
    reference = max(counts, key=lambda it: (counts[it], it.groups == REFERENCE_GROUPS, it.groups), default=None)
    kept = (one for one in uncut if pipelined(one.method) or one.method == SMALL_MODEL or one.pipeline == reference)
    return select(answers, kept)


def stage_sweep(answers: pd.DataFrame) -> pd.DataFrame:
    """The pipelines that differ in the number of stages alone: one preset with several numbers, or presets as they are.

    Whichever has more numbers of stages is taken; presets as they are if both have the same. Of several pipelines with one
    number of stages, the one with most answers is taken.
    """
    everywhere = variants(answers)
    presets = sorted({one.pipeline.preset or "" for one in everywhere})
    ways = [[one for one in everywhere if not one.pipeline.recut]]
    ways += [[one for one in everywhere if (one.pipeline.preset or "") == preset] for preset in presets]
    way = max(ways, key=lambda way: len({one.groups for one in way}))
    counts = count_answers(answers)
    per_length: dict[int, Counter[PipelineColumns]] = {}
    for one in way:
        per_length.setdefault(one.groups, Counter())[one.pipeline] += counts[one]
    return select(answers, (one for one in way if one.pipeline == per_length[one.groups].most_common(1)[0][0]))


def over_shared_cases(answers: pd.DataFrame) -> pd.DataFrame:
    """In each prompt set the cases that all variants with answers to the set have answered."""
    return _answered_by_all(answers, answers.groupby("prompt_set", observed=True)["variant"].transform("nunique"))


def over_equal_cases(answers: pd.DataFrame) -> pd.DataFrame:
    """The cases that all variants have answered."""
    return _answered_by_all(answers, answers["variant"].nunique())


def _answered_by_all(answers: pd.DataFrame, number: pd.Series | int) -> pd.DataFrame:
    return answers[answers.groupby("case")["variant"].transform("nunique") == number]


def bita_preference(trained: TrainedBita | None, tree: Tree | None) -> int:
    """The higher, the closer to the paper's prompt, then to the default shape of tree, then to the paper's tree."""
    has_papers_prompt = trained is not None and (trained.prompting, trained.prompt_tokens) == PAPER_PROMPT
    is_default = tree is not None and tree.shape == BitaOptions().shape
    is_papers = tree is not None and (tree.shape, tree.children) == PAPER_TREE
    return 4 * has_papers_prompt + 2 * is_default + is_papers
