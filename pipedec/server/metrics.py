"""Metrics for Prometheus: vLLM's names, labels and buckets where it has them, so that its dashboards show this server; else ours.

Latencies and counts of answers are this front-end's own. The cluster's figures are read on request, at most once a second, and
are the same at every front-end of a cluster.
"""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString
from starlette.responses import Response

from pipedec.core.completion import Completion
from pipedec.core.errors import PipedecError
from pipedec.messages.run import RunDescription
from pipedec.messages.stats import Histogram as HistogramCounts
from pipedec.messages.stats import RunStats
from pipedec.scheduler.protocol import RunStatus
from pipedec.server.front import Generation, HttpExchange, Observer

ENGINE = "0"  # vLLM numbers the engines of a server; a cluster is one
REASONS = ("stop", "length", "abort", "error")
_STATUS_SECONDS = 1.0
_TTFT_SECONDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0,
    2560.0,
)  # fmt: skip
_TOKEN_SECONDS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
_REQUEST_SECONDS = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
_TOKENS = tuple(factor * 10**power for power in range(6) for factor in (1, 2, 5))
_CHOICES = (1, 2, 5, 10, 20)

Family = type[CounterMetricFamily] | type[GaugeMetricFamily]
StatusOf = Callable[[], Awaitable[RunStatus]]
DescriptionOf = Callable[[], Awaitable[RunDescription | None]]


class ServerMetrics(Observer):
    """The metrics of one front-end; ``now`` is a clock, in seconds."""

    def __init__(self, model_name: str, now: Callable[[], float] = time.monotonic) -> None:
        disable_created_metrics()  # a series more for each metric, which no dashboard reads
        self._labels = {"model_name": model_name, "engine": ENGINE}
        self._registry = CollectorRegistry()
        self._cluster = ClusterMetrics(self._labels)
        self._registry.register(self._cluster)
        self._sources: tuple[StatusOf, DescriptionOf] | None = None
        self._now = now
        self._asked = -math.inf
        self._arrivals: dict[Generation, tuple[float, float]] = {}  # when the first and the last token arrived
        self._ttft = self._histogram("time_to_first_token_seconds", "Time to first token.", _TTFT_SECONDS)
        self._between = self._histogram("inter_token_latency_seconds", "Time between arrivals of tokens.", _TOKEN_SECONDS)
        text = "The older name of inter_token_latency_seconds."
        self._between_old = self._histogram("time_per_output_token_seconds", text, _TOKEN_SECONDS)
        text = "Time per output token after the first, by request."
        self._tpot = self._histogram("request_time_per_output_token_seconds", text, _TOKEN_SECONDS)
        self._e2e = self._histogram("e2e_request_latency_seconds", "From the request to the end of its answer.", _REQUEST_SECONDS)
        self._queue = self._histogram("request_queue_time_seconds", "Waiting for a place in the pipeline.", _REQUEST_SECONDS)
        self._prefill = self._histogram("request_prefill_time_seconds", "Prefill.", _REQUEST_SECONDS)
        self._decode = self._histogram("request_decode_time_seconds", "From the first token to the last.", _REQUEST_SECONDS)
        self._inference = self._histogram("request_inference_time_seconds", "Prefill and decode.", _REQUEST_SECONDS)
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of requests whose answers have begun.")
        self._generation_tokens = self._counter("generation_tokens", "Generated tokens.")
        self._prompt_lengths = self._histogram("request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
        self._answer_lengths = self._histogram("request_generation_tokens", "Generated tokens of an answer.", _TOKENS)
        self._limits = self._histogram("request_params_max_tokens", "max_tokens of a request.", _TOKENS)
        self._choices = self._histogram("request_params_n", "n of a request.", _CHOICES)
        self._success = Counter(
            "vllm:request_success", "Answers that have ended, by the reason.", [*self._labels, "finished_reason"],
            registry=self._registry,
        )  # fmt: skip
        for reason in REASONS:
            self._success.labels(**self._labels, finished_reason=reason)
        self._exchanges = Counter(
            "pipedec:http_requests", "HTTP requests that were answered.", ["method", "handler", "status"], registry=self._registry
        )
        self._exchange_seconds = Histogram(
            "pipedec:http_request_duration_seconds", "Until the response had ended.", ["handler"], buckets=_REQUEST_SECONDS,
            registry=self._registry,
        )  # fmt: skip

    def _histogram(self, name: str, text: str, bounds: Sequence[float]) -> Histogram:
        metric = Histogram("vllm:" + name, text, list(self._labels), buckets=bounds, registry=self._registry)
        return metric.labels(**self._labels)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter("vllm:" + name, text, list(self._labels), registry=self._registry).labels(**self._labels)

    def attach(self, status: StatusOf, description: DescriptionOf) -> None:
        self._sources = status, description

    def began(self, generation: Generation) -> None:
        self._choices.observe(generation.n)
        self._limits.observe(generation.request.sampling.max_tokens)

    def tokens(self, generation: Generation, count: int, arrived: float) -> None:
        self._generation_tokens.inc(count)
        first, last = self._arrivals.get(generation, (arrived, None))
        self._arrivals[generation] = first, arrived
        if last is None:
            self._ttft.observe(arrived - generation.started)
            self._prompt_tokens.inc(generation.prompt_tokens)
            return
        self._between.observe(arrived - last)
        self._between_old.observe(arrived - last)

    def ended(self, generation: Generation, reason: str, completion: Completion | None) -> None:
        self._success.labels(**self._labels, finished_reason=reason).inc()
        arrivals = self._arrivals.pop(generation, None)
        if arrivals is None or completion is None:
            return
        first, last = arrivals
        self._prompt_lengths.observe(generation.prompt_tokens)
        self._answer_lengths.observe(generation.output_tokens)
        self._e2e.observe(last - generation.started)
        decode, prefill = last - first, completion.metrics.prefill_seconds
        self._queue.observe(completion.metrics.queue_seconds or 0.0)
        self._prefill.observe(prefill)
        self._decode.observe(decode)
        self._inference.observe(prefill + decode)
        if generation.output_tokens > 1:
            self._tpot.observe(decode / (generation.output_tokens - 1))

    def responded(self, exchange: HttpExchange) -> None:
        self._exchanges.labels(exchange.method, exchange.route, str(exchange.status)).inc()
        self._exchange_seconds.labels(exchange.route).observe(exchange.seconds)

    async def response(self) -> Response:
        """The response to ``/metrics``. A cluster that does not answer leaves its own metrics out."""
        if self._sources is not None and (now := self._now()) >= self._asked + _STATUS_SECONDS:
            self._asked = now
            status, description = self._sources
            try:
                self._cluster.status, self._cluster.description = await status(), await description()
            except PipedecError:
                self._cluster.status = None
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_LATEST)


class ClusterMetrics(Collector):
    """A cluster's counters as metrics: read from its last status, never counted here."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        self._labels = labels
        self.status: RunStatus | None = None  # without one there are no metrics
        self.description: RunDescription | None = None

    def collect(self) -> Iterator[Metric]:
        status = self.status
        if status is None:
            return
        for_memory = 0 if status.stats is None else min(status.stats.waiting, len(status.running))
        yield self._gauge("vllm:num_requests_running", "Requests in the pipeline.", len(status.running) - for_memory)
        yield self._gauge("vllm:num_requests_waiting", "Requests that wait.", status.waiting + for_memory)
        yield self._gauge("pipedec:ranks_alive", "Ranks with a valid lease.", len(status.alive))
        if status.stats is not None:
            yield from self._of_stats(status.stats)
        for name, text in (
            ("rows", "Rows that a stage has computed."),
            ("pruned_rows", "Rows that a stage has dropped without their being accepted."),
            ("compute_seconds", "Time in which a stage computed."),
            ("wait_seconds", "Time in which a stage waited for rows."),
        ):
            values = {str(stage.rank): getattr(stage, name) for stage in status.stages}
            yield self._by("stage", CounterMetricFamily, f"pipedec:stage_{name}", text, values)
        routed = [stage for stage in status.stages if stage.num_experts]
        for name, text in (
            ("experts", "Routed experts that the rows of a timestep passed through, added up over layers and timesteps."),
            ("expert_layers", "Layers with experts in these timesteps: those experts by these are the mean of a layer."),
        ):
            values = {str(stage.rank): getattr(stage, name) for stage in routed}
            yield self._by("stage", CounterMetricFamily, f"pipedec:stage_{name}", text, values)
        ranks = () if self.description is None else self.description.ranks
        links = {str(rank.rank): rank.link for rank in ranks if rank.link is not None}
        for name, text in (
            ("latency_seconds", "Latency, one way, of the link from a rank to the one to which it sends, if ranks are apart."),
            ("bytes_per_second", "Rate of that link, at least."),
        ):
            values = {rank: getattr(link, name) for rank, link in links.items()}
            yield self._by("rank", GaugeMetricFamily, f"pipedec:link_{name}", text, values)
        yield self._gauge("pipedec:epoch", "Of the run: it begins a new one when ranks, or Redis, are lost.", status.epoch)
        yield self._counter("pipedec:recoveries", "Epochs that have begun because something was lost.", status.num_recoveries)
        served = [one for one in status.recoveries if one.served_us is not None]
        seconds = (served[-1].seconds or 0.0) if served else 0.0
        yield self._gauge("pipedec:recovery_seconds", "How long the last recovery took until ranks served again.", seconds)

    def _of_stats(self, stats: RunStats) -> Iterator[Metric]:
        kv = stats.kv
        yield self._gauge("vllm:kv_cache_usage_perc", "KV memory in use; 1 is all of it.", kv.used / kv.capacity)
        yield self._counter("vllm:prefix_cache_queries", "Tokens that might have been cached.", kv.queried_tokens)
        yield self._counter("vllm:prefix_cache_hits", "Those of them that were.", kv.cached_tokens)
        yield self._counter("vllm:num_preemptions", "Answers that were paused for want of KV memory.", kv.pauses)
        slots = {"used": kv.used, "kept": kv.kept, "free": kv.capacity - kv.used - kv.kept}
        yield self._by("state", GaugeMetricFamily, "pipedec:kv_slots", "Slots of each stage's KV pool.", slots)
        prefix = "vllm:spec_decode_num_"
        yield self._counter(prefix + "drafts", "Roots that entered an empty pipeline.", stats.drafts)
        yield self._counter(prefix + "draft_tokens", "Rows that entered as guesses.", stats.draft_rows)
        yield self._counter(prefix + "accepted_tokens", "Guesses that were right.", stats.accepted_tokens)
        positions = {str(position): count for position, count in enumerate(stats.accepted_per_pos)}
        text = "Right guesses by their depth below the root that entered."
        yield self._by("position", CounterMetricFamily, prefix + "accepted_tokens_per_pos", text, positions)
        yield self._counter("vllm:corrupted_requests", "Requests for which a stage computed NaN or infinity.", stats.corrupted)
        yield self._gauge("pipedec:passage", "Timesteps from entry to verdict in a full pipeline.", stats.passage)
        yield self._counter("pipedec:timesteps", "Timesteps of the pipeline.", stats.timesteps)
        yield self._histogram("pipedec:timestep_seconds", "Duration of a timestep.", stats.timestep_seconds)
        yield self._histogram("vllm:iteration_tokens_total", "Rows that entered in a timestep.", stats.rows_per_timestep)
        rows = {"prompt": stats.prompt_rows, "root": stats.root_rows, "draft": stats.draft_rows, "mask": stats.mask_rows}
        yield self._by("kind", CounterMetricFamily, "pipedec:rows", "Rows that entered the pipeline.", rows)

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _by(self, label: str, kind: Family, name: str, text: str, values: Mapping[str, float]) -> Metric:
        family = kind(name, text, labels=[*self._labels, label])
        for value, count in values.items():
            family.add_metric([*self._labels.values(), value], count)
        return family

    def _histogram(self, name: str, text: str, counts: HistogramCounts) -> Metric:
        bounds = [*map(floatToGoString, counts.bounds), "+Inf"]
        family = HistogramMetricFamily(name, text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), list(zip(bounds, accumulate(counts.counts), strict=True)), counts.total)
        return family
