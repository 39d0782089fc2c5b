"""Tries whether speculation pays: compares measured tokens per second with and without it.

Estimates of a row's cost miss indirect costs, for example if stages and draft model share a processor. So now and then the
other way is tried, for a short time: soon after the start, then at growing intervals, so that the trials cost little. Knows
neither rows nor requests.
"""

from __future__ import annotations

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
    """Holds whether to speculate at the next timestep.

    Args:
        passage: timesteps that a row takes to pass through the pipeline.
    """

    def __init__(self, passage: int) -> None:
        self.is_speculating = True
        self._passage = passage
        self._speculates = True  # outside trials
        self._interval = float(_FIRST)
        self._rates: dict[bool, float] = {}  # tokens per second and running request, with and without speculation
        self._begin(max(passage, _WARM_UP))

    def _begin(self, unsettled: int) -> None:
        """Measure from now on, without the timesteps that are still affected by the former way."""
        self._unsettled = unsettled
        self._waited = 0.0  # tokens before the measured ones, by request
        self._tokens = 0
        self._timesteps = 0
        self._seconds = 0.0
        self._shares = 0.0  # seconds, each times the number of running requests

    @property
    def _is_trial(self) -> bool:
        return self.is_speculating is not self._speculates

    def record(self, seconds: float, tokens: int, running: int, best_without: float | None) -> None:
        """Record a timestep in which ``running`` requests were decoded and nothing else was computed.

        Args:
            tokens: that its verdicts accepted.
            best_without: the shortest expected duration of a timestep without speculation; None if unknown.
        """
        if self._unsettled:
            self._unsettled -= 1
            return
        if not self._is_trial and self._waited < self._interval - _WINDOW:
            self._waited += tokens / max(running, 1)
            return
        self._tokens += tokens
        self._timesteps += 1
        self._seconds += seconds
        self._shares += seconds * running
        by_request = self._tokens / max(running, 1)
        if self._is_trial and self._trial_is_over(by_request):
            self._judge()
        elif not self._is_trial and by_request >= min(self._interval, _WINDOW):
            self._rates[self.is_speculating] = self._rate()
            self._try_or_go_on(best_without)

    def _trial_is_over(self, tokens_by_request: float) -> bool:
        return tokens_by_request >= _TRIAL_TOKENS if self.is_speculating else self._timesteps >= _TRIAL_TIMESTEPS

    def _rate(self) -> float:
        """Tokens per second and running request since ``_begin``."""
        if self.is_speculating:
            return self._tokens / max(self._shares, 1e-9)
        return self._timesteps / (self._passage * max(self._seconds, 1e-9))

    def _may_pay(self, best_without: float | None) -> bool:
        """Whether a trial may show that the other way is better."""
        if not self._speculates or best_without is None:
            return True
        return 1 / (self._passage * best_without) > self._rates[True]

    def _try_or_go_on(self, best_without: float | None) -> None:
        if self._may_pay(best_without):
            self.is_speculating = not self._speculates
            self._begin(self._passage)
        else:
            self._interval = min(self._interval * _GROWTH, _MAX_INTERVAL)
            self._begin(0)

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
        self._begin(self._passage)
