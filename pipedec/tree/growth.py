"""How trees grow from one draft forward to the next, where the draft model alone decides: a rule that a device can follow.

A *choice* is a token below a drafted row that is no row yet. Knows no method and no model. Shapes: F rows to draft, c choices
below each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor


class Undrafted(NamedTuple):
    """A row that is not drafted, or a choice. The row above it is drafted, or about to be."""

    log_chance: float  # of the path to it
    parent: int
    place: int  # among the choices below that row
    token: int
    row: int | None  # None for a choice


class Frontier(NamedTuple):
    """The part of a tree that a forward does not change, when its rows are known.

    Attributes:
        root_log_chance: from which the costs of rows count.
        num_rows: of the tree, so that the next choice to become a row has this index.
        log_chances: of the paths to the rows that are drafted next.
        undrafted: what may be drafted after them, besides the choices below them.
        least_loss: by which the log-chance of a choice is below its row's, at least.
    """

    root_log_chance: float
    num_rows: int
    log_chances: list[float]
    undrafted: list[Undrafted]
    least_loss: float


class Growth(NamedTuple):
    """The rows that a method will ask for after those that are drafted next: of all rows that are not drafted, and all choices,
    those that cost least.

    Of equal ones rows come before choices, and then in the order of rows; the choices taken become rows, best first. By layers,
    only choices below the rows drafted last are taken; they become rows in the order of the rows above them.

    Attributes:
        forwards: the method asks for rows so many times more, at most.
        rows: how many each time, at most.
        by_layer: whether the tree grows by layers.
        log_chances: from the log-probabilities of choices, [F, c], to the logarithms of their chances, [F, c], given that their
            row is accepted.
        frontier: returns the rest of the tree.
    """

    forwards: int
    rows: int
    by_layer: bool
    log_chances: Callable[[Tensor], Tensor]
    frontier: Callable[[], Frontier]
