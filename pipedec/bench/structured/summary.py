"""What structures cost and save: the figures of a run as a Markdown table and as JSON.

Timesteps and milliseconds per token are sums over all answers of a method on a pipeline, the first tokens of answers left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from pipedec.bench.record import Row
from pipedec.bench.report.markdown import markdown_table

_TITLES = (
    "stages", "method", "answers", "ended", "parse", "tokens", "timesteps per token", "without", "ratio", "ms per token",
    "without", "ratio",
)  # fmt: skip
_ABOUT = (
    "Emulated, computed clock. Every question with its JSON Schema, and without one as many tokens; all methods and pipelines "
    "gave the same answers. Ended: with an end token; parse: of these, those that are JSON. Tokens: of an answer with a schema."
)


def figures(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """By stages and method, in the order of the rows."""
    groups = dict.fromkeys((row["cluster"]["stages"], row["method"]) for row in rows)
    return [_of(stages, method, _chosen(rows, stages, method)) for stages, method in groups]


def markdown(rows: Sequence[Row]) -> str:
    lines = [
        [
            str(one["stages"]), one["method"], str(one["answers"]), str(one["ended"]), f"{one['parses']:.0%}",
            f"{one['tokens']:.1f}",
            *(text for unit in ("timesteps", "ms") for text in _compared(one[unit])),
        ]
        for one in figures(rows)
    ]  # fmt: skip
    return f"{_ABOUT}\n\n{markdown_table(_TITLES, lines, left=(1,))}\n"


def document(rows: Sequence[Row]) -> str:
    return json.dumps({"benchmark": "structured", "figures": figures(rows)}, indent=1) + "\n"


def _chosen(rows: Iterable[Row], stages: int, method: str) -> list[Row]:
    return [row for row in rows if (row["cluster"]["stages"], row["method"]) == (stages, method)]


def _of(stages: int, method: str, rows: Sequence[Row]) -> dict[str, Any]:
    with_schema = [row for row in rows if row["structured"]]
    ended = [row for row in with_schema if row["finish_reason"] == "stop"]
    return {
        "stages": stages,
        "method": method,
        "answers": len(with_schema),
        "ended": len(ended),
        "parses": sum(row["parses"] for row in ended) / max(len(ended), 1),
        "tokens": sum(len(row["token_ids"]) for row in with_schema) / max(len(with_schema), 1),
        "timesteps": _both(rows, "timesteps"),
        "ms": _both(rows, "decode_ms"),
    }


def _both(rows: Sequence[Row], field: str) -> dict[str, float]:
    """A field per token, with schemas and without, and the ratio."""
    found = {}
    for name, is_structured in (("with", True), ("without", False)):
        chosen = [row for row in rows if row["structured"] is is_structured]
        tokens = sum(len(row["token_ids"]) - 1 for row in chosen)
        found[name] = sum(row[field] for row in chosen) / max(tokens, 1)
    return {**found, "ratio": found["with"] / max(found["without"], 1e-9)}


def _compared(values: dict[str, float]) -> tuple[str, str, str]:
    return f"{values['with']:.2f}", f"{values['without']:.2f}", f"{values['ratio']:.2f}"
