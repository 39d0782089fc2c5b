"""Options of ``pipedec train`` commands that compute: where they write, in which numbers they compute, and on which device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pipedec.engine.devices import chosen_device
from pipedec.flags import Help, options_of, partial_of
from pipedec.train.run import Run
from pipedec.transport.replicas import local_rank

PartialRun = Callable[..., Run]
Compiled = Annotated[bool, Help("Use torch.compile (needs a C++ compiler).", flag="--compile/--no-compile")]
run_options = partial_of(Run, "run", ("out", "work", "threads"))
threads_run_options = partial_of(Run, "run")


@dataclass(frozen=True)
class DeviceFlags:
    """What forward passes compute in, and where."""

    dtype: Annotated[Literal["float32", "bfloat16"], Help("Data type of forward passes.")] = "float32"
    device: Annotated[Literal["auto", "cpu", "cuda"], Help("Where to train.")] = "auto"

    def chosen(self) -> dict[str, Any]:
        """Fields of ``Run``. Raises UserError if there is no such device."""
        return {"dtype": self.dtype, "device": chosen_device(self.device, local_rank())}


device_options = options_of(DeviceFlags, "device")
