"""A rank of a process group in its own process, controlled through a pipe. For the tests of TorchTransport."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pipedec.core import Envelope, PipedecError, Step, Update, Verdict
from pipedec.transport.rendezvous import Rendezvous, file_store
from pipedec.transport.torch_distributed import _ENVELOPE_TAG, BACKENDS, TorchTransport

HIDDEN_SIZE = 5
PATIENCE_SECONDS = 60.0  # only bounds a test that hangs; far below the group's own timeout


class Peer:
    """Starts a rank. ``do`` runs a function with its transport there and returns the result, or the text of its error.

    With ``backend`` "nccl" the stages create their own group as usual, but with gloo on CPUs.
    """

    def __init__(
        self, rank: int, world_size: int, meeting: Path, dtype: torch.dtype, timeout_seconds: float = 600.0, backend: str = "gloo"
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["pipedec.transport.torch_distributed"])
        self._pipe, theirs = context.Pipe()
        place = (rank, world_size, meeting, timeout_seconds)
        self.process = context.Process(target=_serve, args=(backend, place, dtype, theirs))
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


def _serve(backend: str, place: tuple[int, int, Path, float], dtype: torch.dtype, orders: Connection) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    _replace_nccl_by_gloo()
    _record_groups()
    rank, world_size, meeting, timeout_seconds = place
    rendezvous = Rendezvous(rank, world_size, file_store(meeting, world_size), timeout_seconds)
    try:
        transport = TorchTransport(backend, rendezvous, HIDDEN_SIZE, dtype, torch.device("cpu"))
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


def _replace_nccl_by_gloo() -> None:
    BACKENDS["nccl"] = ("cpu",)
    new_group = dist.new_group

    def new_gloo_group(ranks: range, backend: str, device_id: torch.device, **options: Any) -> Any:
        assert (backend, device_id) == ("nccl", torch.device("cpu"))
        return new_group(ranks, backend="gloo", **options)

    dist.new_group = new_gloo_group


_messages: list[tuple[str, int, str]] = []


def _record_groups() -> None:
    """Record the group of every message of a step's own. Not the first messages of envelopes, which the group sends itself."""
    for name in ("send", "isend", "recv"):
        setattr(dist, name, _recording(name, getattr(dist, name)))


def _recording(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def recorded(tensor: torch.Tensor, peer: int, group: Any) -> Any:
        _messages.append((name, peer, group.group_desc))
        return call(tensor, peer, group)

    return recorded


def messages(transport: TorchTransport) -> list[tuple[str, int, str]]:
    """(call, peer, group) of all steps that were sent or received as a separate message."""
    return _messages


def make_step(num_rows: int, dtype: torch.dtype | None, seed: int, num_threads: int = 0) -> Step:
    """A random step, without activations if ``dtype`` is None; its rows are those of ``num_threads`` threads in turn."""
    generator = torch.Generator().manual_seed(seed)
    token_ids, parents = torch.randint(0, 2**40, (2, num_rows), generator=generator)
    hidden = None if dtype is None else torch.randn(num_rows, HIDDEN_SIZE, generator=generator).to(dtype)
    return Step(token_ids, parents, hidden, torch.arange(num_rows) % num_threads if num_threads else None)


def as_lists(step: Step) -> tuple[Any, ...]:
    """Ids, threads and activations. No threads are thread 0."""
    hidden, threads = step.hidden, [0] * step.num_rows if step.threads is None else step.threads.tolist()
    return step.token_ids.tolist(), step.parents.tolist(), threads, None if hidden is None else (hidden.dtype, hidden.tolist())


def send(transport: TorchTransport, num_rows: int, dtype: torch.dtype | None, seed: int, dst: int) -> None:
    transport.send(make_step(num_rows, dtype, seed), dst)


def receive(transport: TorchTransport, num_rows: int, src: int) -> Any:
    return as_lists(transport.receive(num_rows, src))


def send_envelope(
    transport: TorchTransport,
    seed: int,
    num_rows: int,
    verdict: Verdict | None,
    dst: int,
    dtype: torch.dtype | None = None,
    num_threads: int = 0,
) -> None:
    """Send an envelope with an update of one request, or without any; with the verdict that ends the answer the last one."""
    step = make_step(num_rows, dtype, seed, num_threads) if num_rows else None
    updates = (Update(seed, verdict=verdict, step=step),) if step or verdict else ()
    transport.send_envelope(Envelope(updates, verdict is not None and verdict.finished is not None), dst)


def receive_envelope(transport: TorchTransport, src: int) -> Any:
    """Step and verdict of the only update, if there is one."""
    updates = transport.receive_envelope(src).updates
    if not updates:
        return None, None
    (update,) = updates
    return as_lists(update.step) if update.step else None, update.verdict


def send_two_requests(transport: TorchTransport, num_rows: int, dtype: torch.dtype | None, dst: int) -> None:
    """Rows of requests 5 and 3 with a verdict between them."""
    first, second = (Update(number, step=make_step(num_rows, dtype, number)) for number in (5, 3))
    transport.send_envelope(Envelope((first, Update(4, verdict=Verdict.of(9)), second)), dst)


def receive_requests(transport: TorchTransport, src: int) -> Any:
    """Step and verdict of every request, in order."""
    updates = transport.receive_envelope(src).updates
    return [(update.number, as_lists(update.step) if update.step else None, update.verdict) for update in updates]


def send_bytes(transport: TorchTransport, message: bytes, dst: int) -> None:
    """Send ``message`` where an envelope is expected."""
    transport._group.send([torch.frombuffer(bytearray(message), dtype=torch.uint8)], dst, _ENVELOPE_TAG).wait()


def close(transport: TorchTransport) -> str:
    transport.close()
    transport.close()  # closing twice is harmless
    return "closed"
