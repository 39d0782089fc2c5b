"""Where the timesteps of an answer went: for each token, how much later its row entered than the row before it, and why.

Knows when rows entered the pipeline; does not know methods.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Losses:
    """Timesteps of decoded tokens by cause; all except ``together`` add up to the timesteps of the answer.

    Attributes:
        together: tokens (not timesteps) whose row entered in the same timestep as the row before it.
        first: until the first decoded token is verified; no method can shorten it.
        tokens: one for each further token whose row entered later than the row before it.
        late: beyond that one, for rows that entered before their token was accepted.
        named: beyond that one, for rows that entered after their token was accepted although a draft source had proposed it.
        unnamed: the same, for tokens that no draft source had proposed.
    """

    together: int = 0
    first: int = 0
    tokens: int = 0
    late: int = 0
    named: int = 0
    unnamed: int = 0

    @property
    def timesteps(self) -> int:
        return self.first + self.tokens + self.late + self.named + self.unnamed

    @classmethod
    def total(cls, several: Iterable[Losses]) -> Losses:
        """The sums over several answers."""
        columns = zip(*(asdict(losses).values() for losses in several), strict=True)
        return cls(*(sum(column) for column in columns))


def losses(entries: Sequence[int], is_proposed: Sequence[bool], passage: int) -> Losses:
    """The timesteps of one answer by cause.

    Args:
        entries: the timestep, from 1, in which the row of each token except the last entered.
        is_proposed: whether a draft source had proposed each of these tokens before it was accepted.
        passage: timesteps from a row's entry to its verdict.
    """
    if not entries:
        return Losses()
    found = Losses(first=entries[0] - 1 + passage)
    steps = [after - before for before, after in pairwise(entries)]
    return Losses.total([found, *(_of_token(step, named, passage) for step, named in zip(steps, is_proposed[1:], strict=True))])


def _of_token(step: int, is_proposed: bool, passage: int) -> Losses:
    if step == 0:
        return Losses(together=1)
    if step < passage:
        return Losses(tokens=1, late=step - 1)
    return Losses(tokens=1, named=step - 1) if is_proposed else Losses(tokens=1, unnamed=step - 1)
