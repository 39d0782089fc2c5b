"""A request as it reaches the engine: tokenized."""

from __future__ import annotations

from dataclasses import dataclass

from pipedec.core.records import Record
from pipedec.core.sampling import SamplingParams
from pipedec.core.values import check_fields

DEFAULT_METHOD = "pipedec-bestfirst"


class MethodOptions(Record, frozen=True):
    """The options of one decoding method, which has a class of its own (see ``methods``). Raises BadValue for a wrong value."""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class TokenizedRequest:
    """One prompt to answer, already tokenized.

    Attributes:
        number: counts the requests of a run from 0.
        method: a name of the table in ``methods``.
        options: an instance of the method's options class; None for its defaults.
        trace: record every task of every rank.
        threads: the dialect in which the model may open decode threads (``Dialect.to_json``); None for a single thread.
        priority: requests with a lower value are served first.
        output_token_ids: earlier tokens of an answer in one thread, after which it continues.
        tenant: whose earlier answers may be a draft source, and to whose this one is added; None: no one's, and it is not kept.
    """

    number: int
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams = SamplingParams()
    method: str = DEFAULT_METHOD
    options: MethodOptions | None = None
    trace: bool = False
    threads: str | None = None
    priority: int = 0
    output_token_ids: tuple[int, ...] = ()
    tenant: str | None = None
