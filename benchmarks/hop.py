"""``python -m benchmarks.hop``: the latency of one hop of pipedec's transport over that of a bare TCP socket, between two hosts.

Rank 0 sends rows without activations and gets as many with activations back: two hops. The bare socket (TCP_NODELAY) carries the
same bytes. With several round trips in flight, as many messages are on their way as in a pipeline whose links are long. After an
idle time TCP has forgotten how much it may send at once, as before the first timestep of a request.
"""

from __future__ import annotations

import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from statistics import median
from threading import Thread
from typing import Annotated

import click
import msgspec
import torch
from msgspec import Meta
from rich.console import Console

from benchmarks.output import Out, append, titled_table
from pipedec.bench.options import Counts, Positive
from pipedec.bench.record import Row, check_writable, header
from pipedec.cluster.network import interface_address
from pipedec.core.errors import UserError
from pipedec.core.stage_message import RequestUpdate, StageMessage, Step
from pipedec.core.values import check_fields
from pipedec.flags import Help, options_of, own_options, run_command
from pipedec.transport.rendezvous import Rendezvous, Store, StoreServer, join_store
from pipedec.transport.torch_distributed import TorchTransport
from pipedec.transport.wire import pack_message

_IDLE_TIMES = 5
_SECONDS = 60.0  # for the other side to come, and for any transfer
_LENGTHS = struct.Struct("!II")  # of a message over the bare socket, and of its answer


@dataclass(frozen=True)
class HopConfig:
    """The grid of a measurement. Raises UserError for a number below 1, or no number."""

    rows: Annotated[Counts, Help("Rows of a message.")] = (1, 16, 64)
    in_flight: Annotated[Counts, Help("Round trips in flight.")] = (1, 8)
    hidden_size: Annotated[Positive, Help("Size of the activations.", flag="--hidden")] = 192
    round_trips: Annotated[Positive, Help("Round trips of a measurement.")] = 40
    repeats: Annotated[Positive, Help("Times that transport and bare socket take turns.")] = 3
    idle_seconds: Annotated[
        float, Meta(ge=0), Help("Idle time before each of five more round trips; 0 leaves them out.", "SECONDS", "--idle")
    ] = 1.0

    def __post_init__(self) -> None:
        check_fields(self)


class Ways:
    """Both ways of one side, connected to the other: ``rank`` 0 asks, rank 1 answers."""

    def __init__(self, rank: int, store: Store, address: str, interface: str, config: HopConfig) -> None:
        self._hidden_size = config.hidden_size
        self.transport = TorchTransport(
            "gloo", rank, config.hidden_size, torch.float32, torch.device("cpu"), depth=max(config.in_flight)
        )
        self.transport.join(Rendezvous(rank, 2, store, _SECONDS, interface))
        if rank == 0:
            with socket.create_server((address, 0)) as listener:
                listener.settimeout(_SECONDS)
                store.set("port", str(listener.getsockname()[1]))
                self.socket = listener.accept()[0]
        else:
            self.socket = socket.create_connection((address, int(store.get("port"))), _SECONDS)
        self.socket.settimeout(None)  # MSG_WAITALL waits for all only without
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def rows(self, rank: int, num_rows: int) -> StageMessage:
        """A message of ``rank``, whose rows have activations if it is a stage."""
        ids = torch.arange(num_rows)
        hidden = torch.zeros(num_rows, self._hidden_size) if rank else None
        return StageMessage((RequestUpdate(0, step=Step(ids, ids, hidden)),))

    def answer(self) -> None:
        """Answer over both until the other side has finished."""
        bare = Thread(target=self._answer_bare)
        bare.start()
        while not (asked := self.transport.receive_message(0)).ends_session:
            self.transport.send_message(self.rows(1, asked.num_rows), 0)
        bare.join()

    def _answer_bare(self) -> None:
        while lengths := self.socket.recv(_LENGTHS.size, socket.MSG_WAITALL):
            asked, answered = _LENGTHS.unpack(lengths)
            self.socket.recv(asked, socket.MSG_WAITALL)
            self.socket.sendall(bytes(answered))

    def both(self, num_rows: int) -> dict[str, tuple[Callable[[], object], Callable[[], object]]]:
        """For each way, the functions that ask for an answer with so many rows, and that wait for one."""
        asked, answered = (self.rows(rank, num_rows) for rank in (0, 1))
        lengths = [pack_message(one)[0].nbytes for one in (asked, answered)]
        message = _LENGTHS.pack(*lengths) + bytes(lengths[0])
        return {
            "transport": (lambda: self.transport.send_message(asked, 1), lambda: self.transport.receive_message(1)),
            "socket": (lambda: self.socket.sendall(message), lambda: self.socket.recv(lengths[1], socket.MSG_WAITALL)),
        }

    def close(self) -> None:
        self.transport.send_message(StageMessage(ends_session=True), 1)
        self.socket.close()
        self.transport.close()


@contextmanager
def connected(address: str, interface: str, config: HopConfig, announce: Callable[[int], None]) -> Iterator[Ways]:
    """Rank 0's side, once the other one has joined the port that ``announce`` gets."""
    server = StoreServer(address)
    server.store.set("config", msgspec.json.encode(config).decode())
    announce(server.port)
    ways = Ways(0, server.store, address, interface, config)
    yield ways
    ways.close()


def answer(address: str, port: int, interface: str) -> None:
    """The side of rank 1, until the other one has finished."""
    store = join_store(address, port)
    config = msgspec.json.decode(store.get("config"), type=HopConfig)
    Ways(1, store, address, interface, config).answer()


def measure(ways: Ways, config: HopConfig) -> list[Row]:
    """A row for every number of ``rows`` and of round trips in flight: the median hop in ms of both ways, and their ratio. A row
    with ``in_flight`` 0 is that of the first message after an idle time.
    """
    first, rows = header("hop", asdict(config)), []
    for num_rows in config.rows:
        both = ways.both(num_rows)
        for in_flight in (*config.in_flight, *([0] if config.idle_seconds else [])):
            hops_ms: dict[str, list[float]] = {name: [] for name in both}
            for _ in range(config.repeats if in_flight else _IDLE_TIMES):
                for name, (ask, wait) in both.items():
                    if in_flight:
                        hops_ms[name] += _hops_ms(ask, wait, config.round_trips, in_flight)
                    else:
                        time.sleep(config.idle_seconds)
                        hops_ms[name] += _hops_ms(ask, wait, 1, 1)
            ms = {name: round(median(values), 3) for name, values in hops_ms.items()}
            rows.append({**first, "rows": num_rows, "in_flight": in_flight, "ms": ms, "ratio": ms["transport"] / ms["socket"]})
    return rows


def _hops_ms(ask: Callable[[], object], wait: Callable[[], object], round_trips: int, in_flight: int) -> list[float]:
    """Half the time from each question to its answer."""
    asked, hops_ms, left = deque[float](), [], round_trips
    for _ in range(round_trips):
        while left and len(asked) < in_flight:
            asked.append(time.perf_counter())
            ask()
            left -= 1
        wait()
        hops_ms.append(500 * (time.perf_counter() - asked.popleft()))
    return hops_ms


@click.command()
@options_of(HopConfig, "config")
@own_options
def hop(
    config: HopConfig,
    interface: Annotated[str, Help("Network interface of this host.", "NAME")],
    join: Annotated[str | None, Help("Answer the host that shows this address (default: measure).", "HOST:PORT")] = None,
    out: Out = None,
) -> None:
    """Measure one hop between two hosts: start it on one, then on the other one with the --join that it shows."""
    if (own := interface_address(interface)) is None:
        raise UserError(f"this host has no interface {interface} with an address")
    if join is not None:
        address, _, port = join.rpartition(":")
        answer(address, int(port), interface)
        return
    check_writable(out)
    with connected(own, interface, config, lambda port: print(f"--join {own}:{port}", flush=True)) as ways:
        measured = measure(ways, config)
    table = titled_table(
        "One hop", ("rows", "in flight", "transport, ms", "bare socket, ms", "ratio"), "In flight 0: after an idle time."
    )
    for row in measured:
        table.add_row(*map(str, (row["rows"], row["in_flight"], *row["ms"].values(), round(row["ratio"], 2))))
    Console().print(table)
    append(out, measured)


if __name__ == "__main__":
    run_command(hop)
