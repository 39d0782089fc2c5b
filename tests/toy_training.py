"""Training at toy size: a recipe of a few steps, and a library of small documents in place of Python's own."""

from __future__ import annotations

from collections.abc import Iterator

from pipedec.train import corpus
from pipedec.train.corpus import Document
from pipedec.train.reference import Recipe, Shape

TOY = Recipe(
    vocabulary=400,
    target=Shape(hidden=32, intermediate=48, heads=4),
    draft=Shape(hidden=32, intermediate=32, heads=2),
    phases=((1, 3), (2, 3)),
    draft_phases=((1, 3),),
    distillation_phases=((1, 3),),
    characters=40_000,
    batch=2,
    length=32,
    warmup_steps=2,
)


def small_library() -> Iterator[Document]:
    for number in range(200):
        yield Document("source", f"<|begin|>def function_{number}(value):\n    return value + {number}\n<|end|>")
        yield Document("questions", corpus.conversation(f"What does function_{number} do?", f"It adds {number}."))
