"""How much to speculate: tunes rows per timestep, children per row and draft forwards from timings and verdicts.

Everything is measured while answers are decoded and kept for later answers. Limits set by the user are not tuned.

- *Forwards*: as many as fit into the time that rank 0 would otherwise wait for the stages; one fewer when it hardly waits, as the
  pipeline then waits for the draft model.
- *Width*: a row that enters one timestep later costs one timestep if it is accepted. So the summed chances of the rows that a
  wider step adds are the share of time that it saves, and widening pays if timesteps grow by less than that. The duration at a
  neighbouring width that was never tried is estimated optimistically from the widths that were.
- *Off*: width 0, at which the last accepted token enters alone, which yields one token per passage of the pipeline. This is
  compared with the measured number of tokens per timestep.
- *Children*: more of them, from the next answer on, while many accepted tokens were not proposed by any draft source.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice, pairwise
from statistics import fmean

import torch
from torch import Tensor

from pipedec.methods import BestFirstOptions

WIDTHS = (0, 8, 16, 32, 64, 124)
CHILDREN = (16, 32)
MAX_FORWARDS = 8
_INITIAL_WIDTH = 64
_INITIAL_FORWARDS = 2
_EPOCH = 16  # timesteps between decisions
_DECAY = 0.9  # weight of the past in moving averages over timesteps
_TOKEN_DECAY = 0.98  # weight of the past in moving averages over tokens
_MAX_COST_RATIO = 0.98  # another width is taken if its estimated cost is below this fraction of the present one's
_NEGLIGIBLE = 0.05  # share of a timestep
_MAX_EPOCHS = 64  # epochs after which the measurement of a width is forgotten
_MANY_UNPROPOSED, _FEW_UNPROPOSED = 0.08, 0.04  # shares of accepted tokens
_OFF_TOKENS = 64  # tokens generated without speculation before it is tried again


@dataclass(frozen=True)
class TimestepTiming:
    """How long one timestep of the full pipeline took, as measured on rank 0.

    Attributes:
        seconds: duration of the timestep.
        waiting_seconds: how much of it rank 0 was idle, waiting for the stages.
        forward_seconds: duration of each draft forward.
    """

    seconds: float
    waiting_seconds: float
    forward_seconds: tuple[float, ...]


class Controller:
    """Holds ``width`` and ``forwards`` for the next timestep, and ``children`` for the next answer.

    Args:
        limits: set by the user; None = auto-tuned.
        passage: timesteps that a row is in the pipeline.
    """

    def __init__(self, limits: BestFirstOptions, passage: int) -> None:
        self._limits = limits
        self._passage = passage
        self.width = _INITIAL_WIDTH if limits.width is None else limits.width
        self.children = CHILDREN[0] if limits.children is None else limits.children
        self.forwards = _INITIAL_FORWARDS if limits.forwards is None else limits.forwards
        self._durations: dict[int, float] = {}  # by width: seconds of a timestep bound by the stages
        self._rows: dict[int, float] = {}  # by width: mean number of rows that entered in those timesteps
        self._measured_at: dict[int, int] = {}  # by width: epoch of the last measurement
        self._epoch = 0
        self._gains: dict[int, float] = {}  # by width: summed chances of the rows that it adds to the next narrower width
        self._tokens_per_timestep = 0.0
        self._chances: list[Tensor] = []  # of the rows of each timestep, not in ``_gains`` yet
        self._unproposed_share = 0.0
        self._unsettled = 0  # timesteps still affected by the previous width, which are not measured
        self._timings: list[TimestepTiming] = []  # of the present epoch
        self._entered: list[int] = []  # rows of each timestep of the epoch
        self._tokens = 0  # accepted in the epoch

    @property
    def is_speculating(self) -> bool:
        return self.width > 0

    def record_entered(self, chances: Tensor) -> None:
        """Record the acceptance probabilities of the rows of a timestep: [R], in any order."""
        self._entered.append(len(chances))
        if self._limits.width is None:
            self._chances.append(chances)

    def record_proposed(self, was_proposed: bool) -> None:
        """Record whether the token accepted after a drafted row was among that row's choices."""
        self._unproposed_share = _TOKEN_DECAY * self._unproposed_share + (1 - _TOKEN_DECAY) * (not was_proposed)

    def record_accepted(self, num_tokens: int) -> None:
        """Record the number of tokens that a verdict accepted."""
        self._tokens += num_tokens

    def record_timestep(self, timing: TimestepTiming) -> None:
        """Record the timing of a timestep. At the end of an epoch the limits are adjusted."""
        if self._unsettled:
            self._unsettled -= 1
            self._entered, self._tokens = [], 0
            return
        self._timings.append(timing)
        if len(self._timings) >= (_EPOCH if self.is_speculating else _OFF_TOKENS * self._passage):
            self._decide()

    def _decide(self) -> None:
        """Adjust all limits that the user did not set, at the end of an epoch."""
        self._measure()
        if self._limits.forwards is None:
            self._set_forwards()
        if self._limits.children is None:
            self._set_children()
        self._timings, self._entered, self._tokens = [], [], 0
        if self._limits.width is None:
            self._set_width()

    def _measure(self) -> None:
        duration = fmean(timing.seconds for timing in self._timings)
        waiting = fmean(timing.waiting_seconds for timing in self._timings)
        self._epoch += 1
        for width in [width for width, epoch in self._measured_at.items() if self._epoch - epoch > _MAX_EPOCHS]:
            del self._durations[width], self._rows[width], self._measured_at[width]
        if waiting > _NEGLIGIBLE * duration or self.forwards == 1:
            self._durations[self.width] = (self._durations.get(self.width, duration) + duration) / 2
            self._rows[self.width] = max(sum(self._entered) / max(len(self._entered), 1), 1)
            self._measured_at[self.width] = self._epoch
        rate = self._tokens / len(self._timings)
        self._tokens_per_timestep = _DECAY * (self._tokens_per_timestep or rate) + (1 - _DECAY) * rate

    def _set_forwards(self) -> None:
        drafted = [timing for timing in self._timings if len(timing.forward_seconds) == self.forwards]
        if not drafted:
            return  # there were too few rows to draft
        waiting = _median([timing.waiting_seconds for timing in drafted])
        forward = _median([seconds for timing in drafted for seconds in timing.forward_seconds])
        spare = waiting - _NEGLIGIBLE * _median([timing.seconds for timing in drafted])
        if spare > forward:
            self.forwards = min(self.forwards + int(spare / forward), MAX_FORWARDS)
        elif spare < 0:
            self.forwards = max(self.forwards - 1, 1)

    def _set_children(self) -> None:
        if self._unproposed_share > _MANY_UNPROPOSED:
            self.children = CHILDREN[-1]
        elif self._unproposed_share < _FEW_UNPROPOSED:
            self.children = CHILDREN[0]

    def _count_gains(self) -> None:
        """Bring ``_gains`` up to date: the device is asked once for the chances of many timesteps."""
        all_chances = iter(torch.cat(self._chances).tolist() if self._chances else [])
        for chances in self._chances:
            best = sorted(islice(all_chances, len(chances)), reverse=True)
            for narrower, width in pairwise(WIDTHS):
                if width <= self.width:
                    gain = sum(best[narrower:width])
                    self._gains[width] = _DECAY * self._gains.get(width, gain) + (1 - _DECAY) * gain
        self._chances.clear()

    def _set_width(self) -> None:
        self._count_gains()
        if self.width not in self._durations:
            return  # timesteps are bound by the draft model
        best = WIDTHS[1]  # speculate again after an epoch without speculation
        if self.is_speculating:
            index = WIDTHS.index(self.width)
            # At most one step wider than the present width, and off only from the narrowest, or any width measured before.
            options = {*WIDTHS[min(1, index - 1) : index + 2], *self._durations}
            best = min(sorted(options), key=lambda width: self._cost(width) * (_MAX_COST_RATIO if width == self.width else 1))
        if best != self.width:
            self._unsettled = self._passage
            self.forwards = min(self.forwards, _INITIAL_FORWARDS) if self._limits.forwards is None else self.forwards
            self.width = best

    def _cost(self, width: int) -> float:
        """Estimated seconds that a width needs for the progress that the present width makes in one timestep."""
        duration = self._durations[width] if width in self._durations else self._min_duration(width)
        if width == 0:
            return duration * self._passage * self._tokens_per_timestep
        present = self._gains.get(self.width, 0.0)
        wider = sum(self._gains.get(each, present) for each in WIDTHS if self.width < each <= width)
        narrower = sum(self._gains.get(each, 0.0) for each in WIDTHS if width < each <= self.width)
        return duration * max(1 + narrower - wider, _NEGLIGIBLE)

    def _min_duration(self, width: int) -> float:
        """A lower bound on the duration of a timestep at a width that was never tried.

        The duration is taken to grow with the number of rows, and ever faster (convex). So the line through the two nearest
        measurements, if both lie on one side, is a lower bound.
        """
        rows = max(width, 1)
        measured = sorted((abs(known - rows), known, self._durations[each]) for each, known in self._rows.items())
        _, near, near_duration = measured[0]
        if len(measured) == 1 or (measured[1][1] > rows) != (near > rows) or measured[1][1] == near:
            return near_duration * min(rows / near, 1)
        _, far, far_duration = measured[1]
        slope = max((far_duration - near_duration) / (far - near), 0.0)
        return max(near_duration + slope * (rows - near), 0.0)


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]
