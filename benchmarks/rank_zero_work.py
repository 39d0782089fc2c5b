"""``python -m benchmarks.rank_zero_work``: rank 0's own CPU time per timestep, by the number of requests that run together.

``deciding`` is its work between two timesteps, for which all stages wait, and ``drafting`` its work while they compute, without
the draft model's forwards. Both are measured in this process, where timesteps are those of an emulated cluster that does not
count this work: so two revisions that decode alike take the same timesteps. ``thread`` and ``process`` are those of a real rank 0
beside two stages, with texts, Redis and transfers; it copies n-grams instead of running a draft model.

Another revision is measured from outside its checkout: ``cd /tmp && PYTHONPATH=CHECKOUT python …/rank_zero_work.py``.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import wraps
from statistics import median
from typing import Any
from unittest.mock import patch

import psutil

from pipedec.client.client import Client
from pipedec.cluster.local import LocalCluster
from pipedec.config import Settings, paper_cluster
from pipedec.core.request import DEFAULT_METHOD, TokenizedRequest
from pipedec.core.sampling import SamplingParams
from pipedec.drafting import DraftModel
from pipedec.engine.build import load_prompter, resolve
from pipedec.engine.local import LocalPipeline, LocalStages
from pipedec.messages.request import PromptRequest
from pipedec.plan.emulation import Emulation
from pipedec.plan.partition import plan
from pipedec.text.prompt import Prompter

_PRESET, _STAGES = "paper-14", 4  # of its 14 stages: all of them would only take longer to run here
_SENTENCES = (
    "The reader opens the file and checks its header.", "A cache keeps what was computed before.",
    "Each worker takes a task from the queue.", "The result is written to the log at once.",
    "If a check fails, the whole batch is refused.", "Old entries are dropped when memory is short.",
    "A lock protects the list of open connections.", "Every message has a number and a sender.",
)  # fmt: skip
_STATS_SECONDS = 2.5  # rank 0 publishes its counters about once per second

# What is no work of rank 0's own: methods by their names now and in revision 26065ad.
_LEFT_OUT: tuple[tuple[type, tuple[str, ...], str], ...] = (
    (LocalStages, ("run_timestep", "advance"), "stages"), (LocalStages, ("end_session", "close"), "stages"),
    (DraftModel, ("expand",), "forwards"),
)  # fmt: skip

Figures = dict[str, float]


def prompt(number: int) -> str:
    """A prompt of about 100 tokens, like no other."""
    source = random.Random(number)
    return f"Question {number}. " + " ".join(source.choice(_SENTENCES) for _ in range(8)) + " What happens next?"


class Spent:
    """CPU seconds of this thread in methods of others."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(("stages", "meanwhile", "forwards"), 0.0)

    def wrap(self, name: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        """The same method. Its time counts under ``name``, and that of a function that it is given under ``meanwhile``."""

        @wraps(inner)
        def timed(*args: Any) -> Any:
            began = time.thread_time()
            found = inner(*[self.wrap("meanwhile", one) if callable(one) else one for one in args])
            self.seconds[name] += time.thread_time() - began
            return found

        return timed


def own_ms(counts: Sequence[int], max_tokens: int, repeats: int) -> dict[int, Figures]:
    """CPU ms per timestep of rank 0's part of an emulated pipeline, by the number of requests; medians of ``repeats``."""
    emulation = Emulation.of_plan(plan(paper_cluster().for_partition(_PRESET), _PRESET))
    emulation = replace(emulation, stages=emulation.stages[:_STAGES], counts_own_work=False)
    spec = replace(resolve(Settings.of(stages=_STAGES, dtype="float32", priors=False)), emulation=emulation)
    pipeline, prompter, found = LocalPipeline.load(spec), load_prompter(spec), dict[int, Figures]()
    with ExitStack() as stack:
        spent = Spent()
        for owner, methods, name in _LEFT_OUT:
            method = next(each for each in methods if hasattr(owner, each))
            stack.enter_context(patch.object(owner, method, spent.wrap(name, getattr(owner, method))))
        for count in counts:
            found[count] = _own_ms(pipeline, prompter, spent, count, max_tokens, repeats)
    return found


def _own_ms(pipeline: LocalPipeline, prompter: Prompter, spent: Spent, count: int, max_tokens: int, repeats: int) -> Figures:
    requests = [
        TokenizedRequest(number, prompter.token_ids(prompt(number), False, max_tokens), _sampling(max_tokens), DEFAULT_METHOD)
        for number in range(count)
    ]
    samples = list[tuple[float, float, int]]()
    for _ in range(1 + repeats):  # the first one warms up
        pipeline.forget_prefixes()
        spent.seconds = dict.fromkeys(spent.seconds, 0.0)
        began = time.thread_time()
        for _verdict in pipeline.run_all({1: requests}):
            pass
        deciding = time.thread_time() - began - spent.seconds["stages"]
        drafting, timesteps = spent.seconds["meanwhile"] - spent.seconds["forwards"], len(pipeline.fill)
        samples.append((1000 * deciding / timesteps, 1000 * drafting / timesteps, timesteps))
    deciding_ms, drafting_ms, several = (median(column) for column in zip(*samples[1:], strict=True))
    return {"timesteps": several, "deciding": deciding_ms, "drafting": drafting_ms}


def process_ms(counts: Sequence[int], max_tokens: int, repeats: int) -> dict[int, Figures]:
    """CPU ms per timestep of a real rank 0 by the number of requests: its main thread, and all its threads."""
    found = dict[int, Figures]()
    with LocalCluster(resolve(Settings.of(stages=2, draft="none", dtype="float32", priors=False))) as cluster:
        assert cluster.scheduler is not None
        client = Client(cluster.scheduler, cluster.check)
        for count in counts:
            samples = list[tuple[float, float, int]]()
            for repeat in range(1 + repeats):
                requests = [
                    PromptRequest(prompt(1000 * repeat + number), method=DEFAULT_METHOD, sampling=_sampling(max_tokens))
                    for number in range(count)
                ]
                first, cpu_before = _timesteps(cluster), _cpu_seconds(cluster)
                for reply in client.ask_all(requests):
                    reply.completed()
                thread, process = (after - before for after, before in zip(_cpu_seconds(cluster), cpu_before, strict=True))
                timesteps = _timesteps(cluster) - first
                samples.append((1000 * thread / timesteps, 1000 * process / timesteps, timesteps))
            thread_ms, whole_ms, several = (median(column) for column in zip(*samples[1:], strict=True))
            found[count] = {"timesteps": several, "thread": thread_ms, "process": whole_ms}
    return found


def _cpu_seconds(cluster: LocalCluster) -> tuple[float, float]:
    """CPU seconds of rank 0's main thread, and of all its threads."""
    process = psutil.Process(cluster.pids[0])
    (main,) = (thread for thread in process.threads() if thread.id == process.pid)
    times = process.cpu_times()
    return main.user_time + main.system_time, times.user + times.system


def _timesteps(cluster: LocalCluster) -> int:
    """Those of an idle cluster since its start."""
    time.sleep(_STATS_SECONDS)
    assert cluster.scheduler is not None
    stats = cluster.scheduler.status().stats
    return stats.timesteps if stats else 0


def _sampling(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure rank 0's own CPU time per timestep.")
    parser.add_argument("--requests", default="1,8,64", help="numbers of requests that run together")
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--no-process", action="store_true", help="start no cluster")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    flags = parser.parse_args()
    grid = [int(count) for count in flags.requests.split(",")], flags.max_tokens, flags.repeats
    tables = {"in one process": own_ms(*grid)} | ({} if flags.no_process else {"real rank 0": process_ms(*grid)})
    if flags.json:
        print(json.dumps(tables))
        return
    for name, table in tables.items():
        for count, figures in table.items():
            print(f"{name}, {count} requests, ms: " + ", ".join(f"{key} {value:.3f}" for key, value in figures.items()))


if __name__ == "__main__":
    main()
