"""The ranks' transfers alone, over the process group of a ``TorchTransport``: nothing can be faster."""

from __future__ import annotations

import time

import torch

from pipedec.core.errors import RankLost
from pipedec.transport.torch_distributed import TorchTransport
from pipedec.transport.wire import message_bytes

_VERDICT_VALUES = 4  # about the size of a verdict: number of accepted tokens, their ids, finish reason


def bare_timesteps(transport: TorchTransport, num_rows: int, hidden_size: int, dtype: torch.dtype, timesteps: int) -> list[float]:
    """Pass a step from each rank to the next and broadcast a verdict, ``timesteps`` times; returns this rank's clock (seconds)
    after each broadcast. Raises RankLost if a rank is gone or did not answer in time.

    Every rank except the last sends the bytes of a step of ``num_rows`` rows to the next rank (rank 0 without activations).
    After receiving and sending, a rank joins the broadcast of an int64 tensor from the last rank. There is no other barrier: a
    rank may start to send while others still wait for the broadcast.
    """
    group = transport.all_ranks
    rank, last = group.rank(), group.size() - 1
    outgoing = torch.zeros(message_bytes(num_rows, hidden_size if rank else 0, dtype), dtype=torch.uint8)
    incoming = torch.empty(message_bytes(num_rows, hidden_size if rank > 1 else 0, dtype), dtype=torch.uint8)
    verdict = torch.zeros(_VERDICT_VALUES, dtype=torch.int64)
    clock = []
    try:
        for _ in range(timesteps):
            transfers = [group.recv([incoming], rank - 1, 0)] if rank > 0 else []
            transfers += [group.send([outgoing], rank + 1, 0)] if rank < last else []
            for work in transfers:
                work.wait()
            group.broadcast(verdict, last).wait()
            clock.append(time.perf_counter())
    except RuntimeError as error:
        raise RankLost(f"rank {rank} lost its peers while the bare transport was measured: {str(error)[:160]}") from error
    return clock
