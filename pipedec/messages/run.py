"""The description of a run for clients, as JSON."""

from __future__ import annotations

from collections.abc import Mapping

from pipedec.config import NONE, Settings
from pipedec.core.records import Record


class Choice(Record, frozen=True):
    """A choice that a rank has made, and the reason."""

    name: str
    why: str


class LinkSpeed(Record, frozen=True):
    """The speed of the link from a rank to the one to which it sends, as measured when the ranks met.

    Attributes:
        latency_seconds: of one way, half the shortest round trip.
        bytes_per_second: at least. A burst of a few hundred milliseconds is over before TCP uses all of a long link.
    """

    latency_seconds: float
    bytes_per_second: float

    def __str__(self) -> str:
        return f"{1000 * self.latency_seconds:.3g} ms, at least {8e-6 * self.bytes_per_second:,.0f} Mbit/s"


class RankDescription(Record, frozen=True):
    """Where a rank runs, and how it computes and sends.

    Attributes:
        host: its name in cluster.yaml, else the machine's own.
        device: ``cpu``, or the driver's name of a GPU.
        dtype: of its model, with the format of quantized weights.
        weights: how they are kept, if the checkpoint has them in fewer bits.
        transport, interface: of the steps that it sends.
        attention: the kernel of its layers.
        remarks: further notes for users.
        since_epoch: the epoch in which its process has loaded its weights.
        link: to the next rank, or from the last to rank 0; None if all ranks are on one machine.
    """

    rank: int
    host: str
    device: str
    dtype: Choice
    transport: Choice
    interface: Choice
    attention: Choice
    remarks: tuple[str, ...] = ()
    since_epoch: int = 0
    link: LinkSpeed | None = None
    weights: Choice | None = None

    def __str__(self) -> str:
        sending = f"{self.transport.name} over {self.interface.name} ({self.transport.why}; {self.interface.why})"
        attention = f"{self.attention.name} attention ({self.attention.why})"
        computing = f"{self.device}, {self.dtype.name} ({self.dtype.why})"
        weights = [] if self.weights is None else [f"weights {self.weights.name} ({self.weights.why})"]
        links = [] if self.link is None else [f"to the next rank {self.link}"]
        return "; ".join([computing, *weights, sending, *links, attention, *self.remarks])


class BitaDescription(Record, frozen=True):
    """A trained BiTA (see ``BitaConfig``)."""

    num_masks: int
    num_prompt_tokens: int
    prompting: str


class RunDescription(Record, frozen=True):
    """A run's description for clients: its settings, and how its pipeline is cut and computed.

    Attributes:
        groups: see ``Topology``.
        layers: for each stage, its first layer of the target and the layer after its last.
        settings: completed: every model is a directory or ``none``, and the dtype of the target is never ``auto``. With a
            ``draft_dtype`` of ``auto`` rank 0 has chosen: ``ranks`` have what each computes in.
        emulation: name of the emulated partition.
        digests: of the weights by model (``target``, ``draft``, ``bita``), where ranks on several hosts have compared them.
        kv_slots: of every rank's KV pool, if ranks have measured their GPUs' memory; in all epochs the same. 0 if it follows from
            the settings.
        vocab_size: embeddings of the target, of which its tokenizer may name more or fewer. 0 without a target.
    """

    settings: Settings
    groups: tuple[tuple[int, ...], ...]
    layers: tuple[tuple[int, int], ...]
    emulation: str | None = None
    ranks: tuple[RankDescription, ...] = ()
    digests: Mapping[str, str] = {}
    trained_bita: BitaDescription | None = None
    kv_slots: int = 0
    vocab_size: int = 0

    @property
    def target(self) -> str:
        """The directory of the target."""
        return str(self.settings.models.target)

    @property
    def ring_latency_seconds(self) -> float:
        """The sum of the latencies of all links around the ring of ranks; 0 if all are on one machine."""
        return sum(rank.link.latency_seconds for rank in self.ranks if rank.link is not None)

    @property
    def draft(self) -> str | None:
        """The directory of the draft; None without one."""
        return None if self.settings.models.draft == NONE else self.settings.models.draft

    @property
    def bita(self) -> str | None:
        """The directory of the BiTA; None without one."""
        return None if self.settings.models.bita == NONE else self.settings.models.bita
