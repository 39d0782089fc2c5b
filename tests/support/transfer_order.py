"""The order of transfers between two timesteps by the rule of ``lua/grant.lua``, in Python."""

from __future__ import annotations

from pipedec.scheduler.workflow import Phase, PlannedTransfer, conflict, transfers_between_timesteps
from pipedec.topology import Topology

DUPLEXES = ("half", "full")


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
            if not any(conflict(transfer, other, duplex) for other in phase):
                phase.append(transfer)
        phases.append(tuple(phase))
        pending = [transfer for transfer in pending if transfer not in phase]
    return phases


def transfers_of(rank: int, topology: Topology, duplex: str) -> tuple[Phase, ...]:
    """The rank's own transfers, phase by phase, without the phases in which it has none."""
    own = (tuple(transfer for transfer in phase if rank in transfer) for phase in transfer_phases(topology, duplex))
    return tuple(phase for phase in own if phase)
