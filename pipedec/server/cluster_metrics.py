"""A cluster's counters as metrics: read from its last status, never counted here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from pipedec.messages import Histogram, RunStats, StageStats
from pipedec.scheduler.protocol import RunStatus

Family = type[CounterMetricFamily] | type[GaugeMetricFamily]


class ClusterMetrics(Collector):
    """A collector for prometheus_client.

    Attributes:
        status: the last one; None to say nothing.
    """

    def __init__(self, labels: Mapping[str, str]) -> None:
        self._labels = labels
        self.status: RunStatus | None = None

    def collect(self) -> Iterator[Metric]:
        if self.status is None:
            return
        yield from self._of_requests(self.status)
        if (stats := self.status.stats) is not None:
            yield from self._of_memory(stats)
            yield from self._of_speculation(stats)
            yield from self._of_timesteps(stats)
        yield from self._of_stages(self.status.stages)
        yield from self._of_recoveries(self.status)

    def _of_requests(self, status: RunStatus) -> Iterator[Metric]:
        for_memory = 0 if status.stats is None else min(status.stats.waiting, len(status.running))
        yield self._gauge("vllm:num_requests_running", "Requests in the pipeline.", len(status.running) - for_memory)
        yield self._gauge("vllm:num_requests_waiting", "Requests that wait.", status.waiting + for_memory)
        yield self._gauge("pipedec:ranks_alive", "Ranks with a valid lease.", len(status.alive))

    def _of_recoveries(self, status: RunStatus) -> Iterator[Metric]:
        yield self._gauge("pipedec:epoch", "Of the run: it begins a new one when ranks, or Redis, are lost.", status.epoch)
        yield self._counter("pipedec:recoveries", "Epochs that have begun because something was lost.", status.num_recoveries)
        served = [(one.at_us, one.served_us) for one in status.recoveries if one.served_us is not None]
        seconds = (served[-1][1] - served[-1][0]) / 1e6 if served else 0.0
        yield self._gauge("pipedec:recovery_seconds", "How long the last recovery took until ranks served again.", seconds)

    def _of_memory(self, stats: RunStats) -> Iterator[Metric]:
        kv = stats.kv
        yield self._gauge("vllm:kv_cache_usage_perc", "KV memory in use; 1 is all of it.", kv.used / kv.capacity)
        yield self._counter("vllm:prefix_cache_queries", "Tokens that might have been cached.", kv.queried_tokens)
        yield self._counter("vllm:prefix_cache_hits", "Those of them that were.", kv.cached_tokens)
        yield self._counter("vllm:num_preemptions", "Answers that were paused for want of KV memory.", kv.pauses)
        slots = {"used": kv.used, "kept": kv.kept, "free": kv.capacity - kv.used - kv.kept}
        yield self._by("state", GaugeMetricFamily, "pipedec:kv_slots", "Slots of each stage's KV pool.", slots)

    def _of_speculation(self, stats: RunStats) -> Iterator[Metric]:
        prefix = "vllm:spec_decode_num_"
        yield self._counter(prefix + "drafts", "Roots that entered an empty pipeline.", stats.drafts)
        yield self._counter(prefix + "draft_tokens", "Rows that entered as guesses.", stats.draft_rows)
        yield self._counter(prefix + "accepted_tokens", "Guesses that were right.", stats.accepted_tokens)
        positions = {str(position): count for position, count in enumerate(stats.accepted_per_pos)}
        text = "Right guesses by their depth below the root that entered."
        yield self._by("position", CounterMetricFamily, prefix + "accepted_tokens_per_pos", text, positions)

    def _of_timesteps(self, stats: RunStats) -> Iterator[Metric]:
        yield self._counter("vllm:corrupted_requests", "Requests for which a stage computed NaN or infinity.", stats.corrupted)
        yield self._counter("pipedec:timesteps", "Timesteps of the pipeline.", stats.timesteps)
        yield self._histogram("pipedec:timestep_seconds", "Duration of a timestep.", stats.timestep_seconds)
        yield self._histogram("vllm:iteration_tokens_total", "Rows that entered in a timestep.", stats.rows_per_timestep)
        rows = {"prompt": stats.prompt_rows, "root": stats.root_rows, "draft": stats.draft_rows, "mask": stats.mask_rows}
        yield self._by("kind", CounterMetricFamily, "pipedec:rows", "Rows that entered the pipeline.", rows)

    def _of_stages(self, stages: Sequence[StageStats]) -> Iterator[Metric]:
        for name, text, value_of in (
            ("rows", "Rows that a stage has computed.", lambda stage: stage.rows),
            ("pruned_rows", "Rows that a stage has dropped without their being accepted.", lambda stage: stage.pruned_rows),
            ("compute_seconds", "Time in which a stage computed.", lambda stage: stage.compute_seconds),
            ("wait_seconds", "Time in which a stage waited for rows.", lambda stage: stage.wait_seconds),
        ):
            values = {str(stage.rank): value_of(stage) for stage in stages}
            yield self._by("stage", CounterMetricFamily, f"pipedec:stage_{name}", text, values)

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _by(self, label: str, kind: Family, name: str, text: str, values: Mapping[str, float]) -> Metric:
        """A family with a further label."""
        family = kind(name, text, labels=[*self._labels, label])
        for value, count in values.items():
            family.add_metric([*self._labels.values(), value], count)
        return family

    def _histogram(self, name: str, text: str, counts: Histogram) -> Metric:
        bounds = [*map(floatToGoString, counts.bounds), "+Inf"]
        family = HistogramMetricFamily(name, text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), list(zip(bounds, accumulate(counts.counts), strict=True)), counts.total)
        return family
