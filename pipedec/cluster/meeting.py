"""How the ranks of a run meet before any of them loads weights: they compare versions and checkpoints, choose their network
interfaces, make sure that their hosts can connect, agree on slots of KV memory, and find one another.

They exchange cards and addresses on a stream in Redis. Does not know what a rank does afterwards.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

import torch
from msgspec import structs

from pipedec import __version__
from pipedec.checkpoints import COPY_AGAIN, TensorDigests, combined, config_digest, first_difference, part_digests
from pipedec.cluster.lease import RECOVERY_SECONDS
from pipedec.cluster.network import (
    can_connect,
    installed_version,
    interface_address,
    interface_of,
    is_loopback,
    machine_id,
    routed_address,
)
from pipedec.cluster.place import RankPlace
from pipedec.config.environment import configured_interface
from pipedec.core.errors import EpochEnded, PipedecError, RankLost, UserError
from pipedec.engine.activity import Activity
from pipedec.engine.devices import FREED_SECONDS, FreeMemory, free_memory, gpu_id, measured_tokens
from pipedec.families import model_config
from pipedec.hub import HubName
from pipedec.messages.events import AddressEvent, CardEvent, Event, LoadedEvent
from pipedec.messages.run import RankDescription
from pipedec.plan.budgets import agreed_budget, kv_slots, rank_needs
from pipedec.plan.spec import PipelineSpec
from pipedec.scheduler import RankScheduler, calls, read_description, scripts_digest
from pipedec.scheduler.scripts import LEASE_MS
from pipedec.topology import rank_name
from pipedec.transport.rendezvous import MEETING_SECONDS, Rendezvous, Store, StoreServer, join_store
from pipedec.transport.wire import PROTOCOL

LOADING_SECONDS = 3600.0
PROBE_SECONDS = 3.0
LOOPBACK = "127.0.0.1"
logger = logging.getLogger(__name__)
_POLL_SECONDS = 0.2

_Kind = TypeVar("_Kind", CardEvent, AddressEvent, LoadedEvent)
_DONE: Mapping[type[Event], str] = {CardEvent: "come", AddressEvent: "come", LoadedEvent: "load the weights"}


@dataclass(frozen=True)
class Interface:
    """The network interface of a rank's transfers, its address, and why it was chosen."""

    name: str
    address: str
    why: str


@dataclass(frozen=True)
class Met:
    """The results of a meeting of all ranks."""

    rendezvous: Rendezvous
    interface: Interface
    digests: Mapping[str, str]  # of all weights, by model, if the ranks are on several hosts
    own: TensorDigests  # digests of the tensors that this rank reads, by model and name, if there may be several hosts
    kv_slots: int | None  # size of every rank's KV pool, if ranks have measured their memory
    is_alone: bool  # all ranks are on this machine


class RankMemory:
    """The memory of one rank's device, until its weights are loaded. Each rank measures the ``free`` memory of its GPU before any
    of them loads, and the scarcest determines the number of KV slots for all. The run keeps that number: a rank that is replaced
    takes it over, as the others have pools of that size.

    Attributes:
        gpu: identifies the GPU on which it is about to load; empty on a processor, and once it has loaded.
    """

    def __init__(
        self, spec: PipelineSpec, place: RankPlace, device: torch.device, gpu: str | None = None,
        free: FreeMemory = free_memory, patience_seconds: float = FREED_SECONDS,
    ) -> None:  # fmt: skip
        self.gpu = gpu_id(device) if gpu is None else gpu
        self._spec, self._place, self._device = spec, place, device
        self._free, self._patience_seconds = free, patience_seconds

    def kv_bytes(self, ranks: Sequence[int], slots: int) -> int | None:
        """Bytes left for keys and values; None if the number of slots does not depend on them. ``ranks`` are about to load on the
        same GPU, this one included; ``slots`` is the number on which the run agreed in an earlier epoch, 0 if it has not. Raises
        UserError if the GPU has too little memory for these slots, or for the ranks' weights.
        """
        if not self.gpu:
            return None
        spec = self._spec
        settled = slots or (None if spec.measures_memory else kv_slots(spec))
        who = f"{' and '.join(map(rank_name, ranks))} on {self._place.host}"
        tokens = measured_tokens(spec, ranks, self._device, who, settled, self._free, self._patience_seconds)
        return None if settled else tokens * rank_needs(spec, self._place.rank).token_bytes


class Meeting:
    """One rank's part in the meetings of a run: there is one in each epoch in which its process takes part.

    Args:
        memory: of its device; None if that is a processor.
        nccl_versions: versions that must be equal on all stages that request NCCL; empty if this rank does not.

    Attributes:
        loading_seconds: how long this rank has waited, in all meetings, for ranks that load or download.
    """

    def __init__(
        self, scheduler: RankScheduler, place: RankPlace, spec: PipelineSpec, memory: RankMemory | None = None,
        activity: Activity | None = None, nccl_versions: Mapping[str, str] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        self._scheduler = scheduler
        self._place = place
        self._spec = spec
        self._activity = activity or Activity()
        self._memory = memory or RankMemory(spec, place, torch.device("cpu"))
        self._nccl_versions = nccl_versions
        self.loading_seconds = 0.0
        self._position = "0"  # in the stream of the present meeting
        self._events: list[Event] = []  # events that have come in it

    @contextmanager
    def hold(self) -> Iterator[Met]:
        """Meet the other ranks. In the context the ranks connect, while other hosts may still test whether they reach this one.
        Raises UserError if this rank does not match another one (naming both, their hosts and what differs), RankLost if a rank
        did not come in time or two hosts cannot connect, EpochEnded if the epoch has ended.
        """
        self._position, self._events = "0", []
        own = structs.replace(self.card, gpu=self._memory.gpu)
        cards = self._compare_cards(own)
        interface = self._choose_interface(own, cards)
        server = StoreServer(interface.address) if own.rank == 0 else None
        family = socket.AF_INET6 if ":" in interface.address else socket.AF_INET
        with socket.create_server((interface.address, 0), family=family) as listener:
            port = server.port if server else int(listener.getsockname()[1])
            run = read_description(self._scheduler.client, self._scheduler.run_id) if self._scheduler.epoch else None
            slots = run.kv_slots if run else 0  # on which the run agreed in an earlier epoch
            addresses = self._exchange_addresses(own, cards, interface, port, slots)
            store = server.store if server else join_store(addresses[0].address, addresses[0].port)
            yield self._agree(interface, addresses, store, slots, _share_a_machine(cards))

    def _compare_cards(self, own: CardEvent) -> list[CardEvent]:
        """Publish this rank's card. Returns those of all ranks, by rank."""
        self._publish(own)
        cards = self._gather(CardEvent, MEETING_SECONDS)
        check_cards(own, cards[0])
        check_nccl(own, cards[1:], self._nccl_versions)
        hosts = {card.machine: card.host for card in cards}.values()
        logger.info("all %d ranks have come; hosts: %s", len(cards), ", ".join(hosts))
        return cards

    def _choose_interface(self, own: CardEvent, cards: Sequence[CardEvent]) -> Interface:
        planned = next((server.interface for server in self._spec.servers if server.host == self._place.host), None)
        interface = choose_interface(own, cards, configured_interface() or planned)
        if not _share_a_machine(cards):
            use_interface(interface)
        return interface

    def _exchange_addresses(
        self, own: CardEvent, cards: Sequence[CardEvent], interface: Interface, port: int, slots: int
    ) -> list[AddressEvent]:
        """Publish where this rank can be reached, its weights and memory. Returns the same of all ranks, by rank, once weights
        have been compared and hosts reach each other.
        """
        digests = self._own_digests if self._place.has_others_elsewhere else {}
        check_tensors(own, digests, "than the run began with", self._place.digests)
        kv_bytes = self._memory.kv_bytes([card.rank for card in cards if card.gpu == own.gpu], slots)
        self._publish(AddressEvent(own.rank, interface.address, port, digests, kv_bytes))
        addresses = self._gather(AddressEvent, MEETING_SECONDS)
        for card, address in zip(cards[: own.rank], addresses, strict=False):
            check_tensors(own, digests, f"than {_name(card)}", address.digests)
        if self._place.local_rank == 0:
            self._probe(own, cards, addresses)
        return addresses

    def _agree(self, interface: Interface, addresses: Sequence[AddressEvent], store: Store, slots: int, is_alone: bool) -> Met:
        """The results that follow from all addresses, the same on every rank but for its own part."""
        rank = self._place.rank
        rendezvous = Rendezvous(rank, len(addresses), store, MEETING_SECONDS, interface.name)
        models: dict[str, dict[str, str]] = {}  # digests of all tensors that any rank reads
        for address in addresses:
            for model, tensors in address.digests.items():
                models.setdefault(model, {}).update(tensors)
        of_models = {model: combined(tensors) for model, tensors in models.items() if tensors}
        measured = {one.rank: one.kv_bytes for one in addresses if one.kv_bytes is not None}
        agreed = slots or (agreed_budget(self._spec, measured).tokens if measured else None)  # None follows from the settings
        return Met(rendezvous, interface, of_models, addresses[rank].digests, agreed, is_alone)

    def loaded(self, description: RankDescription) -> None:
        """Report to rank 0 that this rank can serve."""
        self._publish(LoadedEvent(description))

    def wait_for_all(self) -> list[RankDescription]:
        """For rank 0: wait until every rank can serve, and close the meeting. Raises as ``hold``."""
        loaded = self._gather(LoadedEvent, LOADING_SECONDS)
        keys = self._scheduler.keys
        self._scheduler.ask(calls.close_answer(keys, keys.meeting))
        return [event.description for event in loaded]

    def _publish(self, event: Event) -> None:
        self._scheduler.publish(self._scheduler.keys.meeting, event)

    @cached_property
    def card(self) -> CardEvent:
        """This rank's host, versions, checkpoints and settings, as it publishes them to the others."""
        speaks_for_host = self._place.local_rank == 0 and self._place.has_others_elsewhere
        parts = self._spec.parts(self._place.rank) if speaks_for_host else []
        configs = {part.key: config_digest(Path(part.model)) for part in parts}
        for part in parts:  # a GGUF file's types are not in what describes it
            if part.key != "bita":
                configs[part.key] += f", {model_config(part.model).formats.title}"
        server = self._scheduler.server_host
        address = (routed_address(server) if server else None) or LOOPBACK
        versions = {
            "pipedec": __version__,
            "torch": torch.__version__.partition("+")[0],
            "llguidance": str(installed_version("llguidance")),
            "protocol in Redis": scripts_digest(),
            "protocol between ranks": PROTOCOL,
            **self._nccl_versions,
        }
        named = {key: HubName.of(model or "") for key, model in self._spec.models.items()}
        settings = {
            "weights": str(self._spec.weights),
            "weights of the draft": str(self._spec.largest_draft_weights),
            "KV slots": f"{kv_slots(self._spec):,} in blocks of {self._spec.kv_block}",
            "--wire-dtype": self._spec.settings.cluster.wire_dtype,
            **{f"commit of the {key}": name.revision for key, name in named.items() if name is not None},
        }
        return CardEvent(self._place.rank, str(self._place.host), machine_id(), address, versions, configs, settings)

    @cached_property
    def _own_digests(self) -> dict[str, dict[str, str]]:
        """Digests of the tensors that this rank reads, by model and name."""
        parts = [part for part in self._spec.parts(self._place.rank) if part.is_read or self._place.lists]
        began = time.monotonic()
        digests = part_digests(parts, self._place.lists)
        logger.info("has the digests of %d tensors after %.1f s", sum(map(len, digests.values())), time.monotonic() - began)
        return digests

    def _gather(self, kind: type[_Kind], seconds: float) -> list[_Kind]:
        """The event of this kind of every rank, by rank. Raises RankLost if one has published none in time, and as ``_check``."""
        now, are_loading = time.monotonic(), False
        deadline = now + seconds
        while True:
            before, now = now, time.monotonic()
            self.loading_seconds += now - before if are_loading else 0.0
            found = {
                event.description.rank if isinstance(event, LoadedEvent) else event.rank: event
                for event in self._events if isinstance(event, kind)
            }  # fmt: skip
            missing = [rank for rank in range(self._place.world_size) if rank not in found]
            if not missing:
                return [found[rank] for rank in sorted(found)]
            are_loading = self._are_loading(missing)
            if now > deadline and not are_loading:
                places = self._spec.places
                names = [rank_name(rank) + (f" on {places[rank].host}" if places else "") for rank in missing]
                raise RankLost(f"{', '.join(names)} did not {_DONE[kind]} within {seconds:.0f} s")
            self._check()
            keys = self._scheduler.keys
            last = {keys.meeting: self._position}
            for _, position, event in self._scheduler.ask(calls.read_answers(keys, last, _POLL_SECONDS)).events:
                self._position = position
                self._events.append(event)

    def _are_loading(self, ranks: Sequence[int]) -> bool:
        """Whether one of these ranks loads its weights, or downloads its part of the checkpoints before it meets the others."""
        found = self._scheduler.activities()
        doing = [found[rank] for rank in ranks if rank in found]
        return any(one.kind == "loading" and one.age_seconds < LEASE_MS / 1000 for one in doing)

    def _check(self) -> None:
        """Raises EpochEnded if the epoch has ended, and PipedecError if another rank has failed."""
        if failure := self._scheduler.failure():
            raise PipedecError(failure)
        if (epoch := self._scheduler.current_epoch()) not in (None, self._scheduler.epoch):
            raise EpochEnded(f"the run is in epoch {epoch}")

    def _probe(self, own: CardEvent, cards: Sequence[CardEvent], addresses: Sequence[AddressEvent]) -> None:
        """Check that this host can connect to every other one. After the first epoch, retry for ``RECOVERY_SECONDS``, in which
        supervisors may replace either host. Raises RankLost, which names both ends, and as ``_check``.
        """
        for card in {card.machine: card for card in reversed(cards) if card.machine != own.machine}.values():  # one of each
            self._activity.begin("connecting", card.rank)
            address = addresses[card.rank]
            deadline = time.monotonic() + (RECOVERY_SECONDS if self._scheduler.epoch else 0.0)
            while reason := can_connect(address.address, address.port, PROBE_SECONDS):
                if time.monotonic() > deadline:
                    raise RankLost(
                        f"{_name(own)} cannot connect to {_name(card)} at {address.address}, port {address.port} ({reason}): "
                        "open all TCP ports between the hosts, or set their interface in cluster.yaml"
                    )
                self._check()
            self._activity.begin("meeting")


def check_cards(own: CardEvent, first: CardEvent) -> None:
    """Raises UserError if this rank has other versions, checkpoints or settings than rank 0."""
    version = "{own} has {name} {mine}, but {other} has {theirs}: install the same version on both"
    check_equal(own, first, version, own.versions, first.versions)
    config = "{own} has another {name} than {other}: copy the same checkpoint to both hosts with `pipedec distribute`"
    check_equal(own, first, config, own.configs, first.configs)
    flags = "give both the same flags, --device and --dtype if their GPUs differ"
    check_equal(own, first, "{own} has {name} {mine}, but {other} has {theirs}: " + flags, own.settings, first.settings)


def check_nccl(own: CardEvent, stages: Sequence[CardEvent], mine: Mapping[str, str]) -> None:
    """Raises UserError if all stages request NCCL, so that it will be used, and this one has other versions than the first."""
    build = "{own} has {name} {mine}, but {other} has {theirs}: install the same build on both, or give --transport gloo"
    if all(mine.keys() <= stage.versions.keys() for stage in stages):
        check_equal(own, stages[0], build, mine, stages[0].versions)


def check_equal(own: CardEvent, first: CardEvent, message: str, mine: Mapping[str, str], theirs: Mapping[str, str]) -> None:
    """Raises UserError with ``message`` for the first name under which two ranks have different values."""
    for name, value in mine.items():
        if name in theirs and value != theirs[name]:
            found = {"mine": value, "theirs": theirs[name]}
            raise UserError(message.format(own=_name(own), other=_name(first), name=name, **found))


def check_tensors(own: CardEvent, mine: TensorDigests, than: str, theirs: TensorDigests) -> None:
    """Raises UserError for the first tensor that differs; ``than`` is the message's phrase for the owner of ``theirs``."""
    if difference := first_difference(mine, theirs):
        model, tensor = difference
        raise UserError(f"{_name(own)} has other weights of the {model} {than} ({tensor}): {COPY_AGAIN}")


def choose_interface(
    own: CardEvent, cards: Sequence[CardEvent], configured: str | None,
    route_to: Callable[[str], str | None] = routed_address,
) -> Interface:  # fmt: skip
    """The network interface for the transfers of rank ``own``: the configured one, else the one that routes to the other hosts.
    ``route_to`` finds the address of this machine from which it reaches another. Raises UserError if there is no such interface,
    or no route.

    The host's own name is not resolved: where it is 127.0.1.1 (Debian, Ubuntu), gloo would wait for the others on the loopback.
    """
    if configured is not None:
        if (address := interface_address(configured)) is None:
            raise UserError(f"{_name(own)} has no network interface {configured} with an address: see `pipedec doctor`")
        return Interface(configured, address, "configured")
    if _share_a_machine(cards):
        return Interface(interface_of(LOOPBACK) or "lo", LOOPBACK, "all ranks are on this machine")
    if not is_loopback(own.address) and (name := interface_of(own.address)):
        return Interface(name, own.address, "it routes to Redis")
    for card in cards:
        address = None if card.machine == own.machine or is_loopback(card.address) else route_to(card.address)
        if address and (name := interface_of(address)):
            return Interface(name, address, f"it routes to {card.host}")
    raise UserError(f"{_name(own)} has no route to the other hosts: set its interface in cluster.yaml, or GLOO_SOCKET_IFNAME")


def use_interface(interface: Interface) -> None:
    """Set NCCL's interface; not to be called on a single machine, where NCCL needs none."""
    os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface.name}")


def _share_a_machine(cards: Sequence[CardEvent]) -> bool:
    return len({card.machine for card in cards}) == 1


def _name(card: CardEvent) -> str:
    return f"{rank_name(card.rank)} on {card.host}"
