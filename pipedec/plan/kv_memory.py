"""The KV budget: for how many tokens every rank of a pipeline has memory, and how many its requests can use at most.

Plain arithmetic. Asks no device, and does not know which request has which tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil

from pipedec.core.errors import UserError
from pipedec.topology import rank_name
from pipedec.validation import shown_bytes

DEFAULT_BYTES = 2 * 2**30  # per rank, where no device says how much there is
TREE_ROWS = 512  # in flight per timestep of a passage, all requests together
LEAST_TOKENS = 256  # a budget for fewer is a mistake
UNLIMITED = 2**40  # tokens of a rank whose layers keep nothing of a token
CPU_BLOCK = 16  # slots that are handed out together
CUDA_BLOCK = 256  # that flash-attention with block tables needs


@dataclass(frozen=True)
class GpuMemory:
    """The memory of a GPU, in bytes: free of all processes at the moment, and total."""

    free: int
    total: int

    def usable(self, utilization: float) -> int:
        """Bytes that may still be allocated if all processes together may use this share; negative if they use more."""
        return round(self.total * utilization) - (self.total - self.free)


@dataclass(frozen=True)
class RankNeeds:
    """Bytes that one rank allocates on its GPU: weights, states and workspace without the CUDA context; a token in all of its
    layers.
    """

    fixed_bytes: int
    token_bytes: int


def tokens_beside(usable: int, needs: Iterable[RankNeeds]) -> int:
    """The number of tokens, the same for each, for which ranks that share a GPU have memory; negative if their weights do not
    fit.
    """
    needs = list(needs)
    left, token_bytes = usable - sum(one.fixed_bytes for one in needs), sum(one.token_bytes for one in needs)
    return left // token_bytes if token_bytes else -1 if left < 0 else UNLIMITED


@dataclass(frozen=True)
class RankBudget:
    """Bytes that one rank may use for keys and values, and those of one token in all of its layers: 0 if no layer attends."""

    rank: int
    num_bytes: int
    token_bytes: int

    @property
    def tokens(self) -> int:
        return max(0, self.num_bytes) // self.token_bytes if self.token_bytes else UNLIMITED


@dataclass(frozen=True)
class KVBudget:
    """The budget of a pipeline."""

    ranks: Sequence[RankBudget]  # those that have KV caches: the stages, and rank 0 if it has a draft model
    context: int  # the most tokens of a request: its prompt and its answer
    max_num_seqs: int
    passage: int  # timesteps from a row's entry to its verdict
    block: int = CPU_BLOCK

    @property
    def scarcest(self) -> RankBudget:
        """The rank that has memory for the fewest tokens."""
        return min(self.ranks, key=lambda rank: rank.tokens)

    @property
    def usable(self) -> int:
        """The most tokens that requests can use: a whole context each, and their rows in flight."""
        in_flight = self._whole_blocks(TREE_ROWS * (self.passage + 1))
        return self.max_num_seqs * self._whole_blocks(self.context + self.block) + in_flight

    @property
    def tokens(self) -> int:
        """The slots of every rank's pool, in whole blocks."""
        return min(self.usable, self.scarcest.tokens) // self.block * self.block

    def requests(self, tokens: int) -> int:
        """How many requests of ``tokens`` tokens fit at the same time, each with one row in flight per timestep."""
        return self.tokens // self._whole_blocks(tokens + self.passage)

    def needed(self, max_model_len: int | None, rows: int) -> int:
        """The fewest tokens, in whole blocks, with which a pipeline can work. Arguments as of ``check``."""
        return self._whole_blocks(LEAST_TOKENS if max_model_len is None else max_model_len + rows)

    def check(self, max_model_len: int | None, rows: int) -> None:
        """Raise UserError if one request of ``max_model_len`` (the configured limit, if any) does not fit, or not even a few
        hundred tokens do. ``rows``: that enter at once.
        """
        needed, scarcest = self.needed(max_model_len, rows), self.scarcest
        if scarcest.tokens // self.block * self.block >= needed:
            return
        what = "a few hundred tokens need" if max_model_len is None else f"one request of {max_model_len:,} tokens needs"
        advice = "" if max_model_len is None else ", or a smaller --max-model-len"
        raise UserError(
            f"{rank_name(scarcest.rank)} has {shown_bytes(scarcest.num_bytes)} for keys and values, {scarcest.tokens:,} tokens "
            f"of {scarcest.token_bytes:,} bytes, but {what} {shown_bytes(needed * scarcest.token_bytes)}: "
            f"give a larger --kv-cache-memory{advice}"
        )

    def _whole_blocks(self, slots: int) -> int:
        return ceil(slots / self.block) * self.block
