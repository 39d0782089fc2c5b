"""The machine on which a row was measured, for captions."""

from __future__ import annotations

from pipedec.bench.record import Row


def machine_text(row: Row) -> str:
    """For a caption: the machine of a row whose configuration has ``device`` and ``threads``."""
    machine, config = row["machine"], row["config"]
    if config["device"] == "cuda":
        return f"{machine['gpu']}, torch {machine['torch']}"
    load = f"load average before: {machine['load_average']}"
    return f"{machine['cpu']}, {machine['cores']} cores, threads: {config['threads']}, {load}, torch {machine['torch']}"
