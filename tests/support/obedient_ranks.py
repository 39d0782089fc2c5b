"""What a rank does when a test sends it a signal, and what is slow in it. Ranks import this: it needs little else."""

from __future__ import annotations

import json
import os
import signal
import time
from contextlib import suppress
from functools import wraps
from pathlib import Path
from types import FrameType
from typing import Any

from pipedec.cluster import rank as rank_module
from pipedec.model.captured_graphs import Run
from pipedec.model.stage_layers import StageLayers
from pipedec.model.stage_model import StageModel

SLOW_SECONDS = 4.0


def obey(folder: Path) -> None:
    """From now on SIGUSR1 makes this process write to ``folder`` where its weights are. After SIGUSR2 its next forward lasts
    forever.
    """
    forward, signals = StageModel.forward, list[int]()  # SIGUSR2 that have come
    make, stacks = StageLayers.__init__, list[StageLayers]()

    @wraps(make)
    def make_and_note(self: StageLayers, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        stacks.append(self)

    def show(number: int, frame: FrameType | None) -> None:
        places = sorted(tensor.data_ptr() for stack in stacks for tensor in stack.tensors())
        partial = folder / f"{os.getpid()}.partial"
        partial.write_text(json.dumps(places))
        partial.rename(folder / str(os.getpid()))

    @wraps(forward)
    def forward_or_hang(*args: Any, **kwargs: Any) -> Any:
        if signals:
            endless_file(folder, os.getpid()).touch()
            while True:
                time.sleep(60)
        return forward(*args, **kwargs)

    def compute_forever(number: int, frame: FrameType | None) -> None:
        signals.append(number)

    StageLayers.__init__ = make_and_note  # type: ignore[method-assign]
    StageModel.forward = forward_or_hang  # type: ignore[method-assign]
    signal.signal(signal.SIGUSR1, show)
    signal.signal(signal.SIGUSR2, compute_forever)


def endless_file(folder: Path, pid: int) -> Path:
    """The file that exists once that process computes forever."""
    return folder / f"{pid}.computes-forever"


def obey_slowly(folder: Path) -> None:
    """As ``obey``, but the first forward takes long, as where it loads what it needs.

    As if there were a GPU, forwards are captured; one takes long when there is a file ``wanted``, which is then ``captured``.
    """
    forward, pids = StageModel.forward, set[int]()  # processes may be forked from this one

    @wraps(forward)
    def slow_at_first(*args: Any, **kwargs: Any) -> Any:
        if os.getpid() not in pids:
            pids.add(os.getpid())
            (folder / f"{os.getpid()}.was-slow").touch()
            time.sleep(SLOW_SECONDS)
        return forward(*args, **kwargs)

    def capture(run: Run) -> Run:
        with suppress(FileNotFoundError):
            (folder / "wanted").rename(folder / "captured")
            time.sleep(SLOW_SECONDS)
        return run

    StageModel.forward = slow_at_first  # type: ignore[method-assign]
    rank_module.device_capture = lambda device: capture
    obey(folder)
