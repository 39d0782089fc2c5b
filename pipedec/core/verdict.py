"""The result of verification."""

from __future__ import annotations

from typing import Annotated, NamedTuple

from msgspec import Meta

from pipedec.core.records import Int64, Record


class Accepted(NamedTuple):
    """The tokens of one decode thread that a verdict accepts.

    Attributes:
        tokens: accepted token ids, in order.
        forecast: the mask rows' predictions: for each position after the last accepted token, nearest first, the most probable
            tokens, best first. Empty without mask rows.
        surprisals: negative log-probabilities of the tokens of ``forecast``, in ``SURPRISAL_UNIT`` nats, with the noise that
            will choose sampled tokens. Empty if they are unknown.
    """

    thread: Int64
    tokens: tuple[Int64, ...]
    forecast: tuple[tuple[Int64, ...], ...] = ()
    surprisals: tuple[tuple[Int64, ...], ...] = ()


SURPRISAL_UNIT = 1 / 256
MAX_SURPRISAL = 2**13  # for a token that cannot be chosen, or whose logit is no number
FinishReason = Annotated[str, Meta(pattern=r"^(stop|length|cancelled|cache_full|paused|corrupted|failed)\Z")]


class Verdict(Record, frozen=True):
    """The result of verification: the accepted tokens of each decode thread. An answer in one thread is thread 0.

    Attributes:
        accepted: in the order of verification; each thread at most once.
        finished: why the answer ended: ``"stop"`` (end token or stop string), ``"length"`` (max_tokens), ``"cancelled"`` or, for
            an answer in several threads, ``"cache_full"``; None while it continues. ``"paused"`` closes the request's lanes like
            the others, but the answer continues later, in new lanes. ``"corrupted"``: a stage has computed NaN or infinity.
            ``"failed"``: something else has gone wrong in a rank while it worked for the request.
        failure: what has gone wrong and where, of an answer that is corrupted or has failed.
    """

    accepted: tuple[Accepted, ...] = ()
    finished: FinishReason | None = None
    failure: str | None = None

    @classmethod
    def of(cls, *tokens: int, finished: FinishReason | None = None, forecast: tuple[tuple[int, ...], ...] = ()) -> Verdict:
        """The verdict that accepts ``tokens`` in the main thread."""
        return cls((Accepted(0, tokens, forecast),) if tokens else (), finished)

    @property
    def tokens(self) -> tuple[int, ...]:
        """All accepted token ids, thread after thread."""
        if len(self.accepted) == 1:
            return self.accepted[0].tokens
        return tuple(token for part in self.accepted for token in part.tokens)
