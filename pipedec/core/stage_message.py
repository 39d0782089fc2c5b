"""The message that one rank sends to the next in a timestep."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

from msgspec import field as struct_field

from pipedec.core.records import Int64, Record
from pipedec.core.sampling import SamplingParams
from pipedec.core.verdict import Verdict

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

NUM_ROW_IDS = 3  # what travels of each row: token id, parent, thread
ROW_ID_BYTES = 8 * NUM_ROW_IDS  # as int64


@dataclass(frozen=True)
class MaskParams:
    """The mask rows of a method (BiTA): ``count`` per group, each of which proposes ``named`` tokens."""

    count: int = 0
    named: int = 0


NO_MASKS = MaskParams()


class Step:
    """The rows that enter a stage at one timestep (PipeDec's data flow df).

    Token ids, parents and threads are on the host; only activations are on a device. No dataclass, so that msgspec does not take
    its tensors for fields of JSON: rows travel beside it.

    Attributes:
        token_ids: int64 [R]. The m-th mask row of a group has the id −m; mask rows come after all other rows.
        parents: int64 [R], indices into the receiving rank's PredictionTree (whose rows are in order of entry), −1 for
            a root. The parent may be in the same step: its rows are numbered after the receiver's present rows.
        hidden: [R, E] activations of the previous stage; None on the way into the first stage.
        threads: int64 [R], the decode thread of each row; ``parents`` are indices into that thread's tree. None: thread 0.
        log_probs: [R], of each row's token given its parent; None if the method does not know them. They stay on rank 0.
    """

    def __init__(
        self, token_ids: Tensor, parents: Tensor, hidden: Tensor | None = None, threads: Tensor | None = None,
        log_probs: Sequence[float] | Tensor | None = None,
    ) -> None:  # fmt: skip
        self.token_ids, self.parents, self.hidden = token_ids, parents, hidden
        self.threads, self.log_probs = threads, log_probs

    @classmethod
    def concatenated(cls, steps: Sequence[Step]) -> Step:
        """The rows of at least one step, in order, with threads and without log-probabilities."""
        import torch  # clients do without it

        token_ids, parents = torch.cat([step.token_ids for step in steps]), torch.cat([step.parents for step in steps])
        threads = [torch.zeros_like(step.parents) if step.threads is None else step.threads for step in steps]
        hidden = [step.hidden for step in steps if step.hidden is not None]
        return cls(token_ids, parents, torch.cat(hidden) if hidden else None, torch.cat(threads))

    def split(self, counts: list[int]) -> list[Step]:
        """The rows as one step for each count, views of this one; the counts add up to ``num_rows``."""
        if len(counts) == 1:
            return [self]
        columns = (self.token_ids, self.parents, self.hidden, self.threads)
        parts = ([None] * len(counts) if column is None else column.split(counts) for column in columns)
        return [Step(*part) for part in zip(*parts, strict=True)]

    def with_hidden(self, hidden: Tensor) -> Step:
        """The same rows with other activations [R, E]."""
        return Step(self.token_ids, self.parents, hidden, self.threads, self.log_probs)

    @property
    def num_rows(self) -> int:
        return self.token_ids.shape[0]


SlotRuns = tuple[tuple[Int64, Int64], ...]  # slots of a KV pool, in order: (first slot, number of slots), in whole blocks


class NewRequest(Record, frozen=True):
    """Everything that a rank must know about a request before its first rows.

    Attributes:
        prompt_length: tokens of the prompt.
        tokens_per_mask: tokens that each mask row predicts; 0 without masks.
        threads: the dialect (``Dialect.to_json``); None for an answer in one thread.
        trace: record every task.
        output_token_ids: earlier tokens of the answer, after which the request continues. They and the prompt enter first.
        slots: of every stage's KV pool, for the request's rows; ``RequestUpdate.slots`` adds more.
        cached: how many of the tokens that enter first, from the first one on, are in these slots already; never all of them.
        copied: the last ``copied[1]`` of the ``cached`` tokens are in the pool from slot ``copied[0]`` on; each stage copies them
            to the request's own slots when it opens the request. The slots before are shared with other requests.
        snapshot: where the states of recurrent layers after the ``cached`` tokens are; None if there are no such layers, or no
            cached tokens.
        snapshots: those to keep for others: (number of the tokens that enter first, where the states after them are kept).
            Chunks end there.
    """

    prompt_length: Int64
    sampling: SamplingParams
    tokens_per_mask: Int64 = 0
    threads: str | None = None
    trace: bool = False
    output_token_ids: tuple[Int64, ...] = struct_field(default=(), name="said")  # its name in messages between ranks
    slots: SlotRuns = ()
    cached: Int64 = 0
    copied: tuple[Int64, Int64] = (0, 0)
    snapshot: Int64 | None = None
    snapshots: tuple[tuple[Int64, Int64], ...] = ()


TokenLogprobs = tuple[tuple[tuple[Int64, float], ...], ...]  # by token: (token id, log-probability), the chosen one first


class HiddenStates(Record, frozen=True, array_like=True):
    """Hidden states of consecutive tokens after the final norm.

    Attributes:
        dtype: torch's name, such as ``bfloat16``.
        rows: of each token E numbers, little-endian.
    """

    dtype: str
    rows: tuple[bytes, ...]


class Load(NamedTuple):
    """The work of one forward.

    Attributes:
        rows: of all requests.
        past: KV cache entries that its rows attend to, summed over the requests that have rows.
    """

    rows: int = 0
    past: int = 0


NO_LOAD = Load()


class RequestUpdate(Record, frozen=True, array_like=True):
    """The changes to one request at a timestep, in order: its opening, a verdict to replay, rows to compute. Each is optional.

    Attributes:
        opening: the request begins, or continues after a pause: every rank opens a lane for it.
        verdict: accepted tokens. With ``finished`` every rank drops the request's lane, and its rows in flight.
        step: a chunk of the prompt (and of the answer's earlier tokens) until all has entered, then rows of the answer's trees.
        logprobs: from the last stage, with a verdict: log-probabilities of the accepted tokens, if requested.
        prompt_logprobs: from the last stage, while the prompt enters: the same for its next tokens, from the second on.
        slots: of every stage's KV pool, in addition to those that the request has. They are assigned before the rows.
        failure: what has gone wrong in a stage that has dropped the request's lane. Later ones pass it on to rank 0.
        hidden_states: from the last stage, while the prompt enters: those of its next tokens, if requested.
    """

    number: Int64
    opening: NewRequest | None = None
    verdict: Verdict | None = None
    step: Step | None = None
    logprobs: TokenLogprobs = ()
    slots: SlotRuns = ()
    prompt_logprobs: TokenLogprobs = ()
    failure: str | None = None
    hidden_states: HiddenStates | None = None


class Arrival(Protocol):
    """Activations on their way."""

    def wait(self) -> None:
        """As ``StageMessage.await_hidden``."""


@dataclass(frozen=True)
class StageMessage:
    """A message from one rank to the next at a timestep: at most one update for each request.

    A message without updates only signals that the timestep has reached this rank. Activations may still be on their way when
    everything else has been received, so that verdicts are replayed meanwhile.

    Attributes:
        ends_session: no timestep follows until the scheduler grants the next session.
        arrival: of the activations, if they may still be on their way.
        tensors: small ones by name, which travel in host memory beside the activations.
    """

    updates: tuple[RequestUpdate, ...] = ()
    ends_session: bool = False
    arrival: Arrival | None = field(default=None, compare=False, repr=False)
    tensors: Mapping[str, Tensor] = field(default_factory=dict, compare=False)

    def await_hidden(self) -> None:
        """Call this before activations are used, on the host or by work queued on the device; a second call has no effect. Raises
        RankLost if they cannot arrive any more.
        """
        if self.arrival is not None:
            self.arrival.wait()

    @property
    def num_rows(self) -> int:
        return sum(update.step.num_rows for update in self.updates if update.step is not None)


EMPTY = StageMessage()
