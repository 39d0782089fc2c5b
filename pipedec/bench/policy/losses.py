"""Why an answer took as many timesteps as it did: the distance from each token's row to the row before it, by its cause.

Knows when rows entered a pipeline, and nothing of methods.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Losses:
    """Timesteps of decoded tokens by cause; all but ``together`` add up to the answer's.

    Attributes:
        together: tokens (not timesteps) whose row entered with the row before it.
        first: until the first decoded token is known, which nobody can shorten.
        tokens: one for every further token whose row entered after the row before it.
        late: beyond that one, of rows that entered before they were accepted.
        named: beyond it, of rows that entered after they were accepted, although somebody had named their token.
        unnamed: the same, where nobody had.
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
        """Those of several answers together."""
        columns = zip(*(asdict(losses).values() for losses in several), strict=True)
        return cls(*(sum(column) for column in columns))


def losses(entries: Sequence[int], is_named: Sequence[bool], passage: int) -> Losses:
    """What the timesteps of an answer went to.

    Args:
        entries: the timestep, from 1, in which the row of each token but the last entered.
        is_named: whether somebody had named each of these tokens before it was accepted.
        passage: timesteps that a row is in the pipeline, so that a token is known that much after the row before it entered.
    """
    if not entries:
        return Losses()
    found = Losses(first=entries[0] - 1 + passage)
    steps = [after - before for before, after in pairwise(entries)]
    return Losses.total([found, *(_of_token(step, named, passage) for step, named in zip(steps, is_named[1:], strict=True))])


def _of_token(step: int, is_named: bool, passage: int) -> Losses:
    if step == 0:
        return Losses(together=1)
    if step < passage:
        return Losses(tokens=1, late=step - 1)
    return Losses(tokens=1, named=step - 1) if is_named else Losses(tokens=1, unnamed=step - 1)
