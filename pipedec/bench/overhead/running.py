"""The fixed cost of a timestep on a cluster that runs: traced answers, and what is left of a timestep beside the slowest group.

Knows traces and metrics. The stages compute a real model here, and there is no bare transport to compare with: what is left holds
waiting for the draft or for rows, transfers, verdicts and the scheduler alike. On a GPU a forward counts until its kernels are
launched, so part of it is in what is left.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Annotated

from pipedec.bench.breakdown import PHASES, breakdown, slowest_compute_ms
from pipedec.bench.options import Counts, Positive
from pipedec.bench.record import Row, header, plain
from pipedec.client.reply import Reply
from pipedec.client.running import Running
from pipedec.core import SamplingParams, UserError
from pipedec.flags import Help, check_fields
from pipedec.messages import PromptRequest

PROMPT = "Count from one to one hundred in words."


@dataclass(frozen=True)
class RunningOverheadConfig:
    """What is measured: ``repeats`` traced answers of at least ``timesteps`` timesteps of ``pp`` for every number of rows.

    Attributes:
        rows: rows per timestep: 1 is ``pp``, more are ``pipedec`` with this width, which needs a draft model.

    Raises:
        UserError: a number below 1, or no number.
    """

    rows: Annotated[Counts, Help("Rows per timestep.")] = (1, 32)
    timesteps: Annotated[Positive, Help("Timed timesteps per repeat.")] = 200
    repeats: Annotated[Positive, Help("Times that pipeline and bare gloo take turns; or answers of a running cluster.")] = 3

    def __post_init__(self) -> None:
        check_fields(self)


def measure_running(
    config: RunningOverheadConfig, cluster: Running, on_row: Callable[[Row], None] = lambda row: None
) -> list[Row]:
    """One JSONL row per number of rows; more than one row needs a draft model and is left out without one.

    Times are means over the timesteps of an answer, of which the median over the repeats is taken. ``left_ms`` is what a timestep
    takes beside the forwards of its slowest group of stages; ``breakdown_ms`` are the phases of ``breakdown``, means over stages.

    Raises:
        UserError: the cluster refuses the request, or has no draft model and 1 is not among the rows.
        RankLost, SchedulerLost: the cluster died.
    """
    first, rows = header("overhead", asdict(config)), []
    possible = [num_rows for num_rows in config.rows if num_rows == 1 or cluster.description.draft is not None]
    if not possible:
        raise UserError(f"run {cluster.run_id} has no draft model, so there is nothing but 1 row per timestep: give --rows 1")
    for num_rows in possible:
        rows.append({**first, **_figures(config, cluster, num_rows)})
        on_row(rows[-1])
    return rows


def _figures(config: RunningOverheadConfig, cluster: Running, num_rows: int) -> Row:
    method = "pp" if num_rows == 1 else "pipedec"
    # pp takes as many timesteps per token as there are groups; the first token is the prefill's.
    max_tokens = 1 + math.ceil(config.timesteps / cluster.topology.num_groups)
    options = {} if num_rows == 1 else {"width": num_rows}
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    request = PromptRequest(PROMPT, method=method, sampling=sampling, options=options, trace=True)
    cluster.client.ask(request)  # warms up
    answers = [_times(cluster, cluster.client.follow(request)) for _ in range(config.repeats)]
    described = cluster.description
    return {
        "run": cluster.run_id,
        "stages": cluster.topology.num_stages,
        "groups": cluster.topology.num_groups,
        "dispatch": described.settings.cluster.dispatch,
        "dtype": described.settings.numbers.dtype,
        "ranks": [plain(rank) for rank in described.ranks],
        "target": described.target,
        "method": method,
        "rows": num_rows,
        "timesteps": sum(answer["timesteps"] for answer in answers),
        "repeat_ms": [answer["timestep_ms"] for answer in answers],
        **{name: _median(answers, name) for name in ("timestep_ms", "slowest_compute_ms", "left_ms")},
        "breakdown_ms": {name: _median(answers, name) for name in PHASES},
    }


def _times(cluster: Running, reply: Reply) -> dict[str, float]:
    """The means of one traced answer, in ms, and its number of timesteps."""
    answer, trace = reply.completed(), reply.trace
    timesteps = answer.metrics.timesteps
    timestep_ms, slowest = 1000 * answer.metrics.decode_seconds / timesteps, slowest_compute_ms(trace, cluster.topology)
    phases = breakdown(trace, cluster.topology.num_stages)
    assert slowest is not None and phases is not None, "the answer was traced"
    left_ms = timestep_ms - slowest
    return {"timesteps": timesteps, "timestep_ms": timestep_ms, "slowest_compute_ms": slowest, "left_ms": left_ms, **phases}


def _median(answers: list[dict[str, float]], name: str) -> float:
    return round(statistics.median(answer[name] for answer in answers), 4)
