"""Model cards: a jinja2 template filled with the report that training writes as ``training.json``.

Owns the templates' filters. What a report holds is known by whoever measured it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from pipedec.train.cards import cells

CARDS = Path(__file__).parent  # the templates


def card(template: Path, report: dict[str, Any]) -> str:
    """Markdown for ``README.md`` beside the weights."""
    return _environment().from_string(template.read_text(encoding="utf-8")).render(report)


def _environment() -> Environment:
    environment = Environment(
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, autoescape=False
    )
    environment.filters["fmt"] = format  # {{ steps | fmt(",") }}
    environment.filters["line"] = lambda cells, *first: f"| {' | '.join([*first, *cells])} |"
    environment.filters["shares"] = lambda shares: ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
    environment.filters["counts"] = lambda counts, *without: ", ".join(
        f"{count:,} {name}" for name, count in counts.items() if name not in without
    )
    environment.filters["phases"] = lambda phases: ", ".join(f"{layers} layers for {steps:,} steps" for layers, steps in phases)
    environment.globals.update({name: getattr(cells, name) for name in dir(cells) if name.endswith("_cells")})
    return environment
