"""Controls speculation: children per row and draft forwards per timestep, and whether to speculate at all.

One controller serves all requests. It measures while answers are decoded, and keeps the results for later answers. Limits that a
request sets itself are not tuned. Knows no tokens, trees or processes.

- *Rows*: one more enters only if it raises the tokens of a timestep by a greater share than the time (see ``pays``). Where each
  row costs time, with routed experts, as many enter at a timestep as pay in the mean of timesteps.
- *Forwards*: as many as fit into the time that rank 0 would otherwise wait for the stages; one fewer, at first half as many, when
  it hardly waits, as the pipeline then waits for the draft model.
- *Children*: more of them, from the next answer on, while many accepted tokens were not proposed by any draft source.
- *Passage*: more timesteps in flight than there are groups while that pays (see ``passage``).
- *Off*: if speculation does not pay (see ``Trials``), only accepted tokens enter, and nothing is drafted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median_high

from pipedec.core.limits import MAX_FORWARDS
from pipedec.decoding.learned import LearnedAcceptance, LearnedCosts
from pipedec.decoding.passage import Passages
from pipedec.decoding.row_costs import OfferedRows, RowCosts

_FIRST = 16  # tokens before the first trial
_WARM_UP = 8  # timesteps before measurements begin: at first, more rows enter than will pay
_TRIAL_TOKENS = 12  # of a trial of speculation, by request
_WINDOW = 48  # tokens before a trial to compare it with, by request: timesteps drift
_TRIAL_TIMESTEPS = 6  # of a trial without it, in which every request yields a token per passage
_MAX_COST = 0.02  # share of the time that trials may cost
_MAX_INTERVAL = 1024  # tokens between trials
_GROWTH = 2.0
_BETTER = 1.02  # factor by which the other way must be better


class Trials:
    """Decides whether to speculate in a pipeline of ``passage`` timesteps, by measured tokens per second with and without.

    Estimates of a row's cost miss indirect costs, for example if stages and draft model share a processor. So now and then the
    other way is tried for a short time: soon after the start, then at growing intervals, so that the trials cost little.
    """

    def __init__(self, passage: int) -> None:
        self.is_speculating = True  # whether to speculate at the next timestep
        self.passage = passage
        self._speculates = True  # outside trials
        self._interval = float(_FIRST)
        self._rates: dict[bool, float] = {}  # tokens per second and running request, with and without speculation
        self._begin(max(passage, _WARM_UP))

    @property
    def speculates(self) -> bool:
        """Whether to speculate outside trials."""
        return self._speculates

    @property
    def interval(self) -> float:
        """Tokens between trials, by request."""
        return self._interval

    @property
    def is_trial(self) -> bool:
        """Whether the other way is being tried."""
        return self.is_speculating is not self._speculates

    def start_from(self, speculates: bool, interval: float = _FIRST) -> None:
        """Begin with the decision of an earlier process; not to speculate is soon tried again."""
        self.is_speculating = self._speculates = speculates
        self._interval = min(interval, _MAX_INTERVAL) if speculates else float(_FIRST)

    def _begin(self, unsettled: int) -> None:
        """Measure from now on, without the timesteps that are still affected by the former way."""
        self._unsettled = unsettled
        self._waited = 0.0  # tokens before the measured ones, by request
        self._tokens = 0
        self._timesteps = 0
        self._seconds = 0.0
        self._shares = 0.0  # seconds, each times the number of running requests

    def record(self, seconds: float, tokens: int, running: int, best_without: float | None) -> None:
        """Record a timestep of ``seconds`` whose verdicts accepted ``tokens`` of ``running`` requests, with no prompt in it.

        Args:
            best_without: the fewest seconds that a timestep without speculation can be expected to take; None if unknown.
        """
        if self._unsettled:
            self._unsettled -= 1
            return
        if not self.is_trial and self._waited < self._interval - _WINDOW:
            self._waited += tokens / max(running, 1)
            return
        self._tokens += tokens
        self._timesteps += 1
        self._seconds += seconds
        self._shares += seconds * running
        by_request = self._tokens / max(running, 1)
        if self.is_trial:
            if by_request >= _TRIAL_TOKENS if self.is_speculating else self._timesteps >= _TRIAL_TIMESTEPS:
                self._judge()
        elif by_request >= min(self._interval, _WINDOW):
            self._rates[self.is_speculating] = self._rate()
            if not self._speculates or best_without is None or 1 / (self.passage * best_without) > self._rates[True]:
                self.is_speculating = not self._speculates  # a trial may show that the other way is better
                self._begin(self.passage)
            else:
                self._interval = min(self._interval * _GROWTH, _MAX_INTERVAL)
                self._begin(0)

    def _rate(self) -> float:
        """Tokens per second and running request since ``_begin``."""
        if self.is_speculating:
            return self._tokens / max(self._shares, 1e-9)
        return self._timesteps / (self.passage * max(self._seconds, 1e-9))

    def _judge(self) -> None:
        """End a trial: stay with the better way."""
        tried, before = self._rate(), self._rates[self._speculates]
        if tried > _BETTER * before:
            self._speculates = self.is_speculating
            self._interval = float(_FIRST)
        else:
            lost = _TRIAL_TOKENS * max(before / max(tried, 1e-9) - 1, 0.0) / _MAX_COST
            self._interval = min(max(self._interval * _GROWTH, lost), _MAX_INTERVAL)
        self.is_speculating = self._speculates
        self._begin(self.passage)


_LEAST_SHARE = 0.5  # of the time of a first row: rows that follow it may slow it down


class FirstRow:
    """Measures rows that pass alone through a pipeline of ``passage`` timesteps, as all tokens do without speculation."""

    def __init__(self, passage: int) -> None:
        self.least_seconds: float | None = None  # a low estimate of a timestep without speculation; None before the first row
        self.passage = passage
        self._seconds: list[float] | None = None  # of the timesteps since the row entered; None if there is none

    def record(self, seconds: float, has_rows: Sequence[bool]) -> None:
        """Record a timestep, and whether rows entered at each of the last ``passage`` ones, the present one last.

        ``has_rows`` is empty while a prompt is on its way: nothing is measured.
        """
        if not has_rows:
            self._seconds = None
        elif has_rows[-1] and not any(has_rows[:-1]):
            self._seconds = []
        if self._seconds is None:
            return
        self._seconds.append(seconds)
        if len(self._seconds) == self.passage:
            self.least_seconds = _LEAST_SHARE * sum(self._seconds) / self.passage
            self._seconds = None


CHILDREN = (16, 32)
_INITIAL_FORWARDS = 2
_EPOCH = 16  # timesteps between decisions on forwards; the first one comes after one, the next after 2 more, 4, 8
_YIELD_WEIGHT = 0.01  # of a timestep in the moving average of tokens per timestep
_TOKEN_DECAY = 0.98  # weight of the past in moving averages over tokens
_NEGLIGIBLE = 0.05  # share of a timestep
_MANY_UNPROPOSED, _FEW_UNPROPOSED = 0.08, 0.04  # shares of accepted tokens


@dataclass(frozen=True)
class TimestepTiming:
    """How long one timestep of the full pipeline took, as measured on rank 0."""

    seconds: float  # duration of the timestep
    waiting_seconds: float  # how much of it rank 0 was idle, waiting for the stages
    forward_seconds: tuple[float, ...]  # duration of each draft forward


@dataclass(frozen=True)
class EnteredCounts:
    """The rows that entered at a timestep."""

    rows: int = 0  # of all requests
    prompt_rows: int = 0  # those of prompts
    running: int = 0  # number of requests whose prompts have entered
    fills: bool = False  # whether rows will enter at every timestep, so that a longer passage may pay


class Controller:
    """Owns ``forwards`` and ``passage`` for the next timestep and ``children`` for the next answer.

    Args:
        passage: timesteps from a row's entry to its verdict, at least.
        expected_ms: as of ``RowCosts``.
    """

    def __init__(self, passage: int, expected_ms: Sequence[float] = ()) -> None:
        self.forwards = _INITIAL_FORWARDS
        self.children = CHILDREN[0]
        self.proposes_seen = False  # whether tokens are proposed only because they occur in the text
        self.passage = passage
        self._passages = Passages(passage)
        self._offered = OfferedRows() if expected_ms else None
        self._expected_ms = expected_ms
        self._costs = RowCosts(expected_ms)
        self._costs_at = {passage: self._costs}  # by passage
        self._forwards_at: dict[int, int] = {}  # by passage
        self._learned_passage: int | None = None
        self._trials = Trials(passage)
        self.unproposed_share = 0.0  # of accepted tokens after drafted rows, a moving average
        self._yield = 1.0  # tokens per timestep and running request
        self._first_row = FirstRow(passage)
        self._epoch = 1
        self._in_flight: deque[EnteredCounts] = deque(maxlen=passage)
        self._recent: deque[TimestepTiming] = deque(maxlen=passage)
        self._timings: list[TimestepTiming] = []  # of the present epoch
        self._tokens = self._misses = 0  # accepted since the last timing; after how many of them nothing was in flight
        self.drafts_prompts = False  # in this timestep, which is then no measure of speculation

    @property
    def is_speculating(self) -> bool:
        return self._trials.is_speculating

    @property
    def costs(self) -> LearnedCosts:
        """Its measurements of timesteps, for another process."""
        return LearnedCosts(
            rows=self._costs.learned, forwards=self.forwards, tokens=self._yield,
            speculates=self._trials.speculates, interval=self._trials.interval, passage=self._passages.best,
        )  # fmt: skip

    def start_from(self, acceptance: LearnedAcceptance, costs: LearnedCosts | None) -> None:
        """Begin with what an earlier process has learned."""
        self.unproposed_share = min(acceptance.unproposed_share, _MANY_UNPROPOSED)  # so that it soon falls if it is wrong
        self.proposes_seen = acceptance.proposes_seen
        self.children = CHILDREN[-1 if acceptance.proposes_seen else 0]
        if costs is not None:
            self._costs.start_from(costs.rows)
            self._yield = costs.tokens
            self.forwards = min(costs.forwards, MAX_FORWARDS)
            self._trials.start_from(costs.speculates, costs.interval)
            self._learned_passage = costs.passage

    @property
    def full_passage(self) -> int:
        """The passage of requests that keep the pipeline full."""
        return self._passages.length

    def fill_links(self, latency: float) -> None:
        """From now on let as many timesteps be in flight as pay on links of ``latency`` seconds altogether, around the ring."""
        self._passages.fill(latency, self._learned_passage)

    def _set_passage(self, passage: int) -> None:
        self._forwards_at[self.passage] = self.forwards
        self.forwards, self._epoch = self._forwards_at.get(passage, self.forwards), 1
        self.passage = self._trials.passage = self._first_row.passage = passage
        self._in_flight, self._recent = deque(self._in_flight, passage), deque(maxlen=passage)
        if passage not in self._costs_at:
            self._costs_at[passage] = RowCosts(self._expected_ms)
            self._costs_at[passage].start_from(self._costs.learned)
        self._costs = self._costs_at[passage]

    def pays(self, rows: int, tokens: float) -> bool:
        """Whether one more row after ``rows`` is worth its time if each running request may expect ``tokens`` tokens from it.

        Speed is R / t, with R tokens in a timestep of t seconds. One more row of chance c in every timestep brings c more
        tokens and takes dt more seconds, so it must hold that c / R ≥ dt / t. In other words, with chance c the row saves the
        usual time of a token, 1 / R timesteps. With B running requests, each of which needs N timesteps for a token, that is c
        · N / B.

        A row that enters later than the row above it does not lose a whole passage: the rows below it are drafted by then and
        enter with it (docs/benchmarks.md, "What a row is worth").

        Where each row costs time, rows that do not enter mostly do so at the next timestep. With n + 1 rows at every timestep
        instead of n, those that wait enter 1 + 1 / n times as fast, and each counts with its chance: so c / n ≥ dt / t, too.
        """
        if self._offered is None:
            return tokens / self._yield >= self._costs.added(rows)
        running = max(self._in_flight[-1].running, 1) if self._in_flight else 1
        needed = self._costs.added(rows) * max(self._yield, rows / running)
        pays = self._offered.mean_with(rows, tokens) >= needed
        if not pays:
            self._offered.refuse()
        return pays

    def record_entered(self, entered: EnteredCounts) -> None:
        """Record the rows that enter at the next timestep."""
        passage = self._passages.length if entered.fills and self.is_speculating else self._passages.least
        if passage != self.passage:
            self._set_passage(passage)
        self._in_flight.append(entered)
        if self._offered is not None and entered.running and self.is_speculating and not entered.prompt_rows:
            self._offered.settle(1 / entered.running, entered.rows)

    def record_proposed(self, was_proposed: bool) -> None:
        """Record whether the token accepted after a drafted row was among that row's choices."""
        self.unproposed_share = _TOKEN_DECAY * self.unproposed_share + (1 - _TOKEN_DECAY) * (not was_proposed)
        if self.unproposed_share > _MANY_UNPROPOSED:
            self.children, self.proposes_seen = CHILDREN[-1], True
        elif self.unproposed_share < _FEW_UNPROPOSED:
            self.children, self.proposes_seen = CHILDREN[0], False

    def record_accepted(self, num_tokens: int, is_hit: bool) -> None:
        """Record the number of tokens that a verdict accepted, and whether the last of them had entered."""
        self._tokens += num_tokens
        self._misses += not is_hit

    def record_timestep(self, timing: TimestepTiming) -> None:
        """Record the timing of a timestep of the full pipeline. At the end of an epoch the number of forwards is adjusted."""
        tokens, misses, self._tokens, self._misses = self._tokens, self._misses, 0, 0
        is_prefill, self.drafts_prompts = self.drafts_prompts, False
        has_prompt = any(entered.prompt_rows for entered in self._in_flight)
        is_prefill |= has_prompt
        seconds = timing.seconds
        self._first_row.record(seconds, [] if has_prompt else [entered.rows > 0 for entered in self._in_flight])
        # While the pipeline fills, rank 0 waits for no rows, and its timesteps are shorter than those of the stages.
        is_full = len(self._in_flight) == self.passage and self._in_flight[0].rows > 0
        counts = True
        if self.passage > self._passages.least:
            timing = self._smoothed(timing, is_full and not is_prefill)
            counts = is_full = len(self._recent) == self.passage
        is_waiting = timing.waiting_seconds > _NEGLIGIBLE * timing.seconds
        if is_full and (is_waiting or self.forwards == 1 or not timing.forward_seconds):
            rows = [entered.rows for entered in self._in_flight] or [0]
            is_even = self._offered is None or 2 * min(rows) >= max(rows)  # else slower stages may have few of many costly rows
            if is_even and 2 * sum(count > 0 for count in rows) >= self.passage:  # else slower stages may be idle
                self._costs.record(max(rows), timing.seconds)
        running = self._in_flight[-1].running if self._in_flight else 0
        if running:
            self._yield += _YIELD_WEIGHT * (tokens / running - self._yield)
        if running and not is_prefill and not self._passages.is_trying:
            self._trials.record(seconds, tokens, running, self._first_row.least_seconds)
        if running:
            measures = not is_prefill and not self._trials.is_trial and self.passage == self._passages.length
            self._passages.record(seconds, tokens, misses, running, measures)
        if counts:
            self._timings.append(timing)
        if len(self._timings) >= self._epoch:
            self._set_forwards()
            self._timings = []

    def _smoothed(self, timing: TimestepTiming, is_full: bool) -> TimestepTiming:
        """The mean of the last timesteps in which the pipeline was full: if some are on links, they come back in bursts."""
        if is_full:
            self._recent.append(timing)
        else:
            self._recent.clear()
        recent = self._recent or [timing]
        seconds, waiting = fmean(one.seconds for one in recent), fmean(one.waiting_seconds for one in recent)
        return TimestepTiming(seconds, waiting, timing.forward_seconds)

    def _set_forwards(self) -> None:
        drafted = [timing for timing in self._timings if len(timing.forward_seconds) >= self.forwards]
        if not drafted:
            return  # there were too few rows to draft
        self._epoch = min(2 * self._epoch, _EPOCH)
        waiting = median_high(timing.waiting_seconds for timing in drafted)
        forward = median_high(seconds for timing in drafted for seconds in timing.forward_seconds)
        spare = waiting - _NEGLIGIBLE * median_high(timing.seconds for timing in drafted)
        if spare > forward:
            self.forwards = min(self.forwards + int(spare / forward), MAX_FORWARDS)
        elif spare < 0:
            self.forwards = max(self.forwards - 1 if self._epoch == _EPOCH else self.forwards // 2, 1)
