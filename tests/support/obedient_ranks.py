"""What a rank does when a test sends it a signal."""

from __future__ import annotations

import gc
import json
import os
import signal
from pathlib import Path
from types import FrameType

import torch

from pipedec.model.weights import LayerWeights


def obey(folder: Path) -> None:
    """From now on SIGUSR1 makes this process write to ``folder`` where its weights are. SIGUSR2 makes it compute forever, if it
    computes rows at that moment.
    """

    def show(number: int, frame: FrameType | None) -> None:
        gc.unfreeze()  # or they would not be found
        layers = [found for found in gc.get_objects() if isinstance(found, LayerWeights)]
        places = sorted(value.data_ptr() for layer in layers for value in vars(layer).values() if isinstance(value, torch.Tensor))
        partial = folder / f"{os.getpid()}.partial"
        partial.write_text(json.dumps(places))
        partial.rename(folder / str(os.getpid()))

    def compute_forever(number: int, frame: FrameType | None) -> None:
        while frame is not None and frame.f_code.co_qualname != "StageModel.forward":
            frame = frame.f_back
        if frame is not None:
            endless_file(folder, os.getpid()).touch()
            while True:
                pass

    signal.signal(signal.SIGUSR1, show)
    signal.signal(signal.SIGUSR2, compute_forever)


def endless_file(folder: Path, pid: int) -> Path:
    """The file that exists once that process computes forever."""
    return folder / f"{pid}.computes-forever"
