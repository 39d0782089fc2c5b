"""Runs: how they are described to their clients, and what they have counted."""

from __future__ import annotations

from collections.abc import Mapping

from pipedec.config import NONE, Settings
from pipedec.core import Record


class Choice(Record, frozen=True):
    """A choice that a rank has made, and the reason."""

    name: str
    why: str


class RankDescription(Record, frozen=True):
    """Where a rank runs, and how it computes and sends.

    Attributes:
        host: in cluster.yaml, else what the machine calls itself.
        device: ``cpu``, or a GPU as its driver names it.
        dtype: of its model, with what its weights are quantized to.
        transport: the backend of the steps that it sends.
        interface: its network interface.
        attention: the kernel of its layers.
        remarks: what else a user should know.
        since_epoch: in which its process has loaded its weights.
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

    def __str__(self) -> str:
        sending = f"{self.transport.name} over {self.interface.name} ({self.transport.why}; {self.interface.why})"
        attention = f"{self.attention.name} attention ({self.attention.why})"
        computing = f"{self.device}, {self.dtype.name} ({self.dtype.why})"
        return "; ".join([computing, sending, attention, *self.remarks])


class BitaDescription(Record, frozen=True):
    """A trained BiTA (see ``BitaConfig``)."""

    num_masks: int
    num_prompt_tokens: int
    prompting: str


class RunDescription(Record, frozen=True):
    """A run as its clients see it: how its pipeline is cut, and what it is made of.

    Attributes:
        groups: the stage ranks of each group (see ``Topology``).
        layers: for each stage, its first layer of the target and the layer after its last.
        settings: completed: every model is a directory or ``none``, and the dtype of the target is never ``auto``. With a
            ``draft_dtype`` of ``auto`` rank 0 has chosen: ``ranks`` have what each computes in.
        emulation: name of the emulated partition.
        ranks: where each rank runs, and how.
        digests: of the weights by model (``target``, ``draft``, ``bita``), where ranks on several hosts have compared them.
        trained_bita: what ``bita`` holds.
        kv_slots: of every rank's KV pool, if ranks have measured their GPUs' memory; in all epochs the same. 0 if it follows from
            the settings.
    """

    settings: Settings
    groups: tuple[tuple[int, ...], ...]
    layers: tuple[tuple[int, int], ...]
    emulation: str | None = None
    ranks: tuple[RankDescription, ...] = ()
    digests: Mapping[str, str] = {}
    trained_bita: BitaDescription | None = None
    kv_slots: int = 0

    @property
    def target(self) -> str:
        """The directory of the target."""
        return str(self.settings.models.target)

    @property
    def draft(self) -> str | None:
        """The directory of the draft; None without one."""
        return None if self.settings.models.draft == NONE else self.settings.models.draft

    @property
    def bita(self) -> str | None:
        """The directory of the BiTA; None without one."""
        return None if self.settings.models.bita == NONE else self.settings.models.bita


class KVUsage(Record, frozen=True):
    """The KV memory of a run, the same on every stage.

    Attributes:
        capacity: slots of each stage's pool.
        used: slots of running requests.
        kept: slots that hold prefixes of ended requests.
        queried_tokens: tokens of all requests that might have been cached.
        cached_tokens: those of them that were.
        pauses: how often a request was paused.
    """

    capacity: int
    used: int
    kept: int
    queried_tokens: int
    cached_tokens: int
    pauses: int


class Histogram(Record, frozen=True):
    """How often values fell between bounds.

    Attributes:
        bounds: ascending.
        counts: for each bound the values at most it and above the one before; then those above all.
        total: sum of the values.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float


class RunStats(Record, frozen=True):
    """Rank 0's counters since the run started, published about once per second.

    Attributes:
        running: requests in the pipeline now.
        waiting: requests that rank 0 has taken and that wait for KV memory now.
        timesteps: in which requests were running.
        prompt_rows, root_rows, draft_rows, mask_rows: rows that entered the pipeline: of prompts (and of answers that go on
            after a pause), roots of trees, which are certain, other tokens of trees, which are guesses, and masks.
        drafts: roots that entered an empty pipeline.
        accepted_tokens: guesses that were accepted (``Metrics.hits``); so 1 + accepted_tokens / drafts is tokens per refill.
        accepted_per_pos: the same by their depth below the root that entered, from 1; deeper ones are left out.
        rows_per_timestep: of timesteps in which rows entered.
        timestep_seconds: of timesteps of a full pipeline.
        corrupted: requests that have failed because a stage computed NaN or infinity.
    """

    kv: KVUsage
    running: int
    waiting: int
    timesteps: int
    prompt_rows: int
    root_rows: int
    draft_rows: int
    mask_rows: int
    drafts: int
    accepted_tokens: int
    accepted_per_pos: tuple[int, ...]
    rows_per_timestep: Histogram
    timestep_seconds: Histogram
    corrupted: int = 0


class StageStats(Record, frozen=True):
    """A stage's counters since the run started, published about once per second.

    Attributes:
        rows: computed.
        pruned_rows: dropped without having been accepted, before they were computed or when a verdict pruned their tree.
        compute_seconds: in which rows were computed and verdicts replayed; on an emulated device, its time.
        wait_seconds: in which it waited for the rank before it, while requests were running; not counted for single tasks.
    """

    rank: int
    timesteps: int
    rows: int
    pruned_rows: int
    compute_seconds: float
    wait_seconds: float
