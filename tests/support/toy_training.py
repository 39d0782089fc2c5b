"""Training at toy size: a recipe of a few steps, and a library of small documents in place of Python's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from pipedec.train.draft.training import row_steps
from recipes.reference_models import corpus
from recipes.reference_models.corpus import Document
from recipes.reference_models.pair import Recipe, Shape

TOY = Recipe(
    vocabulary=400,
    target=Shape(hidden=32, intermediate=48, heads=4),
    draft=Shape(hidden=32, intermediate=32, heads=2),
    phases=((1, 3), (2, 3)),
    draft_phases=((1, 3),),
    distillation_phases=((1, 3),),
    characters=40_000,
    tokenizer_characters=40_000,
    batch=2,
    length=32,
    warmup_steps=2,
)


def killed_in_step(step: int, training: int = 0) -> Callable[..., Callable[[int], dict[str, float]]]:
    """A ``row_steps`` whose steps are interrupted: in a step of one of the trainings (or phases) that a run consists of."""
    begun: list[int] = []

    def row_steps_until_killed(*arguments: Any, **options: Any) -> Callable[[int], dict[str, float]]:
        backward, number = row_steps(*arguments, **options), len(begun)
        begun.append(number)

        def backward_or_die(current: int) -> dict[str, float]:
            if (number, current) == (training, step):
                raise KeyboardInterrupt
            return backward(current)

        return backward_or_die

    return row_steps_until_killed


def small_library() -> Iterator[Document]:
    for number in range(200):
        yield Document("source", f"<|begin|>def function_{number}(value):\n    return value + {number}\n<|end|>")
        yield Document("questions", corpus.conversation(f"What does function_{number} do?", f"It adds {number}."))
