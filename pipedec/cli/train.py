"""``pipedec train``: the table of its commands."""

from __future__ import annotations

import click

from pipedec.cli.lazy_group import LazyGroup

COMMANDS = {
    "draft": ("pipedec.cli.train_commands", "Train a draft for a target, on the target's own greedy answers."),
    "bita": ("pipedec.cli.train_commands", "Train BiTA for a frozen target: masks and a prompt that predict tokens ahead."),
}


@click.group(cls=LazyGroup, lazy_commands=COMMANDS)
def train() -> None:
    """Train drafts and BiTA for a target."""
