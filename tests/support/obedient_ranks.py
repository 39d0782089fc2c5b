"""What ranks do that a test prepares (see ``PreparedRanks``). They import this module: it needs little that they do not."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from importlib import import_module
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, NoReturn

import torch

import pipedec.cluster.meeting
from pipedec.cluster import rank as rank_module
from pipedec.core.stage_message import NewRequest, Step
from pipedec.engine.build import load_stage
from pipedec.messages.stats import ActivityReport
from pipedec.model import LaneRows
from pipedec.model.captured_graphs import Run
from pipedec.model.stage_layers import StageLayers
from pipedec.model.stage_model import StageModel
from pipedec.scheduler import RankScheduler
from pipedec.stage.worker import Lane
from pipedec.transport.torch_distributed import ProcessGroups, gloo_group

SLOW_SECONDS = 4.0
GPU_BYTES = 4 * 10**9
_dying = False


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
            _hang()
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

    As if there were a GPU, forwards are captured, few of them before requests arrive; one takes long when there is a file
    ``wanted``, which is then ``captured``.
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
    setattr(rank_module, "device_capture", lambda device: capture)  # noqa: B010
    setattr(import_module("pipedec.model.warm_up"), "usual_rows", lambda rows: [rows])  # noqa: B010
    obey(folder)


def load_for_hours(folder: Path) -> None:
    """While ranks meet, only the hours in a file ``clock`` pass. A stage does not load while there is a file of ``delays``, and
    its connections break if there is ``breaks-RANK``. A file ``waits-EPOCH`` shows that a rank waits for one that loads.
    """
    load, connect, activities = load_stage, ProcessGroups.connect, RankScheduler.activities

    @wraps(load)
    def load_later(spec: Any, rank: int, *args: Any) -> Any:
        while delays(folder, rank).exists():
            (folder / f"{os.getpid()}.loads").touch()
            time.sleep(0.02)
        return load(spec, rank, *args)

    @wraps(connect)
    def connect_or_break(self: ProcessGroups) -> Any:
        group = connect(self)
        with suppress(FileNotFoundError):
            (folder / f"breaks-{self.rendezvous.rank}").unlink()
            raise RuntimeError("the link breaks")
        return group

    @wraps(activities)
    def show(self: RankScheduler) -> dict[int, ActivityReport]:
        found = activities(self)
        if any(one.kind == "loading" for one in found.values()):
            (folder / f"waits-{self.epoch}").touch()
        return found

    def now() -> float:
        return 3600.0 * len((folder / "clock").read_text())

    (folder / "clock").touch()
    setattr(rank_module, "load_stage", load_later)  # noqa: B010
    setattr(ProcessGroups, "connect", connect_or_break)  # noqa: B010
    setattr(RankScheduler, "activities", show)  # noqa: B010
    for module in (rank_module, pipedec.cluster.meeting):
        setattr(module, "time", SimpleNamespace(monotonic=now, sleep=time.sleep))  # noqa: B010


def delays(folder: Path, rank: int) -> Path:
    """The file as long as which that rank does not load."""
    return folder / f"delays-{rank}"


RAISES_SEED, KILLS_SEED = 666, 667


def suffer(folder: Path) -> None:
    """A request with one of these seeds makes the first stage raise, or kills it, at its second row."""
    make, enter, seeds = Lane.__init__, Lane.enter, dict[Lane, int | None]()

    @wraps(make)
    def note(self: Lane, opening: NewRequest, *args: Any) -> None:
        make(self, opening, *args)
        seeds[self] = opening.sampling.seed

    @wraps(enter)
    def suffer_then(self: Lane, step: Step) -> LaneRows:
        if step.hidden is None and self.cache.length > 0:
            if seeds[self] == KILLS_SEED:
                os.kill(os.getpid(), signal.SIGKILL)
            if seeds[self] == RAISES_SEED:
                raise IndexError("there is no such row")
        return enter(self, step)

    setattr(Lane, "__init__", note)  # noqa: B010
    setattr(Lane, "enter", suffer_then)  # noqa: B010


def pretend_gpus(folder: Path) -> None:
    """Ranks compute on the CPU but believe that each has a GPU of its own, whose free memory is in a file. Asked
    for that, a GPU also leaves a file that is named after the process."""

    def mem_get_info(device: torch.device) -> tuple[int, int]:
        free = int(free_file(folder).read_text())
        (folder / f"{os.getpid()}.asked").touch()
        return free, GPU_BYTES

    torch.cuda.mem_get_info = mem_get_info  # type: ignore[assignment]
    setattr(pipedec.cluster.meeting, "gpu_id", lambda device: f"GPU-{os.getpid()}")  # noqa: B010


def free_file(folder: Path) -> Path:
    """Bytes that are free on every GPU."""
    return folder / "free"


def hangs_on_loss(folder: Path) -> None:
    """Ranks that request NCCL get groups of gloo over which a transfer from or to a lost peer never ends.

    Their abort hangs, too, and leaves a file in ``folder``. From SIGUSR1 on a rank dies instead of its next transfer to the
    next stage, which has been told that it comes.
    """
    _stand_in(folder, _hang)


def aborts_on_loss(folder: Path) -> None:
    """As ``hangs_on_loss``, but a transfer from or to a lost peer aborts the process."""
    _stand_in(folder, os.abort)


def _stand_in(folder: Path, fail: Callable[[], NoReturn]) -> None:
    def connect_pair(groups: ProcessGroups, sender: int, device: torch.device) -> _Pair:
        own = groups.rendezvous
        return _Pair(gloo_group(groups.pair_store(sender), own.rank - sender, 2, own.interface), folder, fail)

    replaced = {
        "nccl_place": "cpu",
        "versions": staticmethod(lambda: {"NCCL": "a stand-in"}),
        "connect_pair": connect_pair,
    }
    for name, value in replaced.items():
        setattr(ProcessGroups, name, value)
    signal.signal(signal.SIGUSR1, _die_soon)


def _die_soon(number: int, frame: Any) -> None:
    global _dying
    _dying = True


def _hang() -> NoReturn:
    while True:
        time.sleep(60)


class _Pair:
    """A group of two stages."""

    def __init__(self, group: Any, folder: Path, fail: Callable[[], NoReturn]) -> None:
        self._group, self._folder, self._fail = group, folder, fail

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> _Work:
        if _dying:
            os.kill(os.getpid(), signal.SIGKILL)
        return _Work(self._attempt(lambda: self._group.send(tensors, peer, tag)), self._attempt)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> _Work:
        return _Work(self._attempt(lambda: self._group.recv(tensors, peer, tag)), self._attempt)

    def abort(self) -> None:
        (self._folder / f"{os.getpid()}.aborts").touch()
        _hang()

    def _attempt(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except RuntimeError:
            self._fail()


class _Work:
    def __init__(self, work: Any, attempt: Callable[[Callable[[], Any]], Any]) -> None:
        self._work, self._attempt = work, attempt

    def wait(self) -> None:
        self._attempt(self._work.wait)
