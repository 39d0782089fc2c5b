"""How much to speculate: rows per timestep, children per row and draft forwards, from what timesteps take and verdicts say.

Everything is measured while answers are decoded, and kept for the next ones; a limit that is set by hand stays as it is.

- *Forwards*: as many as fit into the time that rank 0 would else wait for the stages; one less when it hardly waits, because then
  the pipeline waits for the draft.
- *Width*: a row that has to wait for the next timestep costs, if it comes true, that timestep. So the chances of the rows that a
  wider step takes along are the share of the time that it saves, and it is worth that if timesteps grow by less. A width next to
  the present one that was never tried counts as good as the widths that were tried allow.
- *Off*: width 0, at which the last accepted token enters alone and yields one token per passage of the pipeline. It is compared
  with the tokens that timesteps really yield.
- *Children*: more of them, from the next answer on, while many tokens are accepted that nobody had named.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

from torch import Tensor

from pipedec.methods import BestFirstOptions

WIDTHS = (0, 8, 16, 32, 64, 124)
CHILDREN = (16, 32)
MAX_FORWARDS = 8
_FIRST_WIDTH = 64
_FIRST_FORWARDS = 2
_EPOCH = 16  # timesteps from which a decision is made
_MEMORY = 0.9  # weight of the past in moving averages over timesteps, and
_LONG_MEMORY = 0.98  # over tokens
_GAIN = 0.98  # another width must promise at most so much of the time
_LITTLE = 0.05  # share of a timestep
_REMEMBERED_EPOCHS = 64  # after which a width is tried again
_MANY_UNNAMED, _FEW_UNNAMED = 0.08, 0.04  # shares of accepted tokens
_OFF_TOKENS = 64  # tokens without speculation after which it is tried again


@dataclass(frozen=True)
class Beat:
    """One timestep of the full pipeline as rank 0 saw it, in seconds.

    Attributes:
        period: from its beginning to the next.
        waiting: how long of it rank 0 had nothing to do but to wait for the stages.
        forwards: how long each draft forward was.
    """

    period: float
    waiting: float
    forwards: tuple[float, ...]


class Controller:
    """Holds ``width`` and ``forwards`` for the next timestep, and ``children`` for the next answer.

    Args:
        limits: set by the user; None = auto-tuned.
        passage: timesteps that a row is in the pipeline.
    """

    def __init__(self, limits: BestFirstOptions, passage: int) -> None:
        self._limits = limits
        self._passage = passage
        self.width = _FIRST_WIDTH if limits.width is None else limits.width
        self.children = CHILDREN[0] if limits.children is None else limits.children
        self.forwards = _FIRST_FORWARDS if limits.forwards is None else limits.forwards
        self._periods: dict[int, float] = {}  # of timesteps bound by the stages, by width
        self._rows: dict[int, float] = {}  # that really entered in them
        self._tried: dict[int, int] = {}  # the last epoch of each of them
        self._epoch = 0
        self._worth: dict[int, float] = {}  # summed chances of the rows of a timestep that a width adds to the next narrower one
        self._tokens_per_timestep = 0.0
        self._unnamed_share = 0.0
        self._unsettled = 0  # timesteps that are still shaped by the old width
        self._beats: list[Beat] = []
        self._entered: list[int] = []  # rows of each timestep
        self._tokens = 0

    @property
    def is_speculating(self) -> bool:
        return self.width > 0

    def entered(self, chances: Tensor) -> None:
        """The rows of a timestep have these chances of acceptance: [R], in no order."""
        self._entered.append(len(chances))
        best = chances.sort(descending=True).values.tolist()
        for narrower, width in pairwise(WIDTHS):
            if width <= self.width:
                worth = sum(best[narrower:width])
                self._worth[width] = _MEMORY * self._worth.get(width, worth) + (1 - _MEMORY) * worth

    def named(self, was_named: bool) -> None:
        """Whether the token that was accepted after a drafted row was among that row's choices."""
        self._unnamed_share = _LONG_MEMORY * self._unnamed_share + (1 - _LONG_MEMORY) * (not was_named)

    def accepted(self, num_tokens: int) -> None:
        """A verdict accepted so many tokens."""
        self._tokens += num_tokens

    def timestep(self, beat: Beat) -> None:
        """What a timestep took."""
        if self._unsettled:
            self._unsettled -= 1
            self._entered, self._tokens = [], 0
            return
        self._beats.append(beat)
        if len(self._beats) >= (_EPOCH if self.is_speculating else _OFF_TOKENS * self._passage):
            self._decide()

    def _decide(self) -> None:
        """At the end of an epoch."""
        self._measure()
        if self._limits.forwards is None:
            self._set_forwards()
        if self._limits.children is None:
            self._set_children()
        self._beats, self._entered, self._tokens = [], [], 0
        if self._limits.width is None:
            self._set_width()

    def _measure(self) -> None:
        period, waiting = fmean(beat.period for beat in self._beats), fmean(beat.waiting for beat in self._beats)
        self._epoch += 1
        for width in [width for width, epoch in self._tried.items() if self._epoch - epoch > _REMEMBERED_EPOCHS]:
            del self._periods[width], self._rows[width], self._tried[width]
        if waiting > _LITTLE * period or self.forwards == 1:
            self._periods[self.width] = (self._periods.get(self.width, period) + period) / 2
            self._rows[self.width] = max(sum(self._entered) / max(len(self._entered), 1), 1)
            self._tried[self.width] = self._epoch
        rate = self._tokens / len(self._beats)
        self._tokens_per_timestep = _MEMORY * (self._tokens_per_timestep or rate) + (1 - _MEMORY) * rate

    def _set_forwards(self) -> None:
        drafted = [beat for beat in self._beats if len(beat.forwards) == self.forwards]
        if not drafted:
            return  # there was too little to draft
        waiting = _median([beat.waiting for beat in drafted])
        forward = _median([seconds for beat in drafted for seconds in beat.forwards])
        spare = waiting - _LITTLE * _median([beat.period for beat in drafted])
        if spare > forward:
            self.forwards = min(self.forwards + int(spare / forward), MAX_FORWARDS)
        elif spare < 0:
            self.forwards = max(self.forwards - 1, 1)

    def _set_children(self) -> None:
        if self._unnamed_share > _MANY_UNNAMED:
            self.children = CHILDREN[-1]
        elif self._unnamed_share < _FEW_UNNAMED:
            self.children = CHILDREN[0]

    def _set_width(self) -> None:
        if self.width not in self._periods:
            return  # the draft is what takes the time
        best = WIDTHS[1]  # after a while without speculation it is tried again
        if self.is_speculating:
            place = WIDTHS.index(self.width)
            open_to_try = {*WIDTHS[min(1, place - 1) : place + 2], *self._periods}  # wider, and off, by one step at a time
            best = min(sorted(open_to_try), key=lambda width: self._cost(width) * (_GAIN if width == self.width else 1))
        if best != self.width:
            self._unsettled = self._passage
            self.forwards = min(self.forwards, _FIRST_FORWARDS) if self._limits.forwards is None else self.forwards
            self.width = best

    def _cost(self, width: int) -> float:
        """Seconds that a width should take for what the present one does in a timestep."""
        period = self._periods[width] if width in self._periods else self._least_period(width)
        if width == 0:
            return period * self._passage * self._tokens_per_timestep
        present = self._worth.get(self.width, 0.0)
        wider = sum(self._worth.get(each, present) for each in WIDTHS if self.width < each <= width)
        narrower = sum(self._worth.get(each, 0.0) for each in WIDTHS if width < each <= self.width)
        return period * max(1 + narrower - wider, _LITTLE)

    def _least_period(self, width: int) -> float:
        """A bound for a width that was never tried: more rows never take less time, and the more there are the more one adds.

        So the line through the two nearest widths on one side lies below what is to be found.
        """
        rows = max(width, 1)
        tried = sorted((abs(known - rows), known, self._periods[each]) for each, known in self._rows.items())
        _, near, near_period = tried[0]
        if len(tried) == 1 or (tried[1][1] > rows) != (near > rows) or tried[1][1] == near:
            return near_period * min(rows / near, 1)
        _, far, far_period = tried[1]
        slope = max((far_period - near_period) / (far - near), 0.0)
        return max(near_period + slope * (rows - near), 0.0)


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]
