"""Commands and flags that have left the program: for one release each prints, in one line, where it is now; status 2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from pipedec.core import UserError

_CHECKOUT = "in a checkout of pipedec"
# Command, without the program's name: the line after "pipedec COMMAND".
MOVED = {
    "bench policy": f"is now python -m benchmarks.policy, {_CHECKOUT}",
    "bench structured": f"is now python -m benchmarks.structured, {_CHECKOUT}",
    "bench alternatives": f"is now python -m benchmarks.alternatives, {_CHECKOUT}",
    "bench layers": f"is now python -m benchmarks.kernels layers, {_CHECKOUT}",
    "bench operations": f"is now python -m benchmarks.kernels operations, {_CHECKOUT}",
    "bench serve": "is gone: measure a server with a client of your own, like aiperf, guidellm or vllm bench serve",
    "bench faults": f"is now PYTHONPATH=tests python -m soak.faults, {_CHECKOUT}",
    "bench reads": f"is now PYTHONPATH=tests python -m soak.reads, {_CHECKOUT}",
    "bench resources": f"is now PYTHONPATH=tests python -m soak.resources, {_CHECKOUT}",
    "train apar": f"is now python -m recipes.thread_models apar, {_CHECKOUT}",
    "train pasta-sft": f"is now python -m recipes.thread_models pasta-sft, {_CHECKOUT}",
    "train pasta-bonbon": f"is now python -m recipes.thread_models pasta-bonbon, {_CHECKOUT}",
    "train annotate": f"is now python -m recipes.thread_models annotate, {_CHECKOUT}",
    "train reference": f"is now python -m recipes.reference_models pair, {_CHECKOUT}",
}

Command = TypeVar("Command", bound=Callable[..., Any])


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
    """Decorate a command with hidden flags that have left it; each raises UserError.

    Args:
        flags: whether each takes a value.
        now: how the line goes on after the flag, like ``belongs to …``.
    """

    def refuse(context: click.Context, parameter: click.Parameter, value: Any) -> None:
        if value:
            raise UserError(f"{parameter.opts[0]} {now}")

    def decorate(command: Command) -> Command:
        for flag, takes_value in flags.items():
            click.option(flag, is_flag=not takes_value, hidden=True, is_eager=True, expose_value=False, callback=refuse)(command)
        return command

    return decorate
