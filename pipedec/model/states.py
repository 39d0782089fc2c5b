"""The memory of recurrent layers: states after the past of requests, and stashes of their rows in flight.

The pool is allocated once. A state belongs to one decode thread of a running request, or is a *snapshot*, kept after a prefix of
a prompt for requests that begin with it. Rank 0 counts both, and numbers the snapshots; which states and stashes a request has
is this stage's own matter. Formulas and shapes as in ``recurrent``; L layers of one shape.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pipedec.core.errors import UserError
from pipedec.device import to_device
from pipedec.families import Layer, RecurrentShape, StateCounts


@dataclass(frozen=True)
class LayerStates:
    """The memory of one layer, or, with an axis of layers before the others, of several with one shape.

    Attributes:
        states: [states, H, K, V], float32 or wider: those of requests, snapshots, and one that belongs to none.
        past_inputs: [states, W − 1, C], the last inputs of the convolution before each of them.
        keys, updates, decays, inputs: of rows in flight, [rows, J, K], [rows, H, V], [rows, H, G] and [rows, C]; the last two
            rows belong to none.
    """

    states: Tensor
    past_inputs: Tensor
    keys: Tensor
    updates: Tensor
    decays: Tensor
    inputs: Tensor

    @classmethod
    def allocated(
        cls, shape: RecurrentShape, layers: int, counts: StateCounts, dtype: torch.dtype, device: torch.device | str
    ) -> LayerStates:
        exact, (states, rows) = torch.promote_types(dtype, torch.float32), counts.allocated
        sizes: list[tuple[tuple[int, ...], torch.dtype]] = [
            ((states, shape.num_heads, shape.key_dim, shape.value_dim), exact),
            ((states, shape.kernel - 1, shape.channels), dtype),
            ((rows, shape.num_key_heads, shape.key_dim), exact),
            ((rows, shape.num_heads, shape.value_dim), exact),
            ((rows, shape.num_heads, shape.num_decays), exact),
            ((rows, shape.channels), dtype),
        ]
        with torch.inference_mode(False):  # a tensor made in inference mode could only be written there
            return cls(*(torch.zeros((layers, *size), dtype=of, device=device) for size, of in sizes))

    def tensors(self) -> list[Tensor]:
        return [self.states, self.past_inputs, self.keys, self.updates, self.decays, self.inputs]

    def unbind(self) -> list[LayerStates]:
        """Each layer of several."""
        return [LayerStates(*parts) for parts in zip(*(tensor.unbind(0) for tensor in self.tensors()), strict=True)]


def committed_state(states_LHKV: Tensor, keys_LMJK: Tensor, updates_LMHV: Tensor, decays_LMHG: Tensor) -> Tensor:
    """The states after M rows, each the parent of the next: e^G S + Σ_j e^(G − G(j)) k(j) u(j)ᵀ, G that of the last."""
    last_LHG = decays_LMHG[:, -1]
    keys_LMHK = keys_LMJK.repeat_interleave(updates_LMHV.shape[2] // keys_LMJK.shape[2], 2)
    weighted_LMHK = keys_LMHK * (last_LHG[:, None] - decays_LMHG).exp()
    return torch.einsum("lmhk,lmhv->lhkv", weighted_LMHK, updates_LMHV).addcmul_(states_LHKV, last_LHG.exp()[..., None])


class StatePool:
    """States and stashes of a stage's recurrent layers.

    Args:
        layers: all layers of the stage.
    """

    def __init__(
        self, layers: Sequence[Layer], dtype: torch.dtype, counts: StateCounts, device: torch.device | str = "cpu"
    ) -> None:
        self.counts, self.device = counts, device
        recurrent = {number: layer for number, layer in enumerate(layers) if isinstance(layer, RecurrentShape)}
        self._planes: list[LayerStates] = []
        self._layers: dict[int, LayerStates] = {}
        for shape in dict.fromkeys(recurrent.values()):
            members = [number for number, other in recurrent.items() if other == shape]
            plane = LayerStates.allocated(shape, len(members), counts, dtype, device)
            self._planes.append(plane)
            self._layers.update(zip(members, plane.unbind(), strict=True))
        self._free_states = list(reversed(range(counts.states)))
        self._free_rows = list(reversed(range(counts.rows)))

    def layer(self, number: int) -> LayerStates:
        """The memory of a layer of the stage."""
        return self._layers[number]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for plane in self._planes for tensor in plane.tensors())

    @property
    def spare_state(self) -> int:
        """A state that no request has: for padding."""
        return self.counts.states + self.counts.snapshots

    @property
    def free(self) -> tuple[int, int]:
        """Numbers of states and of stashes that no request has."""
        return len(self._free_states), len(self._free_rows)

    def take_state(self) -> int:
        """Raises UserError if every state is in use."""
        if not self._free_states:
            raise UserError(
                f"there is memory for the states of {self.counts.states} decode threads, fewer than this answer needs beside "
                "others: give a larger --state-memory, or submit it alone"
            )
        return self._free_states.pop()

    def give_state(self, state: int) -> None:
        self._free_states.append(state)

    def take_rows(self, count: int) -> list[int]:
        """Raises ValueError if there are fewer."""
        if count > len(self._free_rows):
            raise ValueError(f"{count} rows enter recurrent layers, which have memory for {len(self._free_rows)} more in flight")
        taken = self._free_rows[len(self._free_rows) - count :]
        del self._free_rows[len(self._free_rows) - count :]
        return taken[::-1]

    def give_rows(self, rows: Iterable[int]) -> None:
        self._free_rows += rows

    def snapshot(self, place: int) -> int:
        """The state that is snapshot number ``place``."""
        return self.counts.states + place

    def copy_state(self, source: int, target: int) -> None:
        for plane in self._planes:
            plane.states[:, target] = plane.states[:, source]
            plane.past_inputs[:, target] = plane.past_inputs[:, source]

    def clear_state(self, state: int) -> None:
        """Make it the state before the first token."""
        for plane in self._planes:
            plane.states[:, state] = 0
            plane.past_inputs[:, state] = 0

    def commit(self, state: int, path: Sequence[int], remaining: Sequence[int]) -> None:
        """Add rows to a state.

        Args:
            path: stashes of the rows, each the parent of the next, the first a child of the state's last token.
            remaining: stashes of the rows in flight that are descendants of the last, or will be dropped.
        """
        indices, left = (to_device(torch.tensor(rows, dtype=torch.int64), self.device) for rows in (path, remaining))
        for plane in self._planes:
            keys, updates, decays = (tensor[:, indices] for tensor in (plane.keys, plane.updates, plane.decays))
            plane.states[:, state] = committed_state(plane.states[:, state], keys, updates, decays)
            inputs = torch.cat((plane.past_inputs[:, state], plane.inputs[:, indices]), 1)
            plane.past_inputs[:, state] = inputs[:, len(path) :]
            if len(remaining):
                plane.decays[:, left] -= decays[:, -1:]


class LaneStates:
    """The states of one request, and the stashes of its rows in flight.

    Args:
        snapshot: number of the snapshot from which it begins; None: before the first token.
    """

    def __init__(self, pool: StatePool, snapshot: int | None = None) -> None:
        self.pool = pool
        self._states = {0: pool.take_state()}  # by decode thread
        self._rows: list[int] = []  # stashes of the rows of trees, in the order of the cache
        self._threads: list[int] = []  # of these rows
        self._hidden: dict[int, set[int]] = {}  # by thread: stashes of rows in flight that its state contains already
        self._entering: list[int] = []
        self._aside: list[tuple[Tensor, Tensor]] = []  # where states after a chunk go, and the states
        if snapshot is None:
            pool.clear_state(self._states[0])
        else:
            pool.copy_state(pool.snapshot(snapshot), self._states[0])

    def of_thread(self, thread: int) -> int:
        """The state of a decode thread."""
        return self._states[thread]

    def enter(self, count: int) -> list[int]:
        """The stashes of the rows in flight and of ``count`` rows that enter, which ``append`` adds to them. Forgets what entered
        in a forward that has failed.
        """
        self._aside.clear()
        self.pool.give_rows(self._entering)
        self._entering = []
        self._entering = self.pool.take_rows(count)
        return self._rows + self._entering

    def hidden_from(self, threads: Sequence[int]) -> Tensor | None:
        """bool [R, N]: rows in flight that the states of the rows' ``threads`` contain; None if there are none."""
        if not any(self._hidden.get(thread) for thread in threads):
            return None
        rows = self._rows + self._entering
        return torch.tensor([[row in self._hidden.get(thread, ()) for row in rows] for thread in threads])

    def keep_inputs(self, layer: LayerStates, inputs: Tensor) -> None:
        """Keep the last inputs of a chunk's convolution aside, until ``append``."""
        self._aside.append((layer.past_inputs[self._states[0]], inputs))

    def keep_state(self, layer: LayerStates, state: Tensor) -> None:
        """Keep the state after a chunk aside, until ``append``."""
        self._aside.append((layer.states[self._states[0]], state))

    def append(self, threads: Sequence[int] | None) -> None:
        """Add what entered last: a chunk to the past, or rows of ``threads`` to the trees (None: of one thread)."""
        for target, value in self._aside:
            target.copy_(value)
        self._aside.clear()
        self._threads += [0] * len(self._entering) if threads is None else threads
        self._rows += self._entering
        self._entering = []

    def commit(self, committed: Sequence[int], kept: Sequence[int], joining: Mapping[int, Sequence[int]] | None = None) -> None:
        """Commit rows of trees to the past, and drop those that are not kept.

        Args:
            committed, kept: indices of rows; of one thread ``committed`` is a path.
            joining: by decode thread, the rows that its past gains, a path; None for an answer in one thread.
        """
        paths = {0: committed} if joining is None else joining
        stays = {self._rows[row] for row in kept}
        for thread, path in paths.items():
            rows = [self._rows[row] for row in path]
            if rows:
                others = [row for row, of in zip(self._rows, self._threads, strict=True) if of == thread and row not in rows]
                self.pool.commit(self._states[thread], rows, others)
                if joining is not None:
                    self._hidden.setdefault(thread, set()).update(rows)
        self.pool.give_rows(row for row in self._rows if row not in stays)
        self._rows, self._threads = [self._rows[row] for row in kept], [self._threads[row] for row in kept]
        for hidden in self._hidden.values():
            hidden &= stays

    def fork(self, thread: int, parent: int) -> None:
        """Give a new decode thread the state of its parent. Raises UserError as ``StatePool.take_state``."""
        self._states[thread] = self.pool.take_state()
        self.pool.copy_state(self._states[parent], self._states[thread])
        self._hidden[thread] = set(self._hidden.get(parent, ()))

    def end(self, threads: Iterable[int]) -> None:
        """Give back the states of decode threads that have ended."""
        for thread in threads:
            if (state := self._states.pop(thread, None)) is not None:
                self.pool.give_state(state)
                self._hidden.pop(thread, None)

    def save(self, place: int) -> None:
        """Keep the state as snapshot number ``place``."""
        self.pool.copy_state(self._states[0], self.pool.snapshot(place))

    def reset(self) -> None:
        """Drop all rows."""
        self._give_rows()
        self.pool.clear_state(self._states[0])

    def close(self) -> None:
        """Give everything back."""
        self._give_rows()
        self.end(list(self._states))

    def _give_rows(self) -> None:
        self.pool.give_rows(self._rows + self._entering)
        self._rows, self._threads, self._entering = [], [], []
