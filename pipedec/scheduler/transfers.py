"""The transfers between two timesteps, and the order in which each rank takes part in them.

Within a group a step is passed on inside the timestep; between two timesteps each group's last stage sends to the next group's
first one, rank 0 to stage 1, and the last stage its result to rank 0. Redis grants the order (``lua/grant.lua``, by the same
rule); a rank checks its grant. Pure functions: nothing here sends anything.
"""

from __future__ import annotations

from itertools import combinations
from typing import Any, NamedTuple

from pipedec.core import PipedecError
from pipedec.topology import Topology, rank_name

DUPLEXES = ("half", "full")


class PlannedTransfer(NamedTuple):
    """A message from rank ``source`` to rank ``target`` between two timesteps."""

    source: int
    target: int

    def __str__(self) -> str:
        return f"{self.source}>{self.target}"


Phase = tuple[PlannedTransfer, ...]  # transfers that may run at the same time


def transfers_between_timesteps(topology: Topology) -> list[PlannedTransfer]:
    """All transfers: the last stage's result, on which rank 0's next message depends, then from the last group to the first."""
    ends = [0, *topology.exit_ranks]
    forward = [PlannedTransfer(source, target) for source, target in zip(ends[:-1], topology.entry_ranks, strict=True)]
    return [PlannedTransfer(topology.final_rank, 0), *reversed(forward)]


def transfer_phases(topology: Topology, duplex: str) -> list[Phase]:
    """Put every transfer into the first phase in which its two ranks are free.

    Args:
        duplex: ``half``: a rank takes part in one transfer at a time (Algorithm 2); ``full``: in one that it sends and one that
            it receives.
    """
    phases, pending = [], transfers_between_timesteps(topology)
    while pending:
        phase: list[PlannedTransfer] = []
        for transfer in pending:
            if not any(_conflict(transfer, other, duplex) for other in phase):
                phase.append(transfer)
        phases.append(tuple(phase))
        pending = [transfer for transfer in pending if transfer not in phase]
    return phases


def transfers_of(rank: int, topology: Topology, duplex: str) -> tuple[Phase, ...]:
    """The rank's own transfers, phase by phase, without the phases in which it has none."""
    own = (tuple(transfer for transfer in phase if rank in transfer) for phase in transfer_phases(topology, duplex))
    return tuple(phase for phase in own if phase)


def checked_transfers(granted: Any, rank: int, topology: Topology, duplex: str) -> tuple[Phase, ...]:
    """The order of transfers that a window task grants to ``rank``.

    Args:
        granted: ``transfers`` in the task's payload, as it was received.
        duplex: of the links, as the rank knows it.

    Raises:
        PipedecError: the grant does not order exactly this rank's transfers, or lets two conflict; the message names the mistake.
    """
    phases = _parsed(granted, rank)
    transfers = [transfer for phase in phases for transfer in phase]
    own = [transfer for transfer in transfers_between_timesteps(topology) if rank in transfer]
    for transfer in transfers:
        if transfer not in own:
            raise _refused(rank, f"{transfer} is no transfer of this rank")
        if transfers.count(transfer) > 1:
            raise _refused(rank, f"{transfer} is granted twice")
    if missing := [transfer for transfer in own if transfer not in transfers]:
        raise _refused(rank, f"{missing[0]} is missing")
    for one, other in (pair for phase in phases for pair in combinations(phase, 2)):
        if _conflict(one, other, duplex):
            raise _refused(rank, f"{one} and {other} at the same time, but the links are {duplex} duplex")
    if rank == 0 and transfers[0].target != 0:
        raise _refused(rank, f"{transfers[0]} before the result on which it depends")
    return phases


def _parsed(granted: Any, rank: int) -> tuple[Phase, ...]:
    try:
        phases = tuple(tuple(PlannedTransfer(*pair) for pair in phase) for phase in granted)
    except TypeError:
        raise _refused(rank, "it is no list of phases of transfers") from None
    if not all(isinstance(end, int) for phase in phases for transfer in phase for end in transfer):
        raise _refused(rank, "its transfers are not between ranks")
    return phases


def _refused(rank: int, reason: str) -> PipedecError:
    return PipedecError(f"{rank_name(rank)} refuses the order of transfers that Redis granted: {reason}")


def _conflict(one: PlannedTransfer, other: PlannedTransfer, duplex: str) -> bool:
    """Whether some rank cannot take part in both at the same time."""
    if duplex == "half":
        return bool(set(one) & set(other))
    return one.source == other.source or one.target == other.target


def groups_text(topology: Topology) -> str:
    """The groups as ``lua/grant.lua`` reads them: first and last stage of each, ``1-2 3-3``."""
    return " ".join(f"{group[0]}-{group[-1]}" for group in topology.groups)
