"""``python -m benchmarks.formats``: forwards of one model whose weights are stored in different formats, in one process.

Each format is kept as stored and widened, in float32 and bfloat16, beside the dense model in float32; llama.cpp computes with the
model's GGUF file. Contenders take turns, and nothing is emulated. The files of the safetensors formats are written by the tests'
writers, so ``tests`` must be on PYTHONPATH.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import click
import torch
from rich.console import Console
from rich.table import Table
from support.quantized_files import WRITERS, write_dense_checkpoint, write_quantized_checkpoint

from benchmarks.llama_cpp import NAME, LlamaCpp, is_installed
from benchmarks.output import Out, append, console, machine_text, titled_table
from pipedec.bench.options import Counts, Positive
from pipedec.bench.record import Row, check_writable, header
from pipedec.core.errors import UserError
from pipedec.core.values import check_fields
from pipedec.engine.build import DTYPES
from pipedec.engine.devices import widened_weights
from pipedec.families import model_config
from pipedec.flags import Help, options_of, own_options, run_command
from pipedec.formats import ALL_PLAIN
from pipedec.gguf import is_gguf
from pipedec.model import KVCache, LaneRows, StageModel

DENSE, OWN = "dense", "its own"
_BLOCK = 16
_LLAMA_CPP_TOKENS = 64


@dataclass(frozen=True)
class FormatsConfig:
    """The model, the formats and the steps. Raises UserError for a number below 1, or an unknown format."""

    model: Annotated[str, Help("Checkpoint directory, GGUF file, or name of an installed model.", "DIR")] = "smollm2"
    formats: Annotated[tuple[str, ...], Help(f"Among {', '.join(WRITERS)} (default: all).")] = tuple(WRITERS)
    rows: Annotated[Counts, Help("Rows per step.")] = (1, 16)
    past: Annotated[Positive, Help("Accepted tokens before the step.")] = 64
    repeats: Annotated[Positive, Help("Steps of each contender, of which the median is reported.")] = 15
    threads: Annotated[Positive, Help("Number of CPU threads of torch and llama.cpp.")] = 1

    def __post_init__(self) -> None:
        check_fields(self)
        if unknown := [name for name in self.formats if name not in WRITERS]:
            raise UserError(f"no format {unknown[0]!r}: give some of {', '.join(WRITERS)}")


class _Contender:
    """A loaded model, and the milliseconds of its steps by their number of rows."""

    def __init__(self, format: str, dtype: str, kept: str, stage: StageModel, config: FormatsConfig) -> None:
        self.format, self.dtype, self.kept, self.stage, self._past = format, dtype, kept, stage, config.past
        self.times_ms: dict[int, list[float]] = {rows: [] for rows in config.rows}
        self._slots = -(-(config.past + max(config.rows)) // _BLOCK) * _BLOCK
        self._pool = stage.make_pool(self._slots, _BLOCK)

    def median_ms(self, rows: int) -> float:
        return statistics.median(self.times_ms[rows])

    def step(self, rows: int) -> None:
        """One forward with the head, whose time counts."""
        positions_R = torch.arange(self._past, self._past + rows)
        cache = KVCache(self._pool, ((0, self._slots),), cached=self._past)
        lanes = [LaneRows(positions_R, cache, None, self._past + rows)]
        began = time.perf_counter()
        self.stage.logits(self.stage.forward(positions_R, lanes))
        self.times_ms[rows].append(1000 * (time.perf_counter() - began))


def measure_formats(config: FormatsConfig, folder: Path, status: Callable[[str], None] = lambda _: None) -> list[Row]:
    """Rows of the dense model, then those of each format, beside which the dense model is timed again: the ratios are over that.
    ``folder`` takes the checkpoints. Raises UserError if the model cannot be read.
    """
    torch.set_num_threads(config.threads)
    write_dense_checkpoint(config.model, folder / DENSE)
    dense = [_loaded(config, DENSE, folder / DENSE, dtype, "stored") for dtype in ("float32", "bfloat16")]
    common = header("formats", {**asdict(config), "device": "cpu"})
    rows = _measured(config, common, dense, dense[0])
    names = ([OWN] if model_config(config.model).formats is not ALL_PLAIN else []) + list(config.formats)
    for name in names:
        status(f"writing and loading {name}")
        directory = Path(config.model) if name == OWN else folder / name
        if name != OWN:
            write_quantized_checkpoint(folder / DENSE, directory, name)
        kinds = [(dtype, kept) for dtype in ("float32", "bfloat16") for kept in ("stored", "widened", "auto")]
        status(f"timing {name}")
        rows += _measured(config, common, [_loaded(config, name, directory, *kind) for kind in kinds], dense[0])
    if is_installed() and is_gguf(config.model):
        status(f"timing {NAME}")
        rows.append(_llama_cpp_row(config, common, dense[0]))
    return rows


def _loaded(config: FormatsConfig, format: str, directory: Path, dtype: str, kept: str) -> _Contender:
    found, device = model_config(directory), torch.device("cpu")
    widens, _ = widened_weights(found, dtype, device, {"stored": "never", "widened": "always"}.get(kept, "auto"))
    stage = StageModel.load(directory, range(found.num_hidden_layers), DTYPES[dtype], device, found, widens=widens)
    return _Contender(format, dtype, kept, stage, config)


def _measured(config: FormatsConfig, common: Row, contenders: Sequence[_Contender], dense: _Contender) -> list[Row]:
    """Rows of contenders that take turns with each other and with ``dense``."""
    taking_turns = list(dict.fromkeys([dense, *contenders]))
    for one in taking_turns:
        one.times_ms = {rows: [] for rows in config.rows}
    for _ in range(config.repeats):
        for one in taking_turns:
            for rows in config.rows:
                one.step(rows)
    return [
        {
            **common, "format": one.format, "dtype": one.dtype, "kept": one.kept, "bytes": one.stage.stack.num_bytes,
            "ms": {str(rows): one.median_ms(rows) for rows in config.rows},
            "over_dense": {str(rows): dense.median_ms(rows) / one.median_ms(rows) for rows in config.rows},
        }
        for one in contenders
    ]  # fmt: skip


def _llama_cpp_row(config: FormatsConfig, common: Row, dense: _Contender) -> Row:
    """Milliseconds per token of a greedy answer by llama.cpp, without the prompt: the median of answers that take turns with
    steps of ``dense``.
    """
    server, prompt = LlamaCpp(Path(config.model), _LLAMA_CPP_TOKENS + config.past), list(range(1, config.past))
    times_ms = []
    dense.times_ms = {1: []}
    for _ in range(max(config.repeats // 3, 1)):
        for _ in range(3):
            dense.step(1)
        times = []
        for tokens in (1, _LLAMA_CPP_TOKENS):
            began = time.perf_counter()
            answer = server.answer(prompt, tokens)
            times.append((time.perf_counter() - began, len(answer)))
        (first, one), (whole, all_tokens) = times
        if all_tokens > one:
            times_ms.append(1000 * (whole - first) / (all_tokens - one))
    ms = statistics.median(times_ms)
    row = {"format": OWN, "dtype": "", "kept": NAME, "bytes": None, "ms": {"1": ms}, "over_dense": {"1": dense.median_ms(1) / ms}}
    return {**common, **row}


@click.command()
@options_of(FormatsConfig, "config")
@own_options
def formats(config: FormatsConfig, out: Out = None) -> None:
    """Compare forwards with weights in different formats, as stored and widened, with dense float32 and with llama.cpp."""
    check_writable(out)
    with tempfile.TemporaryDirectory() as folder, console.status("loading") as status:
        rows = measure_formats(config, Path(folder), status.update)
    Console().print(_table(rows))
    append(out, rows)


def _table(rows: list[Row]) -> Table:
    dense, config = rows[0], rows[0]["config"]
    caption = (
        f"{config['model']}; median of {config['repeats']} steps after {config['past']} tokens; contenders take turns. Ratio: "
        f"over dense float32, above 1 is faster. {machine_text(dense)}."
    )
    counts = list(dense["ms"])
    named = ["1 row" if count == "1" else f"{count} rows" for count in counts]
    columns = ("format", "dtype", "kept", "MB", *(f"{name}, ms" for name in named), *(f"{name}, ratio" for name in named))
    table = titled_table("Weights in different formats", columns, caption, left=("dtype", "kept"))
    for column in table.columns[:3]:
        column.no_wrap = True
    for row in rows:
        times = [row["ms"].get(count) for count in counts]
        ratios = [f"{row['over_dense'][count]:.2f}×" if count in row["over_dense"] else "" for count in counts]
        size = "" if row["bytes"] is None else f"{row['bytes'] / 1e6:.0f}"
        table.add_row(
            row["format"], row["dtype"], row["kept"], size, *("" if time is None else f"{time:.2f}" for time in times), *ratios
        )
    return table


if __name__ == "__main__":
    run_command(formats)
