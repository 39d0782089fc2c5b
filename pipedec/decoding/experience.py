"""Learned from answers, for the next ones: chances of acceptance by kind of request, costs of timesteps, and earlier texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

from msgspec.structs import asdict, replace

from pipedec.core.request import MethodOptions, TokenizedRequest
from pipedec.core.sampling import SamplingParams
from pipedec.decoding.controller import Controller
from pipedec.decoding.learned import GREEDY, NOTHING_LEARNED, LearnedAcceptance, LearnedCosts, LearnedRates, kind_of
from pipedec.decoding.shared_texts import SharedTexts

_MAX_KEPT = 64  # entries of each kind
_Key = tuple[SamplingParams, MethodOptions | None, str | None, bool, str]


@runtime_checkable
class KeptStatistics(Protocol):
    """Statistics that outlive a process: ``name`` is their field of ``LearnedRates``."""

    name: str

    @property
    def learned(self) -> Mapping[str, Any]: ...

    def start_from(self, learned: Any) -> None: ...


_T = TypeVar("_T")


class Experience:
    """State learned from answers: the controller, earlier answers, and statistics by all that changes acceptance: sampling
    parameters, method options, dialect, and whether answers are structured or draw on earlier ones. ``expected_ms`` as of
    ``RowCosts``.
    """

    def __init__(
        self, passage: int, prior: LearnedAcceptance = NOTHING_LEARNED, costs: LearnedCosts | None = None,
        expected_ms: Sequence[float] = (),
    ) -> None:  # fmt: skip
        self.controller = Controller(passage, expected_ms)  # of all requests
        self.controller.start_from(prior, costs)
        self.shared_texts = SharedTexts()
        self._prior = prior
        self._learned: dict[type, dict[_Key, Any]] = {}

    @property
    def acceptance(self) -> LearnedAcceptance:
        """Statistics of acceptance for another process. Of several requests of one kind, the last one counts."""
        kinds = {kind: {name: dict(one) for name, one in asdict(rates).items()} for kind, rates in self._prior.kinds.items()}
        for known in self._learned.values():
            for (*_, kind), statistics in known.items():
                if isinstance(statistics, KeptStatistics):
                    kinds.setdefault(kind, {}).setdefault(statistics.name, {}).update(statistics.learned)
        return LearnedAcceptance(
            kinds={kind: LearnedRates(**rates) for kind, rates in kinds.items()},
            unproposed_share=self.controller.unproposed_share, proposes_seen=self.controller.proposes_seen,
        )  # fmt: skip

    def learned(self, request: TokenizedRequest, kind: type[_T], *args: Any) -> _T:
        """The statistics of similar requests: for the first of them ``kind(*args)``, which starts from the prior for such
        requests, else from that for greedy ones. The least recently used statistics are dropped.
        """
        sampling = replace(
            request.sampling, seed=None, max_tokens=1, min_tokens=0, stop=(), stop_token_ids=(), logprobs=None, ignore_eos=False,
            structured_outputs=None, include_stop_str_in_output=False, skip_special_tokens=True, shown_special_tokens=(),
        )  # fmt: skip
        key = sampling, request.options, request.threads, request.tenant is not None, kind_of(request)
        known = self._learned.setdefault(kind, {})
        found = known.pop(key, None)
        if found is None:
            found = kind(*args)
            rates = self._prior.kinds.get(kind_of(request), self._prior.kinds.get(GREEDY))
            if rates is not None and isinstance(found, KeptStatistics):
                found.start_from(getattr(rates, found.name))
        known[key] = found
        if len(known) > _MAX_KEPT:
            del known[next(iter(known))]
        return found
