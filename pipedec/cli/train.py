"""``pipedec train``: the table of its commands."""

from __future__ import annotations

import click

from pipedec.cli.lazy_group import LazyGroup

COMMANDS = {
    "draft": ("pipedec.cli.train_draft", "Train a draft for a target, on the target's own greedy answers."),
    "bita": ("pipedec.cli.train_bita", "Train BiTA for a frozen target: masks and a prompt that predict tokens ahead."),
    "apar": ("pipedec.cli.train_threads", "Fine-tune a model to answer in APAR's paragraph tree."),
    "pasta-sft": ("pipedec.cli.train_threads", "Fine-tune a model to answer in PASTA-LANG (PASTA-SFT)."),
    "pasta-bonbon": ("pipedec.cli.train_bonbon", "Continue a PASTA-SFT model on its own samples (BoNBoN)."),
    "annotate": ("pipedec.cli.train_annotate", "Annotate where answers can be decoded in parallel threads."),
    "reference": ("pipedec.cli.train_annotate", ""),
}


@click.group(cls=LazyGroup, lazy_commands=COMMANDS)
def train() -> None:
    """Train drafts, BiTA and thread-opening models for a target."""
