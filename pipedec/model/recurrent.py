"""Layers with a recurrent state, over prediction trees: the gated delta rule (arXiv 2412.06464) along each row's path.

Such a layer keeps for each head a matrix S, the *state*. A token with query q, key k, value v, log decay g ≤ 0 and rate b does

    S ← e^g S;    u = b (v − Sᵀ k);    S ← S + k uᵀ;    o = Sᵀ q

Let S be the state after the accepted tokens, G(r) the sum of g along the path of row r from there, its own included, and j the
rows of that path. Then, without a state for each row,

    u(r) = b (v − e^G(r) Sᵀ k(r) − Σ_{j before r} e^(G(r) − G(j)) (k(j) · k(r)) u(j))
    o(r) = e^G(r) Sᵀ q(r) + Σ_{j up to r} e^(G(r) − G(j)) (k(j) · q(r)) u(j)

The update u(r) depends on the row's path alone, so it is computed once, when the row enters, and stays true when the past moves.
Rows of one step that are each other's ancestors are a triangular system. A chunk of a prompt is a tree that is a chain. With a
decay for each of a key's numbers (Kimi Delta Attention), g and G are vectors and each number of k has its own weight.

Shape legend: R rows in this step, N rows in flight of their request, those last; H heads, each with a state [K, V]; J key
heads, each of which serves H / J consecutive heads; G decays of a head, 1 or K; C channels of the short convolution, which sees W
tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from pipedec.device import to_device
from pipedec.model.row_tables import RowTables
from pipedec.model.rows import LaneRows
from pipedec.model.states import LaneStates, LayerStates, StatePool, committed_state

CHUNK_ROWS = 64  # of a prompt that are computed at once
_MOST_WEIGHTS = 1 << 24  # numbers that products with a decay for each number of a key compute at once


class RuleInputs(NamedTuple):
    """The rows of a step, in the dtype of states."""

    queries_RJK: Tensor  # normalised and scaled
    keys_RJK: Tensor  # normalised
    values_RHV: Tensor
    decays_RHG: Tensor  # logarithms
    rates_RH: Tensor

    @classmethod
    def of(cls, queries: Tensor, keys: Tensor, values: Tensor, decays: Tensor, rates: Tensor, dtype: torch.dtype) -> RuleInputs:
        """See ``Recurrence.mix``."""
        queries, keys, values, decays, rates = (tensor.to(dtype) for tensor in (queries, keys, values, decays, rates))
        queries = normalised(queries) * queries.shape[-1] ** -0.5
        return cls(queries, normalised(keys), values, decays.view(*values.shape[:2], -1), rates)

    def part(self, rows: slice | Tensor) -> RuleInputs:
        return RuleInputs(*(tensor[rows] for tensor in self))


class Stashes(NamedTuple):
    """Rows in flight."""

    keys_NJK: Tensor
    updates_NHV: Tensor
    decays_NHG: Tensor  # sums along the path from the past

    @classmethod
    def read(cls, layer: LayerStates, rows: Tensor) -> Stashes:
        """Those of ``rows``, int64 of any shape, in the pool."""
        return cls(layer.keys[rows], layer.updates[rows], layer.decays[rows])

    def write(self, layer: LayerStates, rows: Tensor) -> None:
        for plane, values in zip((layer.keys, layer.updates, layer.decays), self, strict=True):
            plane[rows] = values


def normalised(vectors: Tensor) -> Tensor:
    """Vectors of length 1, as Qwen3-Next computes them."""
    return vectors * torch.rsqrt((vectors * vectors).sum(-1, keepdim=True) + 1e-6)


def delta_rule(rows: RuleInputs, state: Tensor, older: Stashes, seen_RN: Tensor) -> tuple[Tensor, Stashes]:
    """The rule for a step's rows, each along its own path.

    Args:
        state: [H, K, V] after the accepted tokens; or [R, H, K, V], that of each row's decode thread.
        older: the rows in flight before this step's, N − R.
        seen_RN: the rows in flight that are each row's ancestors, or itself. Ancestors come before their descendants.

    Returns:
        out_RHV, and the rows' own stashes.
    """
    num_older, heads, key_heads = len(older.keys_NJK), rows.values_RHV.shape[1], rows.keys_RJK.shape[1]
    decays_RHG = path_decays(rows.decays_RHG, older.decays_NHG, seen_RN)
    keys_NJK, decays_NHG = torch.cat((older.keys_NJK, rows.keys_RJK)), torch.cat((older.decays_NHG, decays_RHG))
    asking = torch.stack((rows.keys_RJK, rows.queries_RJK))
    by_keys_HRN, by_queries_HRN = _weights(asking, keys_NJK, decays_RHG, decays_NHG, seen_RN)
    decayed = asking.repeat_interleave(heads // key_heads, 2) * decays_RHG.exp()
    found_HRV, read_HRV = _read(decayed, state)
    older_HNV, rates_HR1 = older.updates_NHV.transpose(0, 1), rows.rates_RH.t()[:, :, None]
    updates_HRV = rates_HR1 * (rows.values_RHV.transpose(0, 1) - found_HRV - by_keys_HRN[:, :, :num_older] @ older_HNV)
    if len(rows.rates_RH) > 1:
        system_HRR = rates_HR1 * by_keys_HRN[:, :, num_older:]
        updates_HRV = torch.linalg.solve_triangular(system_HRR, updates_HRV, upper=False, unitriangular=True)
    out_HRV = read_HRV + by_queries_HRN @ torch.cat((older_HNV, updates_HRV), 1)
    return out_HRV.transpose(0, 1), Stashes(rows.keys_RJK, updates_HRV.transpose(0, 1), decays_RHG)


def path_decays(decays_RHG: Tensor, older_NHG: Tensor, seen_RN: Tensor) -> Tensor:
    """The sums of decays along each row's path from the past, from those of older rows: that of the nearest older ancestor, which
    is the last, and the rows' own.
    """
    num_older = len(older_NHG)
    sums_RHG = torch.einsum("rn,nhg->rhg", seen_RN[:, num_older:].to(decays_RHG.dtype), decays_RHG)
    if not num_older:
        return sums_RHG
    numbers_N = torch.arange(1, num_older + 1, device=seen_RN.device)
    nearest_R = (seen_RN[:, :num_older] * numbers_N).amax(1)  # 0: none
    return sums_RHG + torch.cat((torch.zeros_like(older_NHG[:1]), older_NHG))[nearest_R]


def _weights(asking: Tensor, keys_NJK: Tensor, decays_RHG: Tensor, decays_NHG: Tensor, seen_RN: Tensor) -> Tensor:
    """[2, H, R, N], products of the rows' keys and queries, ``asking`` [2, R, J, K], with the keys that they see, decayed."""
    heads, decays = decays_RHG.shape[1:]
    if decays == 1:
        between_HRN = decays_RHG.permute(1, 0, 2) - decays_NHG.permute(1, 2, 0)
        products = torch.einsum("arjk,njk->ajrn", asking, keys_NJK).repeat_interleave(heads // asking.shape[2], 1)
        return products * between_HRN.masked_fill(~seen_RN, -torch.inf).exp()
    found, at_once = [], max(1, _MOST_WEIGHTS // decays_NHG.numel())
    for part, decays_PHG, seen_PN in zip(
        asking.split(at_once, 1), decays_RHG.split(at_once), seen_RN.split(at_once), strict=True
    ):
        between = (decays_PHG[:, None] - decays_NHG).masked_fill(~seen_PN[:, :, None, None], -torch.inf).exp()
        grouped = between.unflatten(2, (asking.shape[2], -1))  # heads by the key head that serves them
        found.append(torch.einsum("apjk,njk,pnjik->ajipn", part, keys_NJK, grouped).flatten(1, 2))
    return torch.cat(found, 2)


def _read(decayed: Tensor, state: Tensor) -> Tensor:
    """[2, H, R, V], what decayed keys and queries [2, R, H, K] read of the past."""
    if state.dim() == 4:
        return torch.einsum("arhk,rhkv->ahrv", decayed, state)
    by_head = decayed.permute(2, 0, 1, 3).flatten(1, 2) @ state
    return by_head.unflatten(1, decayed.shape[:2]).transpose(0, 1)


def windows(inputs_RC: Tensor, past_WC: Tensor, older_NC: Tensor, seen_RN: Tensor) -> Tensor:
    """[R, W, C], the inputs of the convolution along each row's path, its own last.

    Args:
        inputs_RC: those of the step's rows.
        past_WC: the last W − 1 of the past, [W − 1, C]; or [R, W − 1, C], those of each row's decode thread.
        older_NC, seen_RN: see ``delta_rule``.
    """
    before = past_WC.shape[-2]
    rows, count = seen_RN.shape
    numbers_N = torch.arange(count, device=seen_RN.device)
    ranked_RN = torch.where(seen_RN, numbers_N, -1)
    ranked_RN = functional.pad(ranked_RN, (before, 0), value=-1)  # so that there are enough to rank
    latest_RW = ranked_RN.topk(before + 1, 1).values.flip(1)
    in_flight_R1 = (latest_RW >= 0).sum(1, keepdim=True)
    places_W = torch.arange(before + 1, device=seen_RN.device)
    if past_WC.dim() == 3:
        of_rows_R1 = torch.arange(rows, device=seen_RN.device)[:, None] * before
        past_WC, offset = past_WC.flatten(0, 1), rows * before
    else:
        of_rows_R1, offset = torch.zeros_like(in_flight_R1), before
    sources_RW = torch.where(latest_RW >= 0, offset + latest_RW, of_rows_R1 + places_W + in_flight_R1 - 1)
    return torch.cat((past_WC, older_NC, inputs_RC))[sources_RW]


def convolved(windows_RWC: Tensor, weight_CW: Tensor, bias_C: Tensor | None) -> Tensor:
    """The short convolution at the last token of each window: [R, C], as inputs are."""
    dtype = torch.promote_types(windows_RWC.dtype, torch.float32)
    out_RC = (windows_RWC.to(dtype) * weight_CW.t().to(dtype)).sum(1)
    return (out_RC if bias_C is None else out_RC + bias_C).to(windows_RWC.dtype)


@dataclass(frozen=True)
class TreeRows:
    """The rows of one request's trees: of the forward, and in the pool."""

    rows: slice
    seen: Tensor  # bool [R, N]
    older: Tensor  # int64 [N − R], the stashes of the rows that were in flight before
    own: Tensor  # int64 [R]
    states: Tensor | int  # of the request, or int64 [R], of each row's decode thread

    @classmethod
    def of(cls, lane: LaneRows, states: LaneStates, rows: slice) -> TreeRows:
        assert lane.visibility is not None
        stashes, device = states.enter(lane.num_rows), lane.positions.device
        seen_RN = to_device(lane.visibility.seen[:, lane.visibility.seen.shape[1] - len(stashes) :], device)
        older, own = to_device(torch.tensor(stashes), device).split([len(stashes) - lane.num_rows, lane.num_rows])
        if lane.threads is None:
            return cls(rows, seen_RN, older, own, states.of_thread(0))
        if (hidden_RN := states.hidden_from(lane.threads)) is not None:
            seen_RN = seen_RN & ~to_device(hidden_RN, device)
        of_threads = torch.tensor([states.of_thread(thread) for thread in lane.threads])
        return cls(rows, seen_RN, older, own, to_device(of_threads, device))

    @classmethod
    def of_tables(cls, tables: RowTables, num_stashes: int) -> TreeRows:
        """All rows of a forward as if of one request, whose rows do not see each other's: no value is read on the host. ``older``
        are all stashes of the pool, of which the last belongs to no row; padding, and rows of chunks, see nothing.
        """
        table, flights_B, device = tables.table, tables.flights.long(), tables.table.device
        stashes_B1, in_flight_B1, _, rows_B1, _, _ = (field[:, None] for field in flights_B.unbind(1))
        numbers_M, spare = torch.arange(num_stashes, device=device), num_stashes - 1
        is_older_BM = numbers_M < in_flight_B1 - rows_B1
        places_BM = (stashes_B1 + numbers_M).clamp(max=len(table) - 1)
        stashes_BM = torch.where(is_older_BM, table[places_BM].long(), spare)
        number_M, request_M = torch.full_like(numbers_M, num_stashes), torch.full_like(numbers_M, -1)
        number_M[stashes_BM] = numbers_M.expand_as(stashes_BM)
        request_M[stashes_BM] = torch.arange(len(flights_B), device=device)[:, None].expand_as(stashes_BM)
        request_M[spare] = -1
        older_M = number_M.argsort(stable=True)
        request_R = tables.requests_of_rows.long()
        stashes_R, in_flight_R, row_R, rows_R, seen_R, stride_R = flights_B[request_R.clamp(min=0)].unbind(1)
        request_R = torch.where(rows_R > 0, request_R, -2)
        own_R, before_R = torch.arange(tables.rows, device=device) - row_R, in_flight_R - rows_R
        own_stash_R = table[(stashes_R + before_R + own_R).clamp(0, len(table) - 1)].long()
        columns_RN = torch.cat((number_M[older_M].expand(tables.rows, -1), before_R[:, None] + own_R), 1)
        bytes = table.view(torch.uint8)
        places_RN = (seen_R + own_R * stride_R)[:, None] + columns_RN
        seen_RN = bytes[places_RN.clamp(0, len(bytes) - 1)] > 0
        seen_RN &= request_R[:, None] == torch.cat((request_M[older_M], request_R))
        own_R = torch.where(request_R >= 0, own_stash_R, spare)
        return cls(slice(0, tables.rows), seen_RN, older_M, own_R, tables.states.long())

    def convolve(self, layer: LayerStates, inputs_RC: Tensor, weight_CW: Tensor, bias_C: Tensor | None) -> Tensor:
        windows_RWC = windows(inputs_RC, layer.past_inputs[self.states], layer.inputs[self.older], self.seen)
        layer.inputs[self.own] = inputs_RC
        return convolved(windows_RWC, weight_CW, bias_C)

    def mix(self, layer: LayerStates, rows: RuleInputs) -> Tensor:
        out_RHV, own = delta_rule(rows, layer.states[self.states], Stashes.read(layer, self.older), self.seen)
        own.write(layer, self.own)
        return out_RHV


@dataclass(frozen=True)
class Chunk:
    """The rows of a chunk of one request's prompt. The states after them are kept aside until the forward has succeeded."""

    rows: slice
    lane: LaneStates

    @classmethod
    def of(cls, states: LaneStates, rows: slice) -> Chunk:
        states.enter(0)
        return cls(rows, states)

    def convolve(self, layer: LayerStates, inputs_RC: Tensor, weight_CW: Tensor, bias_C: Tensor | None) -> Tensor:
        past_WC = layer.past_inputs[self.lane.of_thread(0)]
        inputs = torch.cat((past_WC, inputs_RC))
        self.lane.keep_inputs(layer, inputs[len(inputs) - len(past_WC) :])
        return convolved(inputs.unfold(0, len(past_WC) + 1, 1).transpose(1, 2), weight_CW, bias_C)

    def mix(self, layer: LayerStates, rows: RuleInputs) -> Tensor:
        state, found = layer.states[self.lane.of_thread(0)], list[Tensor]()
        none = Stashes(rows.keys_RJK[:0], rows.values_RHV[:0], rows.decays_RHG[:0])
        for first in range(0, len(rows.rates_RH), CHUNK_ROWS):
            part = rows.part(slice(first, first + CHUNK_ROWS))
            count = len(part.rates_RH)
            chain = torch.ones(count, count, dtype=torch.bool, device=state.device).tril_()
            out_RHV, stashes = delta_rule(part, state, none, chain)
            state = committed_state(state[None], *(tensor[None] for tensor in stashes))[0]
            found.append(out_RHV)
        self.lane.keep_state(layer, state)
        return torch.cat(found)


def chunks_of(lanes: Sequence[LaneRows]) -> list[Chunk]:
    """The chunks of prompts among the rows of a forward."""
    found, first = list[Chunk](), 0
    for lane in lanes:
        if lane.visibility is None and lane.cache.states is not None:
            found.append(Chunk.of(lane.cache.states, slice(first, first + lane.num_rows)))
        first += lane.num_rows
    return found


class Recurrence(Protocol):
    """The recurrent layers of a forward's rows; ``layer`` is one of the stage's. Counterpart of ``RowAttention``."""

    def convolve(self, layer: int, inputs_RC: Tensor, weight_CW: Tensor, bias_C: Tensor | None = None) -> Tensor:
        """The short convolution along each row's path: [R, C], before the activation. Its inputs are kept."""

    def mix(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, decays: Tensor, rates: Tensor) -> Tensor:
        """The gated delta rule along each row's path: out_RHV, in the dtype of ``values``. The rows' stashes are kept.

        Args:
            queries, keys: [R, J, K], before they are normalised.
            values: [R, H, V].
            decays: [R, H] or [R, H, K], logarithms.
            rates: [R, H].
        """


class LaneRecurrence:
    """Recurrence of a forward's rows, request by request."""

    def __init__(self, lanes: Sequence[LaneRows]) -> None:
        self._parts: list[TreeRows | Chunk] = []
        first = 0
        for lane in lanes:
            states, rows = lane.cache.states, slice(first, first + lane.num_rows)
            assert states is not None
            self._parts.append(Chunk.of(states, rows) if lane.visibility is None else TreeRows.of(lane, states, rows))
            self._pool: StatePool = states.pool
            first += lane.num_rows

    def convolve(self, layer: int, inputs_RC: Tensor, weight_CW: Tensor, bias_C: Tensor | None = None) -> Tensor:
        """See ``Recurrence``."""
        memory = self._pool.layer(layer)
        return torch.cat([part.convolve(memory, inputs_RC[part.rows], weight_CW, bias_C) for part in self._parts])

    def mix(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, decays: Tensor, rates: Tensor) -> Tensor:
        """See ``Recurrence``."""
        memory = self._pool.layer(layer)
        rows = RuleInputs.of(queries, keys, values, decays, rates, memory.states.dtype)
        return torch.cat([part.mix(memory, rows.part(part.rows)) for part in self._parts]).to(values.dtype)
