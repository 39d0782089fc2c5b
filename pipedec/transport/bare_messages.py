"""The traffic of a timestep without anything else: what the transport itself costs, as a floor to compare with.

Knows message sizes; knows neither tasks nor the scheduler. It runs in the process group of a ``TorchTransport`` that is
not otherwise in use, so that both measurements go over the same sockets.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from pipedec.core import RankLost
from pipedec.transport.base import message_bytes

_VERDICT_VALUES = 4  # number of accepted tokens, their ids, why it ended: a small tensor


def raw_timesteps(num_rows: int, hidden_size: int, dtype: torch.dtype, timesteps: int) -> list[float]:
    """Shift a step by one rank and broadcast a verdict, ``timesteps`` times.

    Every rank but the last sends the bytes of a step of ``num_rows`` rows to the next one (rank 0 without activations);
    when a rank has received and sent, it takes part in the broadcast of an int64 tensor from the last rank. There is no other
    barrier: a rank may begin to send while others still wait for the verdict.

    Returns:
        The clock (seconds) of this rank after every broadcast.

    Raises:
        RankLost: a rank is gone or did not answer in time.
    """
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    outgoing = torch.zeros(message_bytes(num_rows, hidden_size if rank else 0, dtype), dtype=torch.uint8)
    incoming = torch.empty(message_bytes(num_rows, hidden_size if rank > 1 else 0, dtype), dtype=torch.uint8)
    verdict = torch.zeros(_VERDICT_VALUES, dtype=torch.int64)
    clock = []
    try:
        for _ in range(timesteps):
            under_way = [dist.irecv(incoming, rank - 1)] if rank > 0 else []
            under_way += [dist.isend(outgoing, rank + 1)] if rank < last else []
            for work in under_way:
                if work is not None:
                    work.wait()
            dist.broadcast(verdict, src=last)
            clock.append(time.perf_counter())
    except RuntimeError as error:
        raise RankLost(f"rank {rank} lost its peers while the bare transport was measured: {str(error)[:160]}") from error
    return clock
