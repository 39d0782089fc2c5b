"""A rank of a process group in its own process, controlled through a pipe. For the tests of TorchTransport."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore
from torch.distributed import ProcessGroupGloo

from pipedec.core.errors import PipedecError
from pipedec.core.stage_message import RequestUpdate, StageMessage, Step
from pipedec.core.verdict import Verdict
from pipedec.messages.run import LinkSpeed
from pipedec.transport import torch_distributed
from pipedec.transport.links import STEP_TAG
from pipedec.transport.rendezvous import Rendezvous, file_store
from pipedec.transport.torch_distributed import MESSAGE_TAG, ProcessGroups, TorchTransport, gloo_group

HIDDEN_SIZE = 5
PATIENCE_SECONDS = 60.0  # only bounds a test that hangs; far below the group's own timeout


class Peer:
    """Starts a rank. ``do`` runs a function with its transport there and returns the result, or the text of its error.

    With ``backend`` "nccl" the stages create their own group as usual, but with gloo on CPUs.

    Args:
        device: of the stages; with ``cuda`` each has the GPU of its number, the first one GPU 0.
        variables: of the environment in which the rank connects.
    """

    def __init__(
        self, rank: int, world_size: int, meeting: Path, dtype: torch.dtype, timeout_seconds: float = 600.0,
        backend: str = "gloo", device: str = "cpu", variables: Mapping[str, str] = MappingProxyType({}), depth: int = 4,
    ) -> None:  # fmt: skip
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["pipedec.transport.torch_distributed"])
        self._pipe, theirs = context.Pipe()
        place = (rank, world_size, meeting, timeout_seconds, depth)
        at = "cpu" if rank == 0 or device == "cpu" else f"{device}:{rank - 1}"
        self.process = context.Process(target=_serve, args=(backend, place, dtype, theirs, at, dict(variables)))
        self.process.start()
        theirs.close()

    def order(self, task: Callable[..., Any], *arguments: Any) -> None:
        self._pipe.send((task, arguments))

    def result(self) -> Any:
        assert self._pipe.poll(PATIENCE_SECONDS), "the peer hangs"
        return self._pipe.recv()

    def do(self, task: Callable[..., Any], *arguments: Any) -> Any:
        self.order(task, *arguments)
        return self.result()

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self._pipe.close()


def _serve(
    backend: str, place: tuple[int, int, Path, float, int], dtype: torch.dtype, orders: Connection, device: str,
    variables: Mapping[str, str],
) -> None:  # fmt: skip
    global _device
    os.environ.update(variables)
    torch.set_num_threads(1)
    _device = torch.device(device)
    if _device.type == "cuda":
        torch.cuda.set_device(_device)
    _record_messages()
    rank, world_size, meeting, timeout_seconds, depth = place
    rendezvous = Rendezvous(rank, world_size, file_store(meeting, world_size), timeout_seconds, "lo")
    try:
        groups = GlooGroups if device == "cpu" else ProcessGroups
        transport = TorchTransport(backend, rank, HIDDEN_SIZE, dtype, _device, new_groups=groups, depth=depth)
        transport.join(rendezvous)
    except PipedecError as error:
        orders.send(str(error))
        return
    orders.send("met")
    with suppress(EOFError):
        while True:
            task, arguments = orders.recv()
            try:
                orders.send(task(transport, *arguments))
            except PipedecError as error:
                orders.send(f"{type(error).__name__}: {error}")


class GlooGroups(ProcessGroups):
    """Pairs of stages are connected by gloo, on CPUs, as they are by NCCL on GPUs."""

    nccl_place = "cpu"

    def connect_pair(self, sender: int, device: torch.device) -> Any:
        assert device == torch.device("cpu")
        store = PrefixStore(f"stages {sender}", self.rendezvous.store)
        group = gloo_group(store, self.rendezvous.rank - sender, 2, self.rendezvous.interface)
        _stage_groups[group] = f"{sender}>{sender + 1}"
        return group


_device = torch.device("cpu")  # of this process
_messages: list[tuple[str, int, str]] = []
_stage_groups: dict[ProcessGroupGloo, str] = {}


def _record_messages() -> None:
    """Record the group of every message with activations of its own."""
    for name in ("send", "recv"):
        setattr(ProcessGroupGloo, name, _recording(name, getattr(ProcessGroupGloo, name)))


def _recording(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def recorded(group: ProcessGroupGloo, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        if tag == STEP_TAG:
            _messages.append((name, peer, _stage_groups.get(group, "all")))
        return call(group, tensors, peer, tag)

    return recorded


def messages(transport: TorchTransport) -> list[tuple[str, int, str]]:
    """(call, peer, group) of all activations that were sent or received as a separate message."""
    return _messages


def make_step(num_rows: int, dtype: torch.dtype | None, seed: int, num_threads: int = 0) -> Step:
    """A random step, without activations if ``dtype`` is None; its rows are those of ``num_threads`` threads in turn."""
    generator = torch.Generator().manual_seed(seed)
    token_ids, parents = torch.randint(0, 2**40, (2, num_rows), generator=generator)
    hidden = None if dtype is None else torch.randn(num_rows, HIDDEN_SIZE, generator=generator).to(_device, dtype)
    return Step(token_ids, parents, hidden, torch.arange(num_rows) % num_threads if num_threads else None)


def as_lists(step: Step) -> tuple[Any, ...]:
    """Ids, threads and activations. No threads are thread 0."""
    hidden, threads = step.hidden, [0] * step.num_rows if step.threads is None else step.threads.tolist()
    return step.token_ids.tolist(), step.parents.tolist(), threads, None if hidden is None else (hidden.dtype, hidden.tolist())


def send_message(
    transport: TorchTransport,
    seed: int,
    num_rows: int,
    verdict: Verdict | None,
    dst: int,
    dtype: torch.dtype | None = None,
    num_threads: int = 0,
) -> None:
    """Send a message with an update of one request, or without any; with the verdict that ends the answer the last one."""
    step = make_step(num_rows, dtype, seed, num_threads) if num_rows else None
    updates = (RequestUpdate(seed, verdict=verdict, step=step),) if step or verdict else ()
    transport.send_message(StageMessage(updates, verdict is not None and verdict.finished is not None), dst)


def receive_message(transport: TorchTransport, src: int) -> Any:
    """Step and verdict of the only update, if there is one."""
    message = transport.receive_message(src)
    for _ in range(2):  # to wait twice is harmless
        message.await_hidden()
    if not message.updates:
        return None, None
    (update,) = message.updates
    return as_lists(update.step) if update.step else None, update.verdict


def make_tensors(size: int) -> dict[str, torch.Tensor]:
    return {"scores": torch.arange(float(size)).to(torch.bfloat16), "ids": torch.arange(size)[:, None], "none": torch.zeros(0, 3)}


def described(tensors: Mapping[str, torch.Tensor]) -> list[Any]:
    return [(name, tensor.dtype, tensor.tolist()) for name, tensor in tensors.items()]


def send_tensors(transport: TorchTransport, num_rows: int, size: int, dst: int) -> None:
    step = make_step(num_rows, None, 1) if num_rows else None
    transport.send_message(StageMessage((RequestUpdate(1, step=step),), tensors=make_tensors(size)), dst)


def receive_tensors(transport: TorchTransport, src: int) -> Any:
    return described(transport.receive_message(src).tensors)


def send_bytes(transport: TorchTransport, message: bytes, dst: int) -> None:
    """Send these bytes where a ``StageMessage`` is expected."""
    transport.all_ranks.send([torch.frombuffer(bytearray(message), dtype=torch.uint8)], dst, MESSAGE_TAG).wait()


def close(transport: TorchTransport) -> str:
    transport.close()
    transport.close()  # closing twice is harmless
    return "closed"


def abort_soon(transport: TorchTransport, seconds: float) -> None:
    """Abort from another thread."""
    threading.Timer(seconds, transport.abort).start()


def connect_within(transport: TorchTransport, seconds: float) -> None:
    """How long this rank tries to connect to another one from now on."""
    setattr(torch_distributed, "CONNECT_SECONDS", seconds)  # noqa: B010


def join_again(transport: TorchTransport, rank: int, world_size: int, meeting: Path) -> str:
    """Leave the groups and join those of the next meeting, or say why not."""
    store = file_store(meeting, world_size)
    transport.join(Rendezvous(rank, world_size, store, PATIENCE_SECONDS, "lo"))
    return "joined"


def used(transport: TorchTransport) -> tuple[int, int]:
    """Open file descriptors and threads of this process."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def measured_link(transport: TorchTransport) -> LinkSpeed:
    return transport.measured_link()
