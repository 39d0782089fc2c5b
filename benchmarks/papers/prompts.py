"""The prompts of the experiments: the papers' data sets in one directory, or others in their place where one is missing.

Owns which file has which set, and what stands in for it. Without a directory, questions about Python's standard library are
asked, on such text the shipped models were trained.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path

from pipedec.core.errors import UserError
from recipes.reference_models.library_questions import corpus_questions, library_questions
from recipes.thread_models.records import Question

# For each set the sources that have it or stand in for it, the best one first; below the directory of the data.
SOURCES = {
    "humaneval": ("humaneval/HumanEval.jsonl.gz",),
    "gsm8k": ("gsm8k/test.jsonl",),
    "wmt14": ("wmt14/test.jsonl", "spec_bench/question.jsonl#category=translation"),
    "triviaqa": ("triviaqa/validation.jsonl", "spec_bench/question.jsonl#category=qa"),
    "drop": ("drop/validation.jsonl", "spec_bench/question.jsonl#category=rag"),
    "mmlu": ("mmlu/test.jsonl", "spec_bench/question.jsonl#category=math_reasoning"),
    "xsum": ("xsum/test.jsonl", "spec_bench/question.jsonl#category=summarization"),
    "cip": ("cip/test.jsonl", "vicuna_bench/question.jsonl"),
    "humaneval-x": ("humaneval-x/python.jsonl", "humaneval/HumanEval.jsonl.gz"),
    "mt-bench": ("mt_bench/question.jsonl",),
    "vicuna": ("vicuna_bench/question.jsonl",),
    "alpacaeval": ("alpacaeval/eval.jsonl", "vicuna_bench/question.jsonl"),
}
SUBTASKS = ("coding", "extraction", "humanities", "math", "reasoning", "roleplay", "stem", "writing")  # of MT-Bench
SOURCES |= {name: (f"mt_bench/question.jsonl#category={name}",) for name in SUBTASKS}
_VICUNA = ("coding", "common-sense", "counterfactual", "fermi", "generic", "knowledge", "math", "roleplay", "writing")
VICUNA_TASKS = tuple(f"vicuna-{name}" for name in _VICUNA)
SOURCES |= {f"vicuna-{name}": (f"vicuna_bench/question.jsonl#category={name}",) for name in _VICUNA}
TEXTS = ("details", "descriptions", "explanations")  # kinds of questions whose answers are paragraphs
CORPUS = ("code", "docstrings")  # kinds of which the shipped models' text is made


def find_prompts(data: Path | None, sets: Sequence[str], out: Path) -> list[str]:
    """A source of prompts for each set, ``NAME=FILE[#KEY=VALUE]``; sets that one source would give twice are named once.

    Without ``data``, files of questions are written below ``out``. Raises UserError if ``data`` has nothing for a set.
    """
    if data is None:
        return [f"{kind}={_library(kind, out)}" for kind in ("lists", "texts")]
    found: dict[str, str] = {}
    for name in sets:
        chosen = next((source for source in SOURCES[name] if (data / source.partition("#")[0]).is_file()), None)
        if chosen is None:
            raise UserError(f"--data {data} has no {SOURCES[name][0]}: docs/papers/data.md has the line that makes it")
        found.setdefault(chosen, f"{name}={data / chosen}")
    return list(found.values())


def described(commands: Sequence[str]) -> str:
    """Which prompts the ``--prompts`` flags of command lines name, and what stands in for which set."""
    found = dict.fromkeys(word for line in commands for flag, word in pairwise(line.split()) if flag == "--prompts")
    sources = [source.partition("=") if "=" in source.partition("#")[0] else (source, "", source) for source in found]
    parts = Counter(file.partition("#")[0] for _, _, file in sources)
    own, others = dict[str, None](), []
    for name, _, file in sources:
        path = file.partition("#")[0]
        if parts[path] > 2:  # by category
            own[f"{parts[path]} categories of {path.removeprefix('DATA/').partition('/')[0]}"] = None
        elif name not in SOURCES or file == f"DATA/{SOURCES[name][0]}":
            own[name.removeprefix("DATA/")] = None
        else:
            others.append(f"{name} by {file.removeprefix('DATA/')}")
    parts_shown = [f"{name}: {', '.join(some)}" for name, some in (("prompts", own), ("replaced", others)) if some]
    return "; ".join(parts_shown)


def training_prompts(data: Path | None, out: Path) -> dict[str, Path]:
    """Files of prompts to train on, by source; none is among the prompts that are asked."""
    found = {kind: _library(kind, out, held_out=False) for kind in ("code", "docstrings", "lists")}
    problems = None if data is None else data / "gsm8k" / "train.jsonl"
    return found | ({"problems": problems} if problems is not None and problems.is_file() else {})


def _library(kind: str, out: Path, held_out: bool = True) -> Path:
    """A file of questions about the library: answered by lists or texts, or of the corpus (``code``, ``docstrings``)."""
    path = out / "prompts" / f"{kind}{'' if held_out else '-to-train'}.jsonl"
    if not path.is_file():
        asked = [one.prompt for one in _questions().get(kind, ()) if one.held_out == held_out]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in asked), encoding="utf-8")
    return path


@cache
def _questions() -> dict[str, list[Question]]:
    """All questions, by the kind of their answers."""
    found: dict[str, list[Question]] = {}
    for one in (*library_questions(0), *corpus_questions()):
        found.setdefault("texts" if one.kind in TEXTS else one.kind if one.kind in CORPUS else "lists", []).append(one)
    return found
