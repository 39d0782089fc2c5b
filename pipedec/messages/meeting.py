"""Messages that ranks exchange before they connect."""

from __future__ import annotations

from collections.abc import Mapping

from pipedec.messages.encoding import EventRecord
from pipedec.messages.run import RankDescription


class CardEvent(EventRecord, frozen=True, tag="card"):
    """A rank's description of itself before the ranks connect.

    Attributes:
        host: in cluster.yaml, else what the machine calls itself.
        machine: the same for ranks that share a machine and its network, and for no others.
        address: its own address on the way to Redis.
        versions: of pipedec, torch, llguidance and the protocols in Redis and between ranks.
        configs: digests of what is not weights, by model.
        settings: what follows from its flags and must be the same everywhere.
        gpu: the identifier of the GPU on which it will load its weights; empty on a processor, and once they are loaded.
    """

    rank: int
    host: str
    machine: str
    address: str
    versions: Mapping[str, str]
    configs: Mapping[str, str]
    settings: Mapping[str, str] = {}
    gpu: str = ""


class AddressEvent(EventRecord, frozen=True, tag="address"):
    """Where a rank can be reached by the others.

    Attributes:
        port: a port on which it listens until all ranks have connected; on rank 0, the one of the store in which they meet.
        kv_bytes: for which it has measured memory for keys and values; None if it has not.
        digests: of the tensors that the rank reads, by model and name, if there are several machines.
    """

    rank: int
    address: str
    port: int
    digests: Mapping[str, Mapping[str, str]]
    kv_bytes: int | None = None


class LoadedEvent(EventRecord, frozen=True, tag="loaded"):
    """A rank has loaded its weights."""

    description: RankDescription
