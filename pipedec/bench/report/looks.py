"""How methods and prompt sets look in every figure and table: their order and names, and the methods' colours and markers.

Knows names, nothing of rows. Colours are Okabe and Ito's, which colour-blind readers can distinguish; methods that are not listed
here get the next free ones, in alphabetical order after the listed ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

PROMPT_SETS = {
    "humaneval": "HumanEval",
    "translation": "translation",
    "qa": "QA",
    "math_reasoning": "math",
    "rag": "RAG",
    "summarization": "summarization",
    "mt_bench": "MT-bench",
}
BASELINE = "pp"


@dataclass(frozen=True)
class MethodLook:
    """One method: its name (``{}`` stands for the number of stages), colour and marker."""

    label: str
    color: str
    marker: str

    def name(self, groups: int | None = None) -> str:
        """The name, with or without the number of stages."""
        return self.label.format("" if groups is None else f"-{groups}")


METHODS = {
    BASELINE: MethodLook("PP{}", "#8A9199", "s"),
    "stpp": MethodLook("STPP{}", "#E69F00", "^"),
    "stpp-tuned": MethodLook("STPP{} tuned", "#D55E00", "v"),
    "slm": MethodLook("SLM", "#CC79A7", "X"),
    "bita": MethodLook("BiTA{}", "#6A4C9C", "P"),
    "pipedec": MethodLook("PipeDec{}", "#0072B2", "o"),
    "pipedec-bestfirst": MethodLook("PipeDec{} best-first", "#009E73", "D"),
}
_OTHER_COLORS = ("#56B4E9", "#8C6D31", "#882255", "#000000")
_OTHER_MARKERS = ("<", ">", "h", "*")
_LIGHTEST, _DARKEST = 0.55, -0.45


def pipelined(method: str) -> bool:
    """Whether the method keeps a prediction tree in the pipeline, as the paper's does: a miss drains it once."""
    return method.startswith("pipedec")


def method_rank(method: str) -> tuple[int, str]:
    """Sorts methods: the known ones in their order, then the others by name."""
    return (list(METHODS).index(method) if method in METHODS else len(METHODS)), method


def method_looks(methods: Iterable[str]) -> dict[str, MethodLook]:
    """The look of every method in ``methods``, in their order."""
    ordered = sorted(set(methods), key=method_rank)
    others = [method for method in ordered if method not in METHODS]
    looks = {}
    for method in ordered:
        number = others.index(method) if method in others else 0
        other = MethodLook(
            method.replace("{", "{{").replace("}", "}}") + "{}", _OTHER_COLORS[number % len(_OTHER_COLORS)],
            _OTHER_MARKERS[number % len(_OTHER_MARKERS)],
        )  # fmt: skip
        looks[method] = METHODS.get(method, other)
    return looks


def shade(color: str, index: int, count: int) -> str:
    """The colour of variant ``index`` of ``count``: from light to dark, the colour itself if there is only one."""
    amount = 0.0 if count == 1 else _LIGHTEST + (_DARKEST - _LIGHTEST) * index / (count - 1)
    end = 255 if amount > 0 else 0
    channels = (int(color[start : start + 2], 16) for start in (1, 3, 5))
    return "#" + "".join(f"{round(channel + (end - channel) * abs(amount)):02X}" for channel in channels)


def prompt_set_rank(name: str) -> tuple[int, str]:
    """Sorts prompt sets: the listed ones in their order, then the others by name."""
    return (list(PROMPT_SETS).index(name) if name in PROMPT_SETS else len(PROMPT_SETS)), name


def set_label(name: str) -> str:
    """The name under an axis."""
    return PROMPT_SETS.get(name, name.replace("_", " "))
