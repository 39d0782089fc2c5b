"""Which token each slot of a KV pool holds. A request that adopts a prefix never says its tokens again, but penalties count them.

Knows slots and token ids; knows no request and no model.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class SlotTokens:
    """The token ids of prompts and of accepted tokens, by slot of the pool; on the host.

    Args:
        slots: of the pool.
    """

    def __init__(self, slots: int) -> None:
        self._token_ids = torch.zeros(slots, dtype=torch.int64)

    def read(self, slots: Iterable[range]) -> Tensor:
        """int64 [R], the tokens in ``slots``."""
        return torch.cat([self._token_ids[run.start : run.stop] for run in slots])

    def write(self, slots: Iterable[range], token_ids: Tensor) -> None:
        """Put ``token_ids``, int64 [R], into ``slots``."""
        first = 0
        for run in slots:
            self._token_ids[run.start : run.stop] = token_ids[first : first + len(run)]
            first += len(run)
