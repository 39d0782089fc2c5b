"""Where the rows of a forward attend and write, as integers on the device, which kernels read instead of shapes.

One tensor holds them all, so that a forward copies once. Where the parts of it begin depends on the number of rows alone, and so
does a graph that was captured with it: how long the past of each request is, its entry says.

A row sees slots of its request's cache by their *number* there, from 0 on: all of the first ``shared`` ones, and of the others
those that its mask names. A block table maps numbers to slots of the pool. Of recurrent layers the table names the states of the
rows, and the stashes of the rows in flight of their requests; without such layers it has no place for them.
"""

from __future__ import annotations

from collections.abc import Sequence
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
_ALIGNED = 4  # numbers of 16 bytes


class RequestEntry(NamedTuple):
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
        self._parts = _header_parts(rows, num_requests, tile_tokens, has_states)
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
        return _header_parts(rows, num_requests, tile_tokens, has_states)[-1].stop

    @property
    def header(self) -> int:
        """Numbers before those whose places entries name."""
        return self._parts[-1].stop

    def _split(self, table: Tensor) -> list[Tensor]:
        return [table[part] for part in self._parts]

    def fill(self, lanes: Sequence[LaneRows], with_positions: bool) -> None:
        """Enter the rows of a forward. Padding rows write to the pool's spare slot.

        They are copied all at once, from other memory each time: the host does not wait for a device that still reads them. Masks
        and positions that were computed on a device follow, copied there.

        Raises ValueError if the table is too small.
        """
        entries = _Entries(with_positions, self._has_states)
        for lane in lanes:
            entries.add(lane)
        places = entries.places(self.header)
        if places.end > len(self.table):
            raise ValueError(f"{places.end} numbers do not fit into a table of {len(self.table)}")
        host = torch.zeros(places.end, dtype=torch.int32, pin_memory=self.table.device.type == "cuda")
        self._fill_header(host, lanes, entries, places)
        host[self.header : places.masks // 4] = torch.tensor([*entries.numbers, *entries.positions], dtype=torch.int32)
        if entries.masks:
            masks = torch.cat(entries.masks).view(torch.uint8)
            host.view(torch.uint8)[places.masks : places.masks + len(masks)] = masks
        self.table[: places.end].copy_(host, non_blocking=True)
        for place, seen in entries.masks_there:
            self.table.view(torch.uint8)[places.masks + place :][: len(seen)].copy_(seen)
        for place, positions in entries.positions_there:
            self.table[places.positions + place :][: len(positions)].copy_(positions)

    def _fill_header(self, host: Tensor, lanes: Sequence[LaneRows], entries: _Entries, places: _Places) -> None:
        num_rows, of_rows, slots, requests, states, flights, *tiles = self._split(host)
        rows, pool = entries.num_rows, lanes[0].cache.pool
        num_rows.fill_(rows)
        of_rows.fill_(-1)
        of_rows[:rows] = torch.arange(len(lanes)).repeat_interleave(torch.tensor([lane.num_rows for lane in lanes]))
        slots.fill_(pool.spare_slot)
        slots[:rows] = torch.tensor([slot for lane in lanes for run in lane.cache.next_slots(lane.num_rows) for slot in run])
        requests[: len(lanes) * REQUEST_FIELDS] = torch.tensor([places.of(entry) for entry in entries.requests]).flatten()
        if pool.states is not None and self._has_states:
            states.fill_(pool.states.spare_state)
            states[:rows] = torch.tensor(entries.states)
            placed = [
                flight._replace(stashes=flight.stashes + places.numbers, seen=flight.seen + places.masks)
                for flight in entries.flights
            ]
            flights[: len(lanes) * FLIGHT_FIELDS] = torch.tensor(placed).flatten()
        for tokens, part in zip(self._tile_tokens, tiles, strict=True):
            found = [
                (number, entry.row + first, min(tokens, lane.num_rows - first))
                for number, (entry, lane) in enumerate(zip(entries.requests, lanes, strict=True))
                for first in range(0, lane.num_rows, tokens)
            ]
            part.fill_(-1)
            part[: len(found) * TILE_FIELDS] = torch.tensor(found).flatten()


class _Places(NamedTuple):
    """Where the parts after the header begin in a table; that of the masks in bytes."""

    numbers: int
    positions: int
    masks: int
    end: int

    def of(self, entry: RequestEntry) -> RequestEntry:
        """An entry whose places count from the beginnings of the parts, in the table."""
        positions = entry.positions if entry.positions == BY_NUMBER else entry.positions + self.positions
        return entry._replace(blocks=entry.blocks + self.numbers, seen=entry.seen + self.masks, positions=positions)


class _Entries:
    """The contents of a table: entries, whose places count from the beginnings of the parts after the header, and those parts.

    Attributes:
        numbers: blocks of the pool, and stashes.
        masks, positions: on the host; 0 for those that are on a device.
        masks_there, positions_there: those, with their places.
    """

    def __init__(self, with_positions: bool, has_states: bool) -> None:
        self._with_positions, self._has_states = with_positions, has_states
        self.num_rows = self._num_bytes = 0
        self.requests, self.flights, self.states = list[RequestEntry](), list[FlightEntry](), list[int]()
        self.numbers, self.positions, self.masks = list[int](), list[int](), list[Tensor]()
        self.masks_there, self.positions_there = list[tuple[int, Tensor]](), list[tuple[int, Tensor]]()

    def places(self, header: int) -> _Places:
        """The places of the parts after a header of so many numbers."""
        positions = header + len(self.numbers)
        masks = positions + len(self.positions)
        return _Places(header, positions, 4 * masks, masks + -(-self._num_bytes // 4))

    def add(self, lane: LaneRows) -> None:
        """Enter a lane."""
        visibility, length = lane.visibility, lane.cache.length + lane.num_rows
        shared, stride, place = lane.cache.length, CAUSAL, BY_NUMBER
        first, seen = self.num_rows, self._num_bytes
        if visibility is not None:
            shared, stride = visibility.shared, visibility.seen.shape[1]
            self._add_mask(visibility.seen.flatten())
            place = self._add_positions(visibility.slot_positions()[:stride]) if self._with_positions else BY_NUMBER
        self.requests.append(RequestEntry(length, shared, first, first + lane.num_tokens, len(self.numbers), seen, stride, place))
        self.numbers += lane.cache.blocks(length)
        if self._has_states:
            self.states += _states(lane)
            flight, stashes, masks = _flight(lane, first, len(self.numbers), self._num_bytes)
            self.flights.append(flight)
            self.numbers += stashes
            for mask in masks:
                self._add_mask(mask)
        self.num_rows += lane.num_rows

    def _add_mask(self, seen: Tensor) -> None:
        if seen.device != HOST:
            self.masks_there.append((self._num_bytes, seen))
            seen = torch.zeros(len(seen), dtype=torch.bool)
        self.masks.append(seen)
        self._num_bytes += len(seen)

    def _add_positions(self, positions: Tensor) -> int:
        """Returns their place."""
        place = len(self.positions)
        if positions.device != HOST:
            self.positions_there.append((place, positions))
        self.positions += positions.tolist() if positions.device == HOST else [0] * len(positions)
        return place


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


def _header_parts(rows: int, num_requests: int, tile_tokens: Sequence[int], has_states: bool) -> list[slice]:
    """The parts of the header, each from 16 bytes on: Triton compiles kernels anew for pointers that are aligned otherwise. Of
    each request one tile may be partly filled.
    """
    counts = [-(-rows // tokens) + num_requests - 1 for tokens in tile_tokens]
    recurrent = [rows, num_requests * FLIGHT_FIELDS] if has_states else [0, 0]
    sizes = [1, rows, rows, num_requests * REQUEST_FIELDS, *recurrent, *(count * TILE_FIELDS for count in counts)]
    begin, parts = 0, list[slice]()
    for size in sizes:
        parts.append(slice(begin, begin + size))
        begin += -(-size // _ALIGNED) * _ALIGNED
    return parts


def entries_size(lanes: Sequence[LaneRows]) -> int:
    """Numbers after the header that these rows need at most."""
    blocks = sum((lane.cache.length + lane.num_rows) // lane.cache.pool.block + 1 for lane in lanes)
    masks = [lane.visibility.seen for lane in lanes if lane.visibility is not None]
    stashed = [lane for lane in lanes if lane.visibility is not None and lane.cache.states is not None]
    in_flight = [(lane.cache.tree_length + lane.num_rows, lane) for lane in stashed]
    blocks += sum(count + (0 if lane.threads is None else count * lane.num_rows // 4 + 1) for count, lane in in_flight)
    return blocks + sum(seen.numel() // 4 + 1 + seen.shape[1] for seen in masks)
