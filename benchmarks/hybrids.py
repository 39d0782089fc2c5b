"""``python -m benchmarks.hybrids``: forwards of a hybrid beside a dense model of as many parameters, in one process.

Three layers with a recurrent state for every one with attention, as Qwen3.5 has them, against attention in all layers. Weights
are random. Contenders take turns, and nothing is emulated.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import click
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.output import Out, append, console, machine_text, titled_table
from pipedec.bench.options import Counts, Positive
from pipedec.bench.record import Row, check_writable, header
from pipedec.core.values import check_fields
from pipedec.families import model_config
from pipedec.flags import Help, options_of, own_options, run_command
from pipedec.model import KVCache, LaneRows, StageModel
from pipedec.tree import Visibility

_VOCABULARY, _HEAD_DIM, _PERIOD, _BLOCK = 1024, 128, 4, 16


@dataclass(frozen=True)
class HybridsConfig:
    """The sizes and the steps. Raises UserError for a number below 1."""

    hidden_size: Annotated[Positive, Help("Numbers of an activation, a multiple of 512.")] = 1024
    layers: Annotated[Positive, Help("Layers, a multiple of 4.")] = 8
    rows: Annotated[Counts, Help("Rows of a tree per step.")] = (1, 16)
    in_flight: Annotated[Positive, Help("Rows of the tree that are in flight already.")] = 32
    past: Annotated[Positive, Help("Tokens of the prompt, which enters in one chunk.")] = 512
    repeats: Annotated[Positive, Help("Steps of each contender, of which the median is reported.")] = 15
    threads: Annotated[Positive, Help("Number of CPU threads.")] = 1

    def __post_init__(self) -> None:
        check_fields(self)


class _Contender:
    """A loaded model, a request with a prompt and rows in flight, and the milliseconds of its steps by their number of rows."""

    def __init__(self, name: str, stated: Any, folder: Path, config: HybridsConfig) -> None:
        model = AutoModelForCausalLM.from_config(stated)
        model.save_pretrained(folder / name)
        self.name, self.parameters = name, sum(parameter.numel() for parameter in model.parameters())
        found = model_config(folder / name, "transformers")
        self.stage = StageModel.load(folder / name, range(config.layers), torch.float32, "cpu", found)
        self._slots = -(-(config.past + config.in_flight + max(config.rows)) // _BLOCK) * _BLOCK
        self._past = config.past
        self._pool = self.stage.make_pool(self._slots, _BLOCK)
        self.cache = KVCache(self._pool, ((0, self._slots),))
        self.times_ms: dict[str, list[float]] = {"prompt": [], **{str(rows): [] for rows in config.rows}}
        self._enter(self._chunk())
        self._enter(self._tree(config.in_flight))

    def median_ms(self, step: str) -> float:
        return statistics.median(self.times_ms[step])

    def step(self, rows: int) -> None:
        """One forward of a tree's rows, which are dropped again."""
        before = self.cache.tree_length
        self.times_ms[str(rows)].append(self._enter(self._tree(rows)))
        self.cache.commit(torch.arange(0), torch.arange(before))

    def step_prompt(self) -> None:
        """One forward of a prompt, in the slots that another request has."""
        held, self.cache = self.cache, KVCache(self._pool, ((0, self._slots),))
        self.times_ms["prompt"].append(self._enter(self._chunk()))
        self.cache.close()
        self.cache = held

    def _enter(self, lane: LaneRows) -> float:
        token_ids = torch.arange(lane.num_rows) % _VOCABULARY
        began = time.perf_counter()
        self.stage.forward(token_ids, [lane])
        return 1000 * (time.perf_counter() - began)

    def _chunk(self) -> LaneRows:
        return LaneRows(torch.arange(self._past), self.cache, None, self._past)

    def _tree(self, rows: int) -> LaneRows:
        """Rows of a binary tree below the last row in flight."""
        before = self.cache.tree_length
        seen = torch.zeros(rows, before + rows, dtype=torch.bool)
        seen[:, :before] = True
        for row in range(rows):
            seen[row, before + row] = True
            if row:
                seen[row] |= seen[(row - 1) // 2]
        past = self.cache.past_length
        return LaneRows(past + seen.sum(1) - 1, self.cache, Visibility(seen, past, lambda: torch.arange(before + rows) + past))


def measure_hybrids(config: HybridsConfig, folder: Path) -> list[Row]:
    """A row for the hybrid, with its milliseconds over those of the dense model, and one for that. ``folder`` takes them."""
    torch.set_num_threads(config.threads)
    heads = config.hidden_size // _HEAD_DIM
    sizes = {
        "vocab_size": _VOCABULARY, "hidden_size": config.hidden_size, "num_hidden_layers": config.layers,
        "num_attention_heads": heads, "num_key_value_heads": max(heads // 4, 1), "head_dim": _HEAD_DIM,
        "max_position_embeddings": 2 * config.past + 1024,
    }  # fmt: skip
    inner = 3 * config.hidden_size
    kinds = ["full_attention" if layer % _PERIOD == _PERIOD - 1 else "linear_attention" for layer in range(config.layers)]
    linear = {"linear_num_key_heads": heads, "linear_num_value_heads": 2 * heads, "layer_types": kinds}
    mixed = AutoConfig.for_model("qwen3_5_text", intermediate_size=inner, **sizes, **linear)
    hybrid = _Contender("hybrid", mixed, folder, config)
    narrow = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", intermediate_size=inner, **sizes))
    missing = hybrid.parameters - sum(parameter.numel() for parameter in narrow.parameters())
    inner += round(missing / (3 * config.hidden_size * config.layers))
    dense = _Contender("dense", AutoConfig.for_model("qwen3", intermediate_size=inner, **sizes), folder, config)
    for _ in range(config.repeats):
        for one in (hybrid, dense):
            one.step_prompt()
            for rows in config.rows:
                one.step(rows)
    common = header("hybrids", {**asdict(config), "device": "cpu"})
    return [
        {
            **common, "model": one.name, "parameters": one.parameters,
            "ms": {step: one.median_ms(step) for step in one.times_ms},
            "over_dense": {step: one.median_ms(step) / dense.median_ms(step) for step in one.times_ms},
        }
        for one in (hybrid, dense)
    ]  # fmt: skip


@click.command()
@options_of(HybridsConfig, "config")
@own_options
def hybrids(config: HybridsConfig, out: Out = None) -> None:
    """Compare forwards of a hybrid with those of a dense model of as many parameters."""
    check_writable(out)
    with tempfile.TemporaryDirectory() as folder, console.status("measuring"):
        rows = measure_hybrids(config, Path(folder))
    Console().print(_table(rows))
    append(out, rows)


def _table(rows: list[Row]) -> Table:
    config = rows[0]["config"]
    caption = (
        f"Float32; median of {config['repeats']} steps: a prompt of {config['past']} tokens, and rows of a tree beside "
        f"{config['in_flight']} in flight; contenders take turns. Ratio: over dense, below 1 is faster. {machine_text(rows[0])}."
    )
    steps = list(rows[0]["ms"])
    named = [step if step == "prompt" else f"{step} rows" for step in steps]
    columns = ("model", "parameters", *(f"{name}, ms" for name in named), *(f"{name}, ratio" for name in named))
    table = titled_table("A hybrid beside a dense model", columns, caption, left=("model",))
    for row in rows:
        times, ratios = (f"{row['ms'][step]:.1f}" for step in steps), (f"{row['over_dense'][step]:.2f}×" for step in steps)
        table.add_row(row["model"], f"{row['parameters'] / 1e6:.1f} M", *times, *ratios)
    return table


if __name__ == "__main__":
    run_command(hybrids)
