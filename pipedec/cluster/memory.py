"""On how many slots of KV memory the ranks of a run agree: each asks its GPU before any of them loads, and the scarcest decides.

The number is the run's: a rank that is replaced takes it from there, as those that are left have pools of that size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from pipedec.engine.devices import FREED_SECONDS, FreeMemory, free_memory, gpu_id, measured_tokens
from pipedec.plan.spec import PipelineSpec
from pipedec.topology import rank_name


class RankMemory:
    """The memory of one rank's device, until its weights are loaded.

    Args:
        host: where it is.
        free: asks a GPU for its memory.

    Attributes:
        gpu: identifies the GPU on which it is about to load; empty on a processor, and once it has loaded.
    """

    def __init__(
        self, spec: PipelineSpec, rank: int, host: str, device: torch.device, gpu: str | None = None,
        free: FreeMemory = free_memory, patience_seconds: float = FREED_SECONDS,
    ) -> None:  # fmt: skip
        self.gpu = gpu_id(device) if gpu is None else gpu
        self._spec, self._rank, self._host, self._device = spec, rank, host, device
        self._free, self._patience_seconds = free, patience_seconds

    def loaded(self) -> None:
        """From now on its memory is taken."""
        self.gpu = ""

    def kv_bytes(self, ranks: Sequence[int], slots: int) -> int | None:
        """Memory left for keys and values; None if their number does not depend on it.

        Args:
            ranks: that are about to load on the same GPU, this one included.
            slots: on which the run has agreed in an earlier epoch; 0 if it has not.

        Raises:
            UserError: its GPU has too little memory for them, or for their weights.
        """
        if not self.gpu:
            return None
        spec = self._spec
        settled = slots or (None if spec.measures_memory else spec.kv_slots)
        who = f"{' and '.join(map(rank_name, ranks))} on {self._host}"
        tokens = measured_tokens(spec, ranks, self._device, who, settled, self._free, self._patience_seconds)
        return None if settled else tokens * spec.needs(self._rank).token_bytes

    def agreed_slots(self, kv_bytes: Mapping[int, int], slots: int) -> int | None:
        """Slots of every rank's KV pool; None if that follows from the settings. The same on every rank.

        Args:
            kv_bytes: of the ranks that have measured them.
            slots: see ``kv_bytes``.

        Raises:
            UserError: a rank has too little.
        """
        if slots or not kv_bytes:
            return slots or None
        return self._spec.agreed_budget(kv_bytes).tokens
