"""The ``pipedec`` program: its commands."""

from __future__ import annotations

from typing import NoReturn

import click

from pipedec import __version__
from pipedec.cli.lazy_group import LazyGroup
from pipedec.flags import run_command

# command: (module, help line). A module is imported only when its command runs.
COMMANDS = {
    "generate": ("pipedec.cli.generate", "Answer one prompt with a temporary cluster on this machine."),
    "chat": (
        "pipedec.cli.chat",
        "Talk with a model: on this machine, in a running cluster, or at any OpenAI-compatible URL.",
    ),
    "up": ("pipedec.cli.cluster", "Start a cluster on this machine that stays up between requests."),
    "launch": ("pipedec.cli.launch", "Start the cluster of a cluster.yaml on its hosts, over ssh."),
    "distribute": ("pipedec.cli.distribute", "Copy to the hosts of a cluster.yaml what they lack of the checkpoints."),
    "node": ("pipedec.cli.node", "Watch the ranks of one host, as launch orders."),
    "serve": ("pipedec.cli.serve", "Serve the OpenAI HTTP API, with a cluster on this machine or in front of a running one."),
    "submit": ("pipedec.cli.submit", "Send a prompt to a running cluster and stream the answer."),
    "status": ("pipedec.cli.cluster", "Show the state of a running cluster."),
    "top": ("pipedec.cli.top", "Watch running clusters think, on this terminal."),
    "down": ("pipedec.cli.cluster", "Stop a running cluster."),
    "doctor": ("pipedec.cli.doctor", "Examine this host, or all hosts of a cluster.yaml."),
    "plan": ("pipedec.cli.plan", "Show layers, memory and expected times of a cluster.yaml."),
    "verify": ("pipedec.cli.verify", "Check that the pipeline generates the same tokens as transformers."),
    "bench": ("pipedec.cli.benchmarks", "Run benchmarks."),
    "train": ("pipedec.cli.train", "Train draft models and BiTA prompts."),
}


@click.group(cls=LazyGroup, lazy_commands=COMMANDS, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="pipedec")
def program() -> None:
    """Pipeline-parallel speculative decoding: one request on many GPUs, with exactly the target model's own output."""


def main() -> NoReturn:
    """Run the program."""
    run_command(program)
