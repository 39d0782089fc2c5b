"""Counters and states of a run, as JSON."""

from __future__ import annotations

from pipedec.core.records import Record


class KVUsage(Record, frozen=True):
    """The KV memory of a run, the same on every stage.

    Attributes:
        capacity, used, kept: slots of each stage's pool; those of running requests; those that hold prefixes of ended requests.
        queried_tokens, cached_tokens: tokens of all requests that might have been cached; those of them that were.
    """

    capacity: int
    used: int
    kept: int
    queried_tokens: int
    cached_tokens: int
    pauses: int


class Histogram(Record, frozen=True):
    """How often values fell between ascending bounds.

    ``counts`` has for each bound the values at most it and above the one before, then those above all; ``total`` is their sum.
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
        accepted_tokens: accepted guesses (``Metrics.hits``), so that tokens per refill are 1 + accepted_tokens / drafts.
        accepted_per_pos: the same by depth below the root that entered, from 1; greater depths are left out.
        rows_per_timestep: of timesteps in which rows entered.
        timestep_seconds: of timesteps of a full pipeline.
        corrupted: requests that have failed because a stage computed NaN or infinity.
        passage: timesteps from a row's entry to its verdict, now, of requests that keep the pipeline full.
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
    passage: int = 0


class StageStats(Record, frozen=True):
    """A stage's counters since the run started, published about once per second.

    Attributes:
        rows: computed.
        pruned_rows: dropped without having been accepted, before they were computed or when a verdict pruned their tree.
        compute_seconds: in which rows were computed and verdicts replayed; on an emulated device, its time.
        wait_seconds: in which it waited for the rank before it, while requests were running; not counted for single tasks.
        experts: routed experts that the rows of a timestep passed through, added up over timesteps and layers. A stage that
            replays captured forwards, on a GPU, does not count them.
        expert_layers: layers with experts in these timesteps, added up.
        num_experts: routed experts of a layer; 0 without any.
    """

    rank: int
    timesteps: int
    rows: int
    pruned_rows: int
    compute_seconds: float
    wait_seconds: float
    experts: int = 0
    expert_layers: int = 0
    num_experts: int = 0


class ActivityReport(Record, frozen=True):
    """The activity of a rank, as its lease reports it.

    Attributes:
        kind: ``idle``, ``computing``, ``warming`` (a computation that may take long because it is the first of its kind),
            ``waiting`` (for a transfer), ``loading``, ``meeting`` or ``connecting`` (to another host).
        peer: the rank that it waits for, or whose host it tries to reach.
        seconds: how long the activity had lasted at the time of the report.
        longest_seconds: the longest of its completed timesteps.
        warmed_seconds: how long ago it last was ``warming``; None if it never was.
        link_seconds: the latency of its link to the next rank; 0 if all ranks are on one machine.
        age_seconds: the age of the report, by Redis's clock.
    """

    kind: str
    peer: int | None = None
    seconds: float = 0.0
    longest_seconds: float = 0.0
    warmed_seconds: float | None = None
    link_seconds: float = 0.0
    age_seconds: float = 0.0

    @property
    def began(self) -> float:
        """Seconds since the activity began, if it still lasts."""
        return self.seconds + self.age_seconds

    def __str__(self) -> str:
        """For example ``waiting for rank 2, 3.1 s``."""
        return f"{self.kind}{'' if self.peer is None else f' for rank {self.peer}'}, {self.began:.1f} s"


class Recovery(Record, frozen=True):
    """An epoch that has begun because ranks, or Redis, were lost.

    Attributes:
        lost: ranks whose processes are replaced.
        at_us: when the one before it ended, on Redis's clock, in µs since 1970.
        served_us: when its ranks served; None if they do not yet.
        request: the request that was found to be the cause; None if none was.
    """

    epoch: int
    lost: tuple[int, ...]
    reason: str
    at_us: int
    served_us: int | None = None
    request: int | None = None

    @property
    def seconds(self) -> float | None:
        """How long the run was not served; None while it is not."""
        return None if self.served_us is None else (self.served_us - self.at_us) / 1e6
