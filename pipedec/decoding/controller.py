"""Controls speculation: children per row and draft forwards per timestep, and whether to speculate at all.

One for all requests. Everything is measured while answers are decoded and kept for later ones. Limits that a request sets itself
are not tuned.

- *Rows*: one more enters only if it raises the tokens of a timestep by a greater share than the time (see ``pays``).
- *Forwards*: as many as fit into the time that rank 0 would otherwise wait for the stages; one fewer, at first half as many, when
  it hardly waits, as the pipeline then waits for the draft model.
- *Children*: more of them, from the next answer on, while many accepted tokens were not proposed by any draft source.
- *Off*: where speculation does not pay (see ``trials``), only accepted tokens enter, and nothing is drafted.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from pipedec.decoding.row_costs import RowCosts
from pipedec.decoding.trials import Trials

CHILDREN = (16, 32)
MAX_FORWARDS = 8
_INITIAL_FORWARDS = 2
_EPOCH = 16  # timesteps between decisions on forwards; the first one comes after one, the next after 2 more, 4, 8
_YIELD_WEIGHT = 0.01  # of a timestep in the moving average of tokens per timestep
_TOKEN_DECAY = 0.98  # weight of the past in moving averages over tokens
_NEGLIGIBLE = 0.05  # share of a timestep
_MANY_UNPROPOSED, _FEW_UNPROPOSED = 0.08, 0.04  # shares of accepted tokens
_BEST_SHARE = 0.25  # without more rows than were measured, a timestep takes at least this share of the shortest of those


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


@dataclass(frozen=True)
class EnteredCounts:
    """The rows that entered at a timestep.

    Attributes:
        rows: of all requests.
        prompt_rows: those of prompts.
        running: number of requests whose prompts have entered.
    """

    rows: int = 0
    prompt_rows: int = 0
    running: int = 0


class Controller:
    """Holds ``forwards`` for the next timestep, and ``children`` for the next answer.

    Args:
        passage: timesteps that a row is in the pipeline.
    """

    def __init__(self, passage: int) -> None:
        self.forwards = _INITIAL_FORWARDS
        self.children = CHILDREN[0]
        self._passage = passage
        self._costs = RowCosts()
        self._trials = Trials(passage)
        self._unproposed_share = 0.0
        self._yield = 1.0  # tokens per timestep and running request
        self._fewest: tuple[int, float] | None = None  # rows and seconds of the smallest timesteps
        self._epoch = 1
        self._in_flight: deque[EnteredCounts] = deque(maxlen=passage)
        self._timings: list[TimestepTiming] = []  # of the present epoch
        self._tokens = 0  # accepted since the last timing
        self._draft_prefills = False  # in this timestep

    @property
    def is_speculating(self) -> bool:
        return self._trials.is_speculating

    def pays(self, rows: int, tokens: float) -> bool:
        """Whether one more row after ``rows`` is worth its time if each running request may expect ``tokens`` tokens from it.

        Speed is R / t, with R tokens in a timestep of t seconds. One more row of chance c in every timestep brings c more tokens
        and takes dt more seconds, so it must hold that c / R ≥ dt / t. In other words, with chance c the row saves the usual time
        of a token, 1 / R timesteps. With B running requests, each of which needs N timesteps for a token, that is c · N / B.

        A row that enters only after the verdict on the row above it seems to lose more, a whole passage. But the rows below it
        are drafted by then and enter with it, so no more is lost than the time of one token; and most candidates are dead by
        then, or have become probable and entered earlier. Where rows are not free, valuing them by the passage doubles the time
        of a token (docs/benchmarks.md, "What a row is worth").
        """
        return tokens / self._yield >= self._costs.added(rows)

    def record_entered(self, entered: EnteredCounts) -> None:
        """Record the rows that enter at the next timestep."""
        self._in_flight.append(entered)

    def record_draft_prefill(self) -> None:
        """Note that the draft model computes a prompt in this timestep, which is then no measure of speculation."""
        self._draft_prefills = True

    def record_proposed(self, was_proposed: bool) -> None:
        """Record whether the token accepted after a drafted row was among that row's choices."""
        self._unproposed_share = _TOKEN_DECAY * self._unproposed_share + (1 - _TOKEN_DECAY) * (not was_proposed)
        if self._unproposed_share > _MANY_UNPROPOSED:
            self.children = CHILDREN[-1]
        elif self._unproposed_share < _FEW_UNPROPOSED:
            self.children = CHILDREN[0]

    def record_accepted(self, num_tokens: int) -> None:
        """Record the number of tokens that a verdict accepted."""
        self._tokens += num_tokens

    def record_timestep(self, timing: TimestepTiming) -> None:
        """Record the timing of a timestep of the full pipeline. At the end of an epoch the number of forwards is adjusted."""
        tokens, self._tokens = self._tokens, 0
        is_prefill, self._draft_prefills = self._draft_prefills, False
        is_prefill |= any(entered.prompt_rows for entered in self._in_flight)
        if timing.waiting_seconds > _NEGLIGIBLE * timing.seconds or self.forwards == 1 or not timing.forward_seconds:
            rows = max((entered.rows for entered in self._in_flight), default=0)
            if 2 * sum(entered.rows > 0 for entered in self._in_flight) >= self._passage:  # else slower stages may be idle
                self._costs.record(rows, timing.seconds)
            if self._fewest is None or rows < self._fewest[0]:
                self._fewest = rows, timing.seconds
            elif rows == self._fewest[0]:
                self._fewest = rows, 0.85 * self._fewest[1] + 0.15 * timing.seconds
        running = self._in_flight[-1].running if self._in_flight else 0
        if running:
            self._yield += _YIELD_WEIGHT * (tokens / running - self._yield)
        if running and not is_prefill:
            self._trials.record(timing.seconds, tokens, running, self._best_without())
        self._timings.append(timing)
        if len(self._timings) >= self._epoch:
            self._set_forwards()
            self._timings = []

    def _best_without(self) -> float | None:
        """The shortest expected duration of a timestep without speculation, in seconds."""
        if self._fewest is None:
            return None
        rows, seconds = self._fewest
        return seconds * (0.9 if rows <= 2 else _BEST_SHARE)

    def _set_forwards(self) -> None:
        drafted = [timing for timing in self._timings if len(timing.forward_seconds) >= self.forwards]
        if not drafted:
            return  # there were too few rows to draft
        self._epoch = min(2 * self._epoch, _EPOCH)
        waiting = _median([timing.waiting_seconds for timing in drafted])
        forward = _median([seconds for timing in drafted for seconds in timing.forward_seconds])
        spare = waiting - _NEGLIGIBLE * _median([timing.seconds for timing in drafted])
        if spare > forward:
            self.forwards = min(self.forwards + int(spare / forward), MAX_FORWARDS)
        elif spare < 0:
            self.forwards = max(self.forwards - 1 if self._epoch == _EPOCH else self.forwards // 2, 1)


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]
