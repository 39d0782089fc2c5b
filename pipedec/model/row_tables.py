"""Where the rows of a forward attend and write, as integers on the device, which kernels read instead of shapes.

One tensor holds them all, so that a forward copies once. Where the parts of it begin depends on the number of rows alone, and so
does a graph that was captured with it: how long the past of each request is, its entry says.

A row sees slots of its request's cache by their *number* there, from 0 on: all of the first ``shared`` ones, and of the others
those that its mask names. A block table maps numbers to slots of the pool. Of recurrent layers the table names the states of the
rows, and the stashes of the rows in flight of their requests; without such layers it has no place for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from pipedec.device import HOST
from pipedec.model.rows import LaneRows

MOST_REQUESTS = 16  # in a captured forward: so many tiles may be partly filled
TILE_FIELDS = 3  # request (-1: none), its first row in the forward, number of rows
REQUEST_FIELDS = 8  # see ``RequestEntry``
FLIGHT_FIELDS = 6  # see ``FlightEntry``
CAUSAL, BY_NUMBER = 0, -1


@dataclass(frozen=True)
class RequestEntry:
    """A request in the table. Places are indices into it.

    Attributes:
        length: slots that any of its rows sees, their own included.
        shared: how many of them, the first ones, all rows see.
        row: its first row in the forward.
        mask_row: its first mask row (BiTA), from which on rows see the pool's learned prompt, too.
        blocks: place of the pool's blocks that hold its slots.
        seen: place of its rows' masks, in bytes, one for each slot from ``shared`` on.
        stride: bytes of a row's mask; CAUSAL: there are none, and each row sees the slots up to its own.
        positions: place of the positions of the slots from ``shared`` on; BY_NUMBER: their numbers are their positions.
    """

    length: int
    shared: int
    row: int
    mask_row: int
    blocks: int
    seen: int
    stride: int
    positions: int

    def __iter__(self) -> Iterator[int]:
        return iter((self.length, self.shared, self.row, self.mask_row, self.blocks, self.seen, self.stride, self.positions))


class FlightEntry(NamedTuple):
    """The rows of trees of a request, for recurrent layers; all 0 for a chunk of a prompt. Places are indices into the table.

    Attributes:
        stashes: place of the numbers of the stashes of its rows in flight, in the order of its cache, those of the forward last.
        in_flight: how many of them there are.
        row: its first row in the forward.
        rows: how many it has there.
        seen: place of its rows' masks, in bytes: which rows in flight are a row's ancestors, or itself, and not in its state.
        stride: bytes from a row's mask to the next.
    """

    stashes: int
    in_flight: int
    row: int
    rows: int
    seen: int
    stride: int


class RowTables:
    """The table of forwards of ``rows`` rows, padding included.

    Args:
        table: int32, the memory, on the device.
        tile_tokens: for each size of tiles that layers need, how many rows of one request a tile holds at most.
        num_requests: at most.
        has_states: whether layers are recurrent.

    Attributes:
        rows: R.
        num_rows: int32 [1], rows that are not padding.
        requests_of_rows: int32 [R], the request of each row.
        slots: int32 [R], where keys and values are written in the pool.
        tiles: int32 [T, 3] for each of ``tile_tokens``, see ``TILE_FIELDS``.
        requests: int32 [B, 8], see ``RequestEntry``.
        states: int32 [R], the state of each row's request or decode thread; none without recurrent layers.
        flights: int32 [B, 6], see ``FlightEntry``; none without recurrent layers.
    """

    def __init__(self, table: Tensor, rows: int, num_requests: int, tile_tokens: Sequence[int], has_states: bool = False) -> None:
        self.table, self.rows, self._tile_tokens, self._has_states = table, rows, tuple(tile_tokens), has_states
        self._ends = list(accumulate(_header_sizes(rows, num_requests, tile_tokens, has_states)))
        self.num_rows, self.requests_of_rows, self.slots, requests, self.states, flights, *tiles = self._split(table)
        self.requests, self.flights = requests.view(num_requests, REQUEST_FIELDS), flights.view(-1, FLIGHT_FIELDS)
        self.tiles = {tokens: part.view(-1, TILE_FIELDS) for tokens, part in zip(tile_tokens, tiles, strict=True)}

    @classmethod
    def of(cls, lanes: Sequence[LaneRows], tile_tokens: Sequence[int], with_positions: bool) -> RowTables:
        """A table of its own for the rows of a forward."""
        rows, device = sum(lane.num_rows for lane in lanes), lanes[0].positions.device
        has_states = lanes[0].cache.states is not None
        size = cls.header_size(rows, len(lanes), tile_tokens, has_states) + entries_size(lanes)
        found = cls(torch.empty(size, dtype=torch.int32, device=device), rows, len(lanes), tile_tokens, has_states)
        found.fill(lanes, with_positions)
        return found

    @staticmethod
    def header_size(rows: int, num_requests: int, tile_tokens: Sequence[int], has_states: bool = False) -> int:
        """Numbers before those whose places entries name."""
        return sum(_header_sizes(rows, num_requests, tile_tokens, has_states))

    @property
    def header(self) -> int:
        """Numbers before those whose places entries name."""
        return self._ends[-1]

    def _split(self, table: Tensor) -> list[Tensor]:
        return [table[first:end] for first, end in zip([0, *self._ends], self._ends, strict=False)]

    def fill(self, lanes: Sequence[LaneRows], with_positions: bool) -> None:
        """Enter the rows of a forward. Padding rows write to the pool's spare slot.

        They are copied all at once, from other memory each time: the host does not wait for a device that still reads them. Masks
        and positions that were computed on a device follow, copied there.

        Raises ValueError if the table is too small.
        """
        blocks, positions, masks, on_device = list[int](), list[int](), list[Tensor](), list[tuple[bool, int, Tensor]]()
        entries, row, num_bytes = list[list[int]](), 0, 0
        flights, states = list[FlightEntry](), list[int]()
        for lane in lanes:
            visibility, length = lane.visibility, lane.cache.length + lane.num_rows
            shared, stride, place = lane.cache.length, CAUSAL, BY_NUMBER
            own_blocks = lane.cache.blocks(length)
            if visibility is not None:
                shared, stride = visibility.shared, visibility.seen.shape[1]
                seen = visibility.seen.flatten()
                if seen.device != HOST:
                    on_device.append((True, num_bytes, seen))
                    seen = torch.zeros(len(seen), dtype=torch.bool)
                masks.append(seen)
                if with_positions:
                    place, of_slots = len(positions), visibility.slot_positions()[:stride]
                    if of_slots.device != HOST:
                        on_device.append((False, place, of_slots))
                    positions += [0] * stride if of_slots.device != HOST else of_slots.tolist()
            entries.append([length, shared, row, row + lane.num_tokens, len(blocks), num_bytes, stride, place])
            blocks += own_blocks
            num_bytes += stride * lane.num_rows
            if self._has_states:
                flight, stashes, masked = _flight(lane, row, len(blocks), num_bytes)
                flights.append(flight)
                states += _states(lane)
                blocks += stashes
                masks += masked
                num_bytes += sum(mask.numel() for mask in masked)
            row += lane.num_rows
        size = self.header + len(blocks) + len(positions) + -(-num_bytes // 4)
        if size > len(self.table):
            raise ValueError(f"{size} numbers do not fit into a table of {len(self.table)}")
        host = torch.zeros(size, dtype=torch.int32, pin_memory=self.table.device.type == "cuda")
        first_position, first_byte = self.header + len(blocks), 4 * (self.header + len(blocks) + len(positions))
        for entry in entries:
            entry[4] += self.header
            entry[5] += first_byte
            entry[7] += first_position if entry[7] != BY_NUMBER else 0
        num_rows, of_rows, slots, requests, of_states, of_flights, *tiles = self._split(host)
        num_rows.fill_(row)
        of_rows.fill_(-1)
        slots.fill_(lanes[0].cache.pool.spare_slot)
        counts = torch.tensor([lane.num_rows for lane in lanes])
        of_rows[:row] = torch.arange(len(lanes)).repeat_interleave(counts)
        runs = [slot for lane in lanes for run in lane.cache.next_slots(lane.num_rows) for slot in run]
        slots[:row] = torch.tensor(runs)
        requests[: len(entries) * REQUEST_FIELDS] = torch.tensor(entries).flatten()
        if (memory := lanes[0].cache.pool.states) is not None and self._has_states:
            of_states.fill_(memory.spare_state)
            of_states[:row] = torch.tensor(states)
            placed = [flight._replace(stashes=flight.stashes + self.header, seen=flight.seen + first_byte) for flight in flights]
            of_flights[: len(placed) * FLIGHT_FIELDS] = torch.tensor(placed).flatten()
        for tokens, part in zip(self._tile_tokens, tiles, strict=True):
            found = [
                (number, entry[2] + first, min(tokens, lane.num_rows - first))
                for number, (entry, lane) in enumerate(zip(entries, lanes, strict=True))
                for first in range(0, lane.num_rows, tokens)
            ]
            part.fill_(-1)
            part[: len(found) * TILE_FIELDS] = torch.tensor(found).flatten()
        host[self.header : first_position + len(positions)] = torch.tensor([*blocks, *positions], dtype=torch.int32)
        if masks:
            host.view(torch.uint8)[first_byte : first_byte + num_bytes] = torch.cat(masks).view(torch.uint8)
        self.table[:size].copy_(host, non_blocking=True)
        for is_mask, place, values in on_device:
            part = self.table.view(torch.uint8)[first_byte + place :] if is_mask else self.table[first_position + place :]
            part[: len(values)].copy_(values)


def _states(lane: LaneRows) -> list[int]:
    """The state of each row."""
    assert lane.cache.states is not None
    return [lane.cache.states.of_thread(thread) for thread in lane.threads or [0] * lane.num_rows]


def _flight(lane: LaneRows, row: int, place: int, first_byte: int) -> tuple[FlightEntry, list[int], list[Tensor]]:
    """The rows of a lane's trees, which enter; the stashes of its rows in flight, which will be at ``place``; and their masks,
    which will be at ``first_byte``, unless those of attention, which are before it, will do.
    """
    states, visibility = lane.cache.states, lane.visibility
    assert states is not None
    if visibility is None:
        return FlightEntry(0, 0, 0, 0, 0, 0), [], []
    stashes, stride = states.enter(lane.num_rows), visibility.seen.shape[1]
    first = stride - len(stashes)  # of the columns that are rows in flight
    if (hidden_RN := states.hidden_from(lane.threads or ())) is None:
        seen = first_byte - stride * lane.num_rows + first
        return FlightEntry(place, len(stashes), row, lane.num_rows, seen, stride), stashes, []
    seen_RN = visibility.seen[:, first:] & ~hidden_RN.to(visibility.seen.device)
    return FlightEntry(place, len(stashes), row, lane.num_rows, first_byte, len(stashes)), stashes, [seen_RN.reshape(-1)]


def _header_sizes(rows: int, num_requests: int, tile_tokens: Sequence[int], has_states: bool) -> list[int]:
    """Numbers of each part of the header. Of each request one tile may be partly filled."""
    counts = [-(-rows // tokens) + num_requests - 1 for tokens in tile_tokens]
    recurrent = [rows, num_requests * FLIGHT_FIELDS] if has_states else [0, 0]
    return [1, rows, rows, num_requests * REQUEST_FIELDS, *recurrent, *(count * TILE_FIELDS for count in counts)]


def entries_size(lanes: Sequence[LaneRows]) -> int:
    """Numbers after the header that these rows need at most."""
    blocks = sum((lane.cache.length + lane.num_rows) // lane.cache.pool.block + 1 for lane in lanes)
    masks = [lane.visibility.seen for lane in lanes if lane.visibility is not None]
    stashed = [lane for lane in lanes if lane.visibility is not None and lane.cache.states is not None]
    in_flight = [(lane.cache.tree_length + lane.num_rows, lane) for lane in stashed]
    blocks += sum(count + (0 if lane.threads is None else count * lane.num_rows // 4 + 1) for count, lane in in_flight)
    return blocks + sum(seen.numel() // 4 + 1 + seen.shape[1] for seen in masks)
