"""The number of states of recurrent layers, and of rows of trees in flight, in the pools of a pipeline's stages.

Plain arithmetic, by settings and configs alone, so that every rank counts the same. Asks no device.
"""

from __future__ import annotations

from collections.abc import Iterable

from pipedec.core.errors import UserError
from pipedec.core.limits import KNEE_ROWS
from pipedec.families import StateCounts
from pipedec.validation import shown_bytes

NO_STATES = StateCounts(0, 0)
MAX_SNAPSHOTS = 1024
LEAST_ROWS = 256  # a step of several threads' trees, which enters whole, the last tokens of ended threads, and a forced chain


def counted_states(state_bytes: Iterable[int], memory: int, max_num_seqs: int, shares_prefixes: bool, rows: int) -> StateCounts:
    """The counts of a model, the same on all of its ranks. Half of the states are for running requests, the others for prefixes.

    Args:
        state_bytes: for each rank, those of one request in all of its layers; 0 without recurrent layers.
        memory: bytes of each rank for states.
        rows: of trees in flight, beside one certain row of each request.

    Raises:
        UserError: there is no memory for a single state.
    """
    largest = max(state_bytes)
    if not largest:
        return NO_STATES
    total = memory // largest
    if not total:
        raise UserError(
            f"the recurrent layers of a rank take {shown_bytes(largest)} for the state of one request, but there are "
            f"{shown_bytes(memory)}: give a larger --state-memory, or use more stages"
        )
    states = min(max_num_seqs, max(1, total // 2) if shares_prefixes else total)
    return StateCounts(states, states + rows, min(total - states, MAX_SNAPSHOTS) if shares_prefixes else 0)


def rows_in_flight(room: int, passage: int) -> int:
    """Rows of the stages' trees for which there are stashes, if about ``room`` rows enter at a timestep.

    Rows are in flight from their entry to their verdict, so these are the rows of a full pipeline. Rank 0 lets no more enter,
    however long the passage is: where a longer one than the settings' pays, on slow links, fewer rows enter at each timestep.
    """
    return max(max(room, KNEE_ROWS) * (passage + 1), LEAST_ROWS)
