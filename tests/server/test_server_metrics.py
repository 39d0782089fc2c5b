"""What Prometheus reads: vLLM's names and labels, figures that follow from the events; and the dashboard that shows them."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.responses import Response
from support.run_stats import described_ranks

from pipedec.config import Settings
from pipedec.core.completion import Completion
from pipedec.core.completion import Metrics as AnswerMetrics
from pipedec.core.errors import SchedulerLost
from pipedec.core.sampling import SamplingParams
from pipedec.messages.request import PromptRequest
from pipedec.messages.run import LinkSpeed, RunDescription
from pipedec.messages.stats import Histogram, KVUsage, Recovery, RunStats, StageStats
from pipedec.scheduler.protocol import RunStatus
from pipedec.server.front import Generation, HttpExchange
from pipedec.server.metrics import ServerMetrics

MONITORING = Path(__file__).resolve().parents[2] / "monitoring"
PART = re.compile(r"_(bucket|sum|count)$")
LABELS = {"model_name": "tiny", "engine": "0"}
KV = KVUsage(capacity=1000, used=250, kept=100, queried_tokens=40, cached_tokens=30, pauses=2)
STATS = RunStats(
    KV, running=2, waiting=1, timesteps=50, prompt_rows=20, root_rows=10, draft_rows=60, mask_rows=5, drafts=10,
    accepted_tokens=25, accepted_per_pos=(15, 10), rows_per_timestep=Histogram((1, 8), (3, 2, 1), 30),
    timestep_seconds=Histogram((0.01, 0.1), (40, 9, 1), 1.5), corrupted=3, passage=6,
)  # fmt: skip
LINKS = (LinkSpeed(0.04, 12.5e6), None, LinkSpeed(0.05, 1e6))
STAGES = (
    StageStats(1, 50, 95, 5, 1.25, 0.5),
    StageStats(2, 50, 80, 20, 1.0, 0.75, 240, 20, 64),
)
STATUS = RunStatus(
    "up", 9, 4, (5, 6, 7), (0, 1, 2), stats=STATS, stages=STAGES, epoch=4, serving=3, recovers=True,
    recoveries=(Recovery(3, (1,), "killed", 1_000_000, 1_750_000), Recovery(4, (2,), "killed", 5_000_000)), num_recoveries=4,
)  # fmt: skip

# Names and labels that vLLM's documentation and its Grafana dashboard have (histograms without their suffixes).
VLLM = [
    "e2e_request_latency_seconds", "generation_tokens_total", "inter_token_latency_seconds", "iteration_tokens_total",
    "kv_cache_usage_perc", "num_preemptions_total", "num_requests_running", "num_requests_waiting",
    "prefix_cache_hits_total", "prefix_cache_queries_total", "prompt_tokens_total", "request_decode_time_seconds",
    "request_generation_tokens", "request_inference_time_seconds", "request_params_max_tokens", "request_params_n",
    "request_prefill_time_seconds", "request_prompt_tokens", "request_queue_time_seconds", "request_success_total",
    "request_time_per_output_token_seconds", "spec_decode_num_accepted_tokens_per_pos_total",
    "spec_decode_num_accepted_tokens_total", "spec_decode_num_draft_tokens_total", "spec_decode_num_drafts_total",
    "time_per_output_token_seconds", "time_to_first_token_seconds",
]  # fmt: skip


def exposition(metrics: ServerMetrics) -> str:
    return bytes(asyncio.run(metrics.response()).body).decode()


def samples(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Values by name and labels, those that every metric has left out."""
    return {
        (sample.name, frozenset(sample.labels.items() - LABELS.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(text: str, name: str, **labels: str) -> float:
    return samples(text)[name, frozenset(labels.items())]


async def status() -> RunStatus:
    return STATUS


async def description() -> RunDescription:
    return RunDescription(Settings.of(target="tiny"), ((1,), (2,)), ((0, 1), (1, 2)), ranks=described_ranks(LINKS))


@pytest.fixture
def metrics() -> ServerMetrics:
    made = ServerMetrics("tiny")
    made.attach(status, description)
    return made


def generation(started: float = 100.0) -> Generation:
    request = PromptRequest((1, 2, 3), sampling=SamplingParams(max_tokens=64))
    return Generation("cmpl-1", "mine", "/v1/completions", "tiny", 2, True, request, 3, "a prompt", started)


def arrive(metrics: ServerMetrics, answer: Generation, count: int, at: float) -> None:
    answer.output_tokens += count
    metrics.tokens(answer, count, at)


def test_all_of_vllms_names_are_there_with_its_labels(metrics: ServerMetrics) -> None:
    names: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(exposition(metrics)):
        for sample in family.samples:
            names.setdefault(PART.sub("", sample.name), set()).update(sample.labels)
    extra = {"request_success_total": {"finished_reason"}, "spec_decode_num_accepted_tokens_per_pos_total": {"position"}}
    for name in VLLM:
        assert names[f"vllm:{name}"] - {"le"} == {"model_name", "engine"} | extra.get(name, set()), name


def test_an_answer_is_counted_and_timed(metrics: ServerMetrics) -> None:
    answer = generation()
    metrics.began(answer)
    arrive(metrics, answer, 1, 100.5)
    arrive(metrics, answer, 3, 100.7)
    arrive(metrics, answer, 1, 101.0)
    figures = AnswerMetrics(prefill_seconds=0.2, queue_seconds=0.3)
    metrics.ended(answer, "length", Completion("pp", 2, 3, metrics=figures))
    text = exposition(metrics)
    assert value(text, "vllm:prompt_tokens_total") == 3 and value(text, "vllm:generation_tokens_total") == 5
    for name, expected in (
        ("time_to_first_token_seconds", 0.5), ("e2e_request_latency_seconds", 1.0), ("request_queue_time_seconds", 0.3),
        ("request_prefill_time_seconds", 0.2), ("request_decode_time_seconds", 0.5), ("request_inference_time_seconds", 0.7),
        ("request_time_per_output_token_seconds", 0.5 / 4), ("request_prompt_tokens", 3), ("request_generation_tokens", 5),
        ("request_params_max_tokens", 64), ("request_params_n", 2),
    ):  # fmt: skip
        assert value(text, f"vllm:{name}_count") == 1
        assert value(text, f"vllm:{name}_sum") == pytest.approx(expected), name
    for name in ("inter_token_latency_seconds", "time_per_output_token_seconds"):
        assert value(text, f"vllm:{name}_count") == 2 and value(text, f"vllm:{name}_sum") == pytest.approx(0.5)
    assert value(text, "vllm:request_success_total", finished_reason="length") == 1
    assert value(text, "vllm:request_success_total", finished_reason="stop") == 0


def test_answers_that_never_began_leave_the_latencies_alone(metrics: ServerMetrics) -> None:
    for reason in ("abort", "error"):
        answer = generation()
        metrics.began(answer)
        metrics.ended(answer, reason, None)
    text = exposition(metrics)
    assert value(text, "vllm:request_success_total", finished_reason="abort") == 1
    assert value(text, "vllm:time_to_first_token_seconds_count") == value(text, "vllm:prompt_tokens_total") == 0


def test_answers_at_the_same_time_are_told_apart(metrics: ServerMetrics) -> None:
    one, other = generation(0.0), generation(1.0)
    for answer in (one, other):
        metrics.began(answer)
    arrive(metrics, one, 1, 2.0)
    arrive(metrics, other, 1, 5.0)
    arrive(metrics, one, 1, 6.0)
    text = exposition(metrics)
    assert value(text, "vllm:time_to_first_token_seconds_sum") == pytest.approx(2.0 + 4.0)
    assert value(text, "vllm:inter_token_latency_seconds_sum") == pytest.approx(4.0)


@pytest.mark.failure_case("H17")
def test_refusals_are_counted_by_route_and_status(metrics: ServerMetrics) -> None:
    for code in (200, 503, 503):
        metrics.responded(HttpExchange("a", "POST", "/v1/completions", code, 0.1))
    text = exposition(metrics)
    assert value(text, "pipedec:http_requests_total", method="POST", handler="/v1/completions", status="503") == 2
    assert value(text, "pipedec:http_request_duration_seconds_count", handler="/v1/completions") == 3


def test_what_the_cluster_tells(metrics: ServerMetrics) -> None:
    text = exposition(metrics)
    expected = {
        "vllm:num_requests_running": 2, "vllm:num_requests_waiting": 5, "vllm:kv_cache_usage_perc": 0.25,
        "vllm:prefix_cache_queries_total": 40, "vllm:prefix_cache_hits_total": 30, "vllm:num_preemptions_total": 2,
        "vllm:spec_decode_num_drafts_total": 10, "vllm:spec_decode_num_draft_tokens_total": 60,
        "vllm:spec_decode_num_accepted_tokens_total": 25, "pipedec:timesteps_total": 50, "pipedec:ranks_alive": 3,
        "vllm:corrupted_requests_total": 3, "pipedec:passage": 6,
        "pipedec:timestep_seconds_sum": 1.5, "pipedec:timestep_seconds_count": 50, "vllm:iteration_tokens_total_count": 6,
        "pipedec:epoch": 4, "pipedec:recoveries_total": 4, "pipedec:recovery_seconds": 0.75,
    }  # fmt: skip
    assert {name: value(text, name) for name in expected} == expected
    by_label = {
        ("vllm:spec_decode_num_accepted_tokens_per_pos_total", "position"): {"0": 15, "1": 10},
        ("vllm:iteration_tokens_total_bucket", "le"): {"1.0": 3, "8.0": 5, "+Inf": 6},
        ("pipedec:rows_total", "kind"): {"prompt": 20, "root": 10, "draft": 60, "mask": 5},
        ("pipedec:kv_slots", "state"): {"used": 250, "kept": 100, "free": 650},
        ("pipedec:stage_rows_total", "stage"): {"1": 95, "2": 80},
        ("pipedec:stage_pruned_rows_total", "stage"): {"1": 5, "2": 20},
        ("pipedec:stage_compute_seconds_total", "stage"): {"1": 1.25, "2": 1.0},
        ("pipedec:stage_wait_seconds_total", "stage"): {"1": 0.5, "2": 0.75},
        ("pipedec:stage_experts_total", "stage"): {"2": 240},
        ("pipedec:stage_expert_layers_total", "stage"): {"2": 20},
        ("pipedec:link_latency_seconds", "rank"): {"0": 0.04, "2": 0.05},
        ("pipedec:link_bytes_per_second", "rank"): {"0": 12.5e6, "2": 1e6},
    }
    for (name, label), values in by_label.items():
        assert {key: value(text, name, **{label: key}) for key in values} == values


def test_a_scrape_before_the_cluster_is_up_or_after_it_is_lost(metrics: ServerMetrics) -> None:
    assert "vllm:num_requests_running{" not in exposition(ServerMetrics("tiny"))

    async def lost() -> RunStatus:
        raise SchedulerLost("cannot reach Redis")

    metrics.attach(lost, description)
    text = exposition(metrics)
    assert "vllm:num_requests_running{" not in text and "vllm:generation_tokens_total{" in text


def test_many_scrapes_ask_the_cluster_once_a_second() -> None:
    asked = []
    seconds = iter([5.0, 5.2, 5.9, 6.1, 6.9, 7.2])
    metrics = ServerMetrics("tiny", now=lambda: next(seconds))

    async def counted() -> RunStatus:
        asked.append(1)
        return replace(STATUS, waiting=len(asked))

    metrics.attach(counted, description)
    found = [value(exposition(metrics), "vllm:num_requests_waiting") for _ in range(6)]
    assert found == [2, 2, 2, 3, 3, 4]


def test_a_scrape_while_the_cluster_is_asked_for_another_has_the_last_status() -> None:
    seconds = iter([5.0, 6.0, 6.0])
    metrics = ServerMetrics("tiny", now=lambda: next(seconds))

    async def scrapes() -> list[Response]:
        asked, answers = asyncio.Event(), asyncio.Event()

        async def slow() -> RunStatus:
            asked.set()
            await answers.wait()
            return STATUS

        metrics.attach(status, description)
        await metrics.response()
        metrics.attach(slow, description)
        first = asyncio.create_task(metrics.response())
        await asked.wait()
        second = await metrics.response()
        answers.set()
        return [await first, second]

    for response in asyncio.run(scrapes()):
        assert value(bytes(response.body).decode(), "vllm:num_requests_waiting") == 5


def targets() -> list[tuple[str, str]]:
    """The expressions that the dashboard shows, each with a name."""
    panels = json.loads((MONITORING / "grafana.json").read_text())["panels"]
    return [(f"{panel['id']}_{target['refId']}", target["expr"]) for panel in panels for target in panel.get("targets", [])]


def test_every_metric_of_the_dashboard_exists(metrics: ServerMetrics) -> None:
    metrics.responded(HttpExchange("a", "POST", "/v1/completions", 200, 0.1))
    known = {name for name, _ in samples(exposition(metrics))}
    asked = {name for _, expression in targets() for name in re.findall(r"\b(?:vllm|pipedec):[a-z0-9_]+", expression)}
    assert asked <= known, asked - known
    wanted = {name for name in known if name.startswith("pipedec:") or name.removeprefix("vllm:") in VLLM}
    unseen = {PART.sub("", name) for name in wanted} - {PART.sub("", name) for name in asked}
    assert unseen <= {"vllm:time_per_output_token_seconds"}, "metrics that no panel shows"


@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool (Debian: prometheus)")
def test_promtool_accepts_the_metrics_the_configuration_and_the_expressions(metrics: ServerMetrics, tmp_path: Path) -> None:
    metrics.responded(HttpExchange("a", "POST", "/v1/completions", 200, 0.1))
    told = subprocess.run(["promtool", "check", "metrics"], input=exposition(metrics), capture_output=True, text=True)
    # vLLM's own names break some of Prometheus' habits.
    habits = ("no help text", "non-histogram and non-summary metrics", "should not", "should have", "colons")
    complaints = [line for line in (told.stdout + told.stderr).splitlines() if not any(habit in line for habit in habits)]
    assert complaints == [], complaints
    subprocess.run(["promtool", "check", "config", MONITORING / "prometheus.yml"], check=True, capture_output=True)
    rules = [{"record": f"panel:{name}", "expr": expression.replace("$__rate_interval", "1m")} for name, expression in targets()]
    path = tmp_path / "rules.json"  # JSON is YAML
    path.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    checked = subprocess.run(["promtool", "check", "rules", path], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
