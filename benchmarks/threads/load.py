"""``python -m benchmarks.threads.load``: many requests at once, in one thread and in several (APAR, Figure 5).

Requests begin together on an emulated pipeline, in computed time; those for which there is no KV memory wait or are paused.
Unlike ``benchmarks.load`` this computes every token, since a recorded answer has no threads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean, quantiles
from typing import Annotated

import click
from msgspec import structs

from benchmarks.load.flags import with_memory
from benchmarks.load.offered import drawn_in_turn
from benchmarks.output import SameAnswers, titled_table
from benchmarks.threads.__main__ import with_thread_models
from benchmarks.threads.benchmark import LocalAnswers, Style, ThreadsConfig
from pipedec.bench.options import Counts, Positive
from pipedec.bench.record import ROWS_FILE, Grid, Row, SweepProgress, plain
from pipedec.bench.sweep.pipelines import Shape
from pipedec.cli.benchmarks import shared
from pipedec.data import PromptSet
from pipedec.engine.local import LocalPipeline
from pipedec.flags import Help, own_options, partial_of, run_command
from pipedec.messages.request import PromptRequest
from pipedec.text.prompt import Prompter

SCHEMA = "pipedec.threads-load/1"


@dataclass(frozen=True)
class ThreadsLoadConfig(ThreadsConfig):
    """The grid: styles, methods, numbers of requests and limits of KV memory. All get the same prompts in the same order."""

    concurrency: Annotated[Counts, Help("Requests that begin together.")] = (1, 4, 16)
    kv_tokens: Annotated[
        tuple[Positive, ...], Help("Tokens for which there is KV memory, like 512,1024 (default: for all requests).")
    ] = ()


OPTIONS = [one.name for one in fields(ThreadsLoadConfig) if one.name != "samples"]


def bench_load(config: ThreadsLoadConfig, prompt_sets: list[PromptSet], out: Path, progress: SweepProgress) -> list[Row]:
    """Measure the loads that ``out`` lacks; returns the rows of all. Raises as ``bench_threads``."""
    styles, shapes = config.styles(), list(config.shapes())
    sampling = structs.replace(config.sampling, seed=config.seed) if config.sampling.is_stochastic else config.sampling
    grid, same = Grid(SCHEMA, out, progress), SameAnswers()

    def check(identity: Row, row: Row) -> None:
        for place, document in enumerate(row["documents"]):
            name = f"to request {place}, dialect {identity['dialect']}"
            if document is not None:
                same.check((identity["dialect"], place), document, identity, name)

    progress.start(len(shapes) * len(styles) * len(config.methods) * len(config.concurrency) * len(config.kv_tokens or (None,)))
    for shape, limit in product(shapes, config.kv_tokens or (None,)):
        assert isinstance(shape, Shape)
        limited = with_memory(shape.spec, limit)
        answers = LocalAnswers(limited, styles)
        template = PromptRequest("", config.raw_prompts, sampling=sampling)
        drawn = drawn_in_turn(answers, prompt_sets, template, max(config.concurrency), config.seed)
        requests = [prompt.request for (prompt,) in drawn]
        progress.busy(f"{shape.label}, {limit or 'unlimited'} KV tokens")
        for name, method, count in product(styles, config.methods, config.concurrency):
            identity: Row = {
                "preset": shape.preset, "cluster": shape.cluster, "pair": shape.pair, "dialect": name, "method": method,
                "concurrency": count, "kv_tokens": limit, "sampling": plain(sampling),
            }  # fmt: skip
            asked = [*([one.prompt, one.raw] for one in requests[:count]), styles[name].settings]
            together = [structs.replace(one, method=method) for one in requests[:count]]
            measure = partial(_load, answers, name, together)
            grid.row(identity, asked, measure, partial(check, identity))
    return grid.rows


def _load(answers: LocalAnswers, style: str, requests: list[PromptRequest]) -> Row:
    """The figures of a load."""
    return load_figures(answers.pipeline(style), answers.prompter, answers.styles[style], requests)


def load_figures(pipeline: LocalPipeline, prompter: Prompter, style: Style, requests: list[PromptRequest]) -> Row:
    """Answer ``requests``, which begin together. Latencies are ms per text token after an answer's first token, pauses included;
    an answer that alone has no memory for all its tokens has no document.

    Raises UserError if one of them can never have enough memory.
    """
    pipeline.forget_prefixes()
    asked = [style.tokenized(prompter, request, number) for number, request in enumerate(requests)]
    for _ in pipeline.run_all({1: asked}):
        pass
    found = [pipeline.answers[one.number] for one in asked]
    written = [style.written(prompter, one.sequence, str(one.finished)) for one in found]
    decoded = [row["decoded_text"] for row in written]
    latencies = [1000 * one.metrics.decode_seconds / text for one, text in zip(found, decoded, strict=True) if text]
    assert pipeline.emulated_ms is not None
    text_tokens = sum(row["metrics"]["text_tokens"] for row in written)
    quartiles = quantiles(latencies, n=4, method="inclusive") if len(latencies) > 1 else 3 * (latencies or [0.0])
    return {
        "documents": [None if row["finish_reason"] == "cache_full" else row["document"] for row in written],
        "text_tokens": text_tokens, "elapsed_ms": pipeline.emulated_ms,
        "text_tokens_per_s": 1000 * text_tokens / pipeline.emulated_ms,
        "latency_ms": {"mean": fmean(latencies or [0.0]), "p25": quartiles[0], "p75": quartiles[2]},
        "threads": fmean(row["metrics"]["threads"] for row in written), "pauses": sum(one.metrics.pauses for one in found),
        "timesteps": len(pipeline.fill), "rows": sum(map(sum, pipeline.fill)),
    }  # fmt: skip


@click.command()
@partial_of(ThreadsLoadConfig, "measured", only=OPTIONS)
@shared.question_options
@own_options
def load(measured: Callable[..., ThreadsLoadConfig], asked: shared.BenchPromptFlags, out: shared.OutDirectory) -> None:
    """Offer many requests at once, each in one thread or in several: one row per load in OUT/rows.jsonl.

    All stages run in one process; times are computed for the preset. Reports text tokens per second until the last answer is
    complete, and the latency per text token. Loads that OUT/rows.jsonl already contains are not measured again.
    """
    config = measured(**with_thread_models(asked).settings())
    prompt_sets = asked.prompt_sets()
    shared.make_directory(out)
    with shared.ProgressBar() as bar:
        rows = bench_load(config, prompt_sets, out, bar)
    table = titled_table(
        "Requests that begin together, computed",
        ("dialect", "method", "requests", "KV tokens", "text tokens/s", "ms/text token", "p25", "p75", "threads", "pauses"),
        left=("method",),
    )
    for row in rows:
        late = row["latency_ms"]
        table.add_row(
            row["dialect"], row["method"], str(row["concurrency"]), str(row["kv_tokens"] or "–"),
            f"{row['text_tokens_per_s']:.1f}", *(f"{late[name]:.1f}" for name in ("mean", "p25", "p75")),
            f"{row['threads']:.1f}", str(row["pauses"]),
        )  # fmt: skip
    shared.print_table(table, 110)
    shared.print_files(out / ROWS_FILE)


if __name__ == "__main__":
    run_command(load)
