"""Training at toy size: a recipe of a few steps, and a library of small documents in place of Python's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from pipedec.train.run import Backward, Figures, TrainingLoop
from recipes.reference_models import corpus
from recipes.reference_models.corpus import Document
from recipes.reference_models.pair import Mixture, MixtureRecipe, ModelSizes, Recipe

TOY = Recipe(
    vocabulary=400,
    target=ModelSizes(hidden=32, intermediate=48, heads=4),
    draft=ModelSizes(hidden=32, intermediate=32, heads=2),
    phases=((1, 3), (2, 3)),
    draft_phases=((1, 3),),
    distillation_phases=((1, 3),),
    characters=40_000,
    tokenizer_characters=40_000,
    batch=2,
    length=32,
    warmup_steps=2,
)
TOY_MIXTURE = MixtureRecipe(phases=((2, 4),), characters=40_000, batch=2, length=32, warmup_steps=2, mixture=Mixture(experts=4))


def killed_in_step(step: int, training: int = 0) -> Callable[..., None]:
    """A ``TrainingLoop.run`` that is interrupted: in a step of one of the trainings (or phases) that a run consists of."""
    begun: list[int] = []
    run = TrainingLoop.run

    def run_until_killed(
        loop: TrainingLoop, steps: int, rate: Callable[[int], float], backward: Backward, score: Callable[[], float] | None = None
    ) -> None:
        number = len(begun)
        begun.append(number)

        def backward_or_die(current: int) -> Figures:
            if (number, current) == (training, step):
                raise KeyboardInterrupt
            return backward(current)

        run(loop, steps, rate, backward_or_die, score)

    return run_until_killed


def small_library() -> Iterator[Document]:
    for number in range(200):
        yield Document("source", f"<|begin|>def function_{number}(value):\n    return value + {number}\n<|end|>")
        yield Document("questions", corpus.conversation(f"What does function_{number} do?", f"It adds {number}."))
