"""The rows of a load benchmark as a table for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from pipedec.bench.record import Row

_COLUMNS = (
    "tokens/s", "steady", "× first", "TTFT ms", "p99", "TPOT ms", "p99", "ITL ms", "p99", "end to end s", "timesteps", "rows",
    "own ms",
)  # fmt: skip


def load_table(rows: Sequence[Row]) -> Table:
    """One line per method and load; below it what has no column: goodput, refusals, memory and turns."""
    table = Table(title=_title(rows[0]), title_justify="left", caption_justify="left")
    table.caption = "\n".join(note for row in rows for note in _notes(row))
    for name in ("load", "method"):
        table.add_column(name, no_wrap=True)
    for name in _COLUMNS:
        table.add_column(name, justify="right")
    for row in rows:
        first = next(one for one in rows if (one["pattern"], one["max_num_seqs"]) == (row["pattern"], row["max_num_seqs"]))
        limits = "" if len({one["max_num_seqs"] for one in rows}) == 1 else f", {row['max_num_seqs']} at once"
        table.add_row(
            _load_name(row) + limits, row["policy"], _number(row["tokens_per_s"]), _number(row["steady_tokens_per_s"]),
            f"{row['tokens_per_s'] / first['tokens_per_s']:.2f}" if row["tokens_per_s"] and first["tokens_per_s"] else "-",
            *(_number((row[name] or {}).get(part)) for name in ("ttft_ms", "tpot_ms", "itl_ms") for part in ("mean", "p99")),
            f"{row['e2e_ms']['mean'] / 1000:.2f}" if row["e2e_ms"] else "-",
            str(row["timesteps"] or "-"), _number(row["rows_per_timestep"]), _number(row["own_ms_per_timestep"]),
        )  # fmt: skip
    return table


def row_name(row: Row) -> str:
    """The load and the method of a row."""
    return f"{_load_name(row)}, {row['policy']}"


def _title(row: Row) -> str:
    cluster = row["cluster"]
    name = f"{cluster['preset']}, emulated" if cluster.get("preset") else f"run {cluster.get('run')}"
    tasks = ", single tasks" if cluster.get("dispatch") == "tasks" else ""
    return f"Load on {name} ({cluster['stages']} stages{tasks}), times {row['clock']}"


def _notes(row: Row) -> list[str]:
    notes = []
    if row["goodput_per_s"] is not None:
        notes.append(f"goodput {row['goodput_per_s']:.3f} requests/s")
    if row["refused"]:
        notes.append(f"{row['refused']} requests refused")
    notes.append(_memory_note(row))
    for turn in row["turns"]:
        notes.append(
            f"turn {turn['turn']}: {turn['prefilled_tokens']:,} of {turn['prompt_tokens']:,} prompt tokens computed, "
            f"TTFT {turn['ttft_ms']['mean']:.0f} ms"
            + (f", at most {steps} timesteps" if (steps := turn["ttft_timesteps"]) else "")
        )
    return [f"{row_name(row)}: {note}" for note in notes]


def _memory_note(row: Row) -> str:
    """Prompt tokens that were computed, pauses, and KV memory."""
    text = f"{row['prefilled_tokens']:,} prompt tokens computed, {row['cached_tokens']:,} cached, {row['pauses']} pauses"
    if kv := row["kv"]:
        text += f", {kv['peak_slots']:,} of {kv['capacity_slots']:,} KV slots used at most"
    return text


def _load_name(row: Row) -> str:
    pattern = row["pattern"]
    return f"{pattern['rate']:g}/s" if pattern["concurrency"] is None else f"{pattern['concurrency']} concurrent"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
