"""The names and the order of prompt sets in figures and tables."""

from __future__ import annotations

PROMPT_SETS = {
    "humaneval": "HumanEval",
    "translation": "translation",
    "qa": "QA",
    "math_reasoning": "math",
    "rag": "RAG",
    "summarization": "summarization",
    "mt_bench": "MT-bench",
}


def prompt_set_rank(name: str) -> tuple[int, str]:
    """Sorts prompt sets: the listed ones in their order, then the others by name."""
    return (list(PROMPT_SETS).index(name) if name in PROMPT_SETS else len(PROMPT_SETS)), name


def set_label(name: str) -> str:
    """The name under an axis."""
    return PROMPT_SETS.get(name, name.replace("_", " "))
