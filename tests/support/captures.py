"""Ways to capture a forward on a CPU, in the place of CUDA graphs."""

from __future__ import annotations

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from pipedec.model.captured_graphs import Run


class Frozen:
    """Like a CUDA graph: a replay repeats the operations on the same tensors, and no line of Python runs again.

    Attributes:
        captures, replays: how many there were.
        memory: for each capture, the addresses of the tensors that its graph reads and writes.
    """

    def __init__(self) -> None:
        self.captures = self.replays = 0
        self.memory: list[set[int]] = []

    def __call__(self, run: Run) -> Run:
        self.captures += 1
        graph = make_fx(run)()
        tensors = [value for value in vars(graph).values() if isinstance(value, torch.Tensor)]
        self.memory.append({tensor.untyped_storage().data_ptr() for tensor in [*tensors, *graph.buffers()]})

        def replay() -> None:
            self.replays += 1
            graph()

        return replay


class Repeated(Frozen):
    """Runs the Python function again, which is much faster to set up."""

    def __call__(self, run: Run) -> Run:
        self.captures += 1

        def replay() -> None:
            self.replays += 1
            run()

        return replay


class Compiled(Frozen):
    """As one graph of ``torch.compile``, which refuses whatever would break it into several."""

    def __call__(self, run: Run) -> Run:
        self.captures += 1
        compiled: Run = torch.compile(run, fullgraph=True, backend="aot_eager", dynamic=False)
        return compiled
