"""The ``pipedec`` program: its commands, each imported only when it runs, and where former commands and flags are now."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NoReturn

import click
from click.shell_completion import CompletionItem

from pipedec import __version__
from pipedec.core.errors import UserError
from pipedec.directories import settle_home
from pipedec.flags import Command, run_command

# command: (module, help line). A module is imported only when its command runs.
COMMANDS = {
    "generate": ("pipedec.cli.answers", "Answer one prompt with a temporary cluster on this machine."),
    "chat": ("pipedec.cli.chat", "Talk with a model: on this machine, in a running cluster, or at any OpenAI-compatible URL."),
    "up": ("pipedec.cli.cluster", "Start a cluster on this machine that stays up between requests."),
    "launch": ("pipedec.cli.launch", "Start the cluster of a cluster.yaml on its hosts, over ssh."),
    "distribute": ("pipedec.cli.launch", "Copy to the hosts of a cluster.yaml what they lack of the checkpoints."),
    "node": ("pipedec.cli.launch", "Watch the ranks of one host, as launch orders."),
    "serve": ("pipedec.cli.serve", "Serve the OpenAI HTTP API, with a cluster on this machine or in front of a running one."),
    "submit": ("pipedec.cli.answers", "Send a prompt to a running cluster and stream the answer."),
    "status": ("pipedec.cli.cluster", "Show the state of a running cluster."),
    "top": ("pipedec.cli.top", "Watch a running cluster in this terminal."),
    "down": ("pipedec.cli.cluster", "Stop a running cluster."),
    "doctor": ("pipedec.cli.doctor", "Examine this host, or all hosts of a cluster.yaml."),
    "env": ("pipedec.cli.env", "Show what a report of a fault needs: versions, machine, directories, variables."),
    "plan": ("pipedec.cli.launch", "Show layers, memory and expected times of a cluster.yaml."),
    "verify": ("pipedec.cli.verify", "Check that the pipeline generates the same tokens as transformers."),
    "bench": ("pipedec.cli.benchmarks", "Run benchmarks."),
    "train": ("pipedec.cli.main", "Train draft models and BiTA prompts."),
    "completion": ("pipedec.cli.completion", "Print the script that lets a shell complete commands and options."),
}
TRAIN_COMMANDS = {
    "draft": ("pipedec.cli.train", "Train a draft for a target, on the target's own greedy answers."),
    "bita": ("pipedec.cli.train", "Train BiTA for a frozen target: masks and a prompt that predict tokens ahead."),
}

_CHECKOUT = "in a checkout of pipedec"
# Commands that have left the program, without its name: the line after "pipedec COMMAND". For one release each prints it.
MOVED = {
    "bench policy": f"is now python -m benchmarks.policy, {_CHECKOUT}",
    "bench structured": f"is now python -m benchmarks.structured, {_CHECKOUT}",
    "bench alternatives": f"is now python -m benchmarks.alternatives, {_CHECKOUT}",
    "bench layers": f"is now python -m benchmarks.kernels layers, {_CHECKOUT}",
    "bench operations": f"is now python -m benchmarks.kernels operations, {_CHECKOUT}",
    "bench live": f"is now python -m benchmarks.live_recording, {_CHECKOUT}",
    "bench serve": "is gone: measure a server with a client of your own, like aiperf, guidellm or vllm bench serve",
    "bench load": "is gone: measure a server with a client of your own, like aiperf or guidellm (docs/benchmarks.md)",
    "bench threads": f"is now python -m benchmarks.threads, {_CHECKOUT}",
    "bench overhead": f"is now python -m benchmarks.overhead, {_CHECKOUT}",
    "bench faults": f"is now PYTHONPATH=tests python -m soak.faults, {_CHECKOUT}",
    "bench reads": f"is now PYTHONPATH=tests python -m soak.reads, {_CHECKOUT}",
    "bench resources": f"is now PYTHONPATH=tests python -m soak.resources, {_CHECKOUT}",
    "train apar": f"is now python -m recipes.thread_models apar, {_CHECKOUT}",
    "train pasta-sft": f"is now python -m recipes.thread_models pasta-sft, {_CHECKOUT}",
    "train pasta-bonbon": f"is now python -m recipes.thread_models pasta-bonbon, {_CHECKOUT}",
    "train annotate": f"is now python -m recipes.thread_models annotate, {_CHECKOUT}",
    "train reference": f"is now python -m recipes.reference_models pair, {_CHECKOUT}",
}


class LazyGroup(click.Group):
    """A group whose commands are imported when they run, each from its module, under its name with underscores for hyphens."""

    def __init__(self, *args: Any, lazy_commands: dict[str, tuple[str, str]], **options: Any) -> None:
        super().__init__(*args, **options)
        self._commands = lazy_commands

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._commands)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self._commands:
            return moved_command(f"{self.name} {cmd_name}")
        command = getattr(importlib.import_module(self._commands[cmd_name][0]), cmd_name.replace("-", "_"))
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in self._commands.items()])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """The commands by their names, without importing them; the group's options after a hyphen."""
        named = [(name, line) for name, (_, line) in self._commands.items() if name.startswith(incomplete)]
        return [CompletionItem(name, help=line) for name, line in named] or click.Command.shell_complete(self, ctx, incomplete)


def moved_command(name: str) -> click.Command | None:
    """A command that takes any arguments and raises UserError; None if no command of this name has moved."""
    if name not in MOVED:
        return None

    def refuse(arguments: tuple[str, ...]) -> None:
        raise UserError(f"pipedec {name} {MOVED[name]}")

    anything = click.Argument(["arguments"], nargs=-1, type=click.UNPROCESSED)
    settings = {"ignore_unknown_options": True}
    return click.Command(name, callback=refuse, params=[anything], context_settings=settings, add_help_option=False, hidden=True)


def moved_flags(flags: dict[str, bool], now: str) -> Callable[[Command], Command]:
    """Decorate a command with hidden flags that have left it, and whether each takes a value. Each raises UserError, whose line
    goes on with ``now`` after the flag.
    """

    def refuse(context: click.Context, parameter: click.Parameter, value: Any) -> None:
        if value:
            raise UserError(f"{parameter.opts[0]} {now}")

    def decorate(command: Command) -> Command:
        for flag, takes_value in flags.items():
            click.option(flag, is_flag=not takes_value, hidden=True, is_eager=True, expose_value=False, callback=refuse)(command)
        return command

    return decorate


@click.group(cls=LazyGroup, lazy_commands=COMMANDS, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="pipedec")
def program() -> None:
    """Pipeline-parallel speculative decoding: one request on many GPUs, with exactly the target model's own output."""


@click.group(cls=LazyGroup, lazy_commands=TRAIN_COMMANDS)
def train() -> None:
    """Train drafts and BiTA for a target."""


def main() -> NoReturn:
    settle_home()
    run_command(program)
