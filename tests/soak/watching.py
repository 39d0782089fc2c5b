"""``python -m soak.watching``: the cost of being watched, as milliseconds per token with a watcher over those without one."""

from __future__ import annotations

import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import exp, log
from pathlib import Path
from typing import Annotated

import click

from benchmarks.output import Preset, StageCount
from pipedec.bench.options import Positive
from pipedec.bench.record import Row, append_rows, check_writable, header, plain
from pipedec.bench.sweep.pipelines import ModelPair, Shape, emulated
from pipedec.client.client import Client
from pipedec.client.run_handle import RunHandle
from pipedec.cluster.local import LocalCluster
from pipedec.config import paper_cluster
from pipedec.core.errors import PipedecError
from pipedec.core.request import DEFAULT_METHOD
from pipedec.core.sampling import SamplingParams
from pipedec.core.values import check_fields
from pipedec.flags import Help, options_of, own_options, run_command
from pipedec.messages.request import PromptRequest
from pipedec.scheduler import ClientScheduler
from pipedec.scheduler.protocol import WATCH_SECONDS

_NOTICED_SECONDS = WATCH_SECONDS + 2.0  # after which rank 0 has noticed that a watcher has come or gone
_RESAMPLES = 4000
_PROMPT = "Count from one to one hundred in words."


@dataclass(frozen=True)
class WatchingConfig:
    """The answers that are timed: ``rounds`` of watched, unwatched, unwatched, watched, each of ``answers`` answers.

    Raises UserError if a number is below 1.
    """

    rounds: Annotated[Positive, Help("Rounds of watched, unwatched, unwatched, watched answers.")] = 8
    answers: Annotated[Positive, Help("Answers in each of these four parts of a round.")] = 4
    tokens: Annotated[Positive, Help("Tokens of an answer.", flag="--max-tokens")] = 128
    method: Annotated[str, Help("Method that is measured.", "NAME")] = DEFAULT_METHOD
    prompt: Annotated[str, Help("The question.", "TEXT")] = _PROMPT

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def request(self) -> PromptRequest:
        return PromptRequest(self.prompt, method=self.method, sampling=SamplingParams(max_tokens=self.tokens, ignore_eos=True))


def measure_watching(config: WatchingConfig, shape: Shape, on_round: Callable[[int], None] = lambda number: None) -> Row:
    """Start the pipeline and measure it.

    Raises PipedecError if the cluster does not start, or a watched answer is another one.
    """
    row = {**header("live", plain(config)), "cluster": shape.cluster, "pair": shape.pair}
    with LocalCluster(shape.spec.replaced(prefix_cache=False)) as cluster:
        bench = _Bench(config, cluster)
        bench.answer()  # warms up
        rounds = []
        for number in range(config.rounds):
            on_round(number)
            rounds.append(bench.round())
    return {**row, "rounds": rounds, **_ratio([log(one["watched_ms"] / one["unwatched_ms"]) for one in rounds])}


class _Bench:
    def __init__(self, config: WatchingConfig, cluster: LocalCluster) -> None:
        assert cluster.scheduler is not None
        self._config = config
        self._cluster = cluster
        self._client = Client(cluster.scheduler, cluster.check)
        self._expected: list[int] | None = None

    def answer(self) -> float:
        """Milliseconds per token of one answer."""
        completion = self._client.ask(self._config.request)
        if self._expected is not None and completion.token_ids != self._expected:
            raise PipedecError("an answer differs from the first one, though only the watcher has changed")
        self._expected = completion.token_ids
        return 1000 * completion.metrics.decode_seconds / (len(completion.token_ids) - 1)

    def round(self) -> dict[str, float]:
        watched = [*self._watched()]
        unwatched = [self._mean(), self._mean()]
        watched += self._watched()
        return {"watched_ms": statistics.mean(watched), "unwatched_ms": statistics.mean(unwatched)}

    def _watched(self) -> Iterator[float]:
        with self._watching():
            yield self._mean()

    def _mean(self) -> float:
        return statistics.mean(self.answer() for _ in range(self._config.answers))

    @contextmanager
    def _watching(self) -> Iterator[None]:
        """A watcher that has all frames, until rank 0 knows that it has gone."""
        address = self._cluster.address
        scheduler = address.scheduler(ClientScheduler, self._cluster.topology)
        frames = RunHandle.of(scheduler, address.run_id).client.live()
        steps, has_left = [0], threading.Event()
        reader = threading.Thread(target=_read, args=(frames, steps, has_left))
        reader.start()
        time.sleep(_NOTICED_SECONDS)
        yield
        has_left.set()
        reader.join()
        if not steps[0]:
            raise PipedecError("the watcher has seen no timestep")
        time.sleep(_NOTICED_SECONDS)


def _read(frames: Iterator[Row], steps: list[int], has_left: threading.Event) -> None:
    for frame in frames:
        steps[0] += frame["k"] == "step"
        if has_left.is_set():
            break
    frames.close()  # type: ignore[attr-defined]


def _ratio(logs: list[float]) -> Row:
    """The geometric mean, and its 95 % interval over rounds by resampling them, always with the same draws."""
    draws = random.Random(0)
    means = sorted(statistics.mean(draws.choices(logs, k=len(logs))) for _ in range(_RESAMPLES))
    low, high = means[int(0.025 * _RESAMPLES)], means[int(0.975 * _RESAMPLES)]
    return {"ratio": exp(statistics.mean(logs)), "interval": [exp(low), exp(high)]}


@click.command()
@options_of(WatchingConfig, "config")
@own_options
def watching(
    config: WatchingConfig,
    preset: Preset = "paper-14",
    stages: StageCount = None,
    out: Annotated[Path | None, Help("Append the results to this JSONL file.", "FILE")] = None,
) -> None:
    """Measure what it costs an emulated cluster to be watched. Fails if an answer with a watcher differs from one without."""
    check_writable(out)
    shape = emulated(paper_cluster(), preset, stages, ModelPair(), own_work=False)
    row = measure_watching(config, shape, lambda number: click.echo(f"round {number + 1}", err=True))
    low, high = row["interval"]
    click.echo(f"watched over not watched, ms per token: {row['ratio']:.3f} [{low:.3f}, {high:.3f}]")
    if out is not None:
        append_rows(out, [row])


if __name__ == "__main__":
    run_command(watching)
