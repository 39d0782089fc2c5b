"""Options that several ``pipedec train`` commands share, gathered into one object for each purpose."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.table import Table

from pipedec.cli.options import gathered
from pipedec.core import UserError

if TYPE_CHECKING:
    from pipedec.text.prompt import Prompter
    from pipedec.train.chat_endpoint import ChatEndpoint
    from pipedec.train.prompts import SplitPrompts
    from pipedec.train.run import Run

Command = Callable[..., Any]
PATH = click.Path(path_type=Path)


@dataclass(frozen=True)
class RunFlags:
    """Where a training writes."""

    out: Path
    work: Path
    threads: int

    def run(self, **others: Any) -> Run:
        """The run's description. Raises UserError if a count is below 1."""
        from pipedec.train.run import Run

        at_least_one("--threads", self.threads)
        return Run(self.out, self.work, threads=self.threads, **others)


@dataclass(frozen=True)
class DeviceFlags:
    """What forward passes compute in, and where."""

    dtype: str
    device: str

    def chosen(self) -> dict[str, Any]:
        """Fields of ``Run``. Raises UserError if there is no such device."""
        from pipedec.engine.devices import chosen_device
        from pipedec.transport.replicas import local_rank

        return {"dtype": self.dtype, "device": chosen_device(self.device, local_rank())}


@dataclass(frozen=True)
class PromptFlags:
    """Prompts to learn from."""

    prompts: tuple[str, ...]
    max_prompts: int | None

    def check(self, alternative: str = "") -> None:
        """Raises UserError if there are no prompts or the count is below 1."""
        if not self.prompts:
            raise UserError(f"no prompts to learn from: give --prompts FILE{alternative}")
        at_least_one("--max-prompts", self.max_prompts)

    def read(self, prompter: Prompter, new_tokens: int, taken: tuple[str, ...] = ()) -> dict[str, SplitPrompts]:
        """Token ids of the prompts of every set. Raises UserError as ``file_prompts`` does."""
        from pipedec.data.prompts import PromptSource
        from pipedec.train.prompts import file_prompts

        return file_prompts(prompter, tuple(map(PromptSource.parse, self.prompts)), new_tokens, self.max_prompts, taken)


@dataclass(frozen=True)
class EndpointFlags:
    """How an OpenAI-compatible server is reached."""

    api_key_env: str | None
    timeout: float
    tries: int

    def endpoint(self, url: str, model: str, role: str) -> ChatEndpoint:
        """The server at ``url``. Raises UserError if the address or a value is wrong, or the key is not set."""
        from pipedec.config import secret_from_environment
        from pipedec.train.chat_endpoint import ChatEndpoint

        api_key = secret_from_environment(self.api_key_env) if self.api_key_env else None
        return ChatEndpoint(url, model, api_key, self.timeout, self.tries, role=role)


def run_options(command: Command) -> Command:
    """Adds where a training writes; the command gets it as ``run``."""
    options = [
        click.option("--out", type=PATH, required=True, help="Directory for the trained model and its training.json."),
        click.option("--work", type=PATH, required=True, help="Directory for checkpoint and log; a second run continues it."),
        click.option("--threads", type=int, default=2, show_default=True, help="CPU threads."),
    ]
    return gathered(command, options, RunFlags, "run")


def device_options(command: Command) -> Command:
    """Adds number format and device; the command gets them as ``device``."""
    formats, devices = click.Choice(["float32", "bfloat16"]), click.Choice(["auto", "cpu", "cuda"])
    options = [
        click.option("--dtype", type=formats, default="float32", show_default=True, help="Number format of forward passes."),
        click.option("--device", type=devices, default="auto", show_default=True, help="Where to train."),
    ]
    return gathered(command, options, DeviceFlags, "device")


def prompt_options(command: Command) -> Command:
    """Adds prompts to learn from; the command gets them as ``asked``."""
    options = [
        click.option("--prompts", multiple=True, metavar="[NAME=]FILE[#KEY=VALUE]", help="Prompts to learn from; repeatable."),
        click.option("--max-prompts", type=int, help="Maximum number of prompts of each set (default: all)."),
    ]
    return gathered(command, options, PromptFlags, "asked")


def endpoint_options(command: Command) -> Command:
    """Adds how a server is reached; the command gets it as ``server``."""
    options = [
        click.option("--api-key-env", metavar="NAME", help="With a URL: the environment variable that holds the key."),
        click.option("--timeout", type=float, default=120.0, show_default=True, help="With a URL: seconds to wait for a reply."),
        click.option(
            "--tries",
            type=int,
            default=5,
            show_default=True,
            help="With a URL: attempts while the server is unavailable.",
        ),
    ]
    return gathered(command, options, EndpointFlags, "server")


def options_of(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Adds several options, listed in this order by ``--help``."""

    def decorate(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def moved_option(name: str, message: str, **attributes: Any) -> Callable[[Command], Command]:
    """An option of earlier versions, which is refused with the command that does the same now."""

    def refuse(ctx: click.Context, parameter: click.Parameter, value: Any) -> None:
        if value:
            raise UserError(f"{name} has moved: {message}")

    return click.option(name, hidden=True, expose_value=False, callback=refuse, **attributes)


recipe_command = partial("in a checkout of pipedec, use python -m recipes.reference_models {}".format)


def given(options: dict[str, Any]) -> dict[str, Any]:
    """The options that the user has set."""
    return {name: value for name, value in options.items() if value is not None}


def at_least_one(name: str, count: int | None) -> None:
    """Raises UserError if a count is given and below 1."""
    if count is not None and count < 1:
        raise UserError(f"{name} must be at least 1")


def existing(problems: Path | None) -> Path | None:
    """The file of ``--problems``. Raises UserError if it is missing."""
    if problems is not None and not problems.is_file():
        raise UserError(f"--problems {problems}: there is no such file")
    return problems


def print_table(title: str, columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    """Print a table whose first column is left-aligned, the others right."""
    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=not number)
    for row in rows:
        table.add_row(*row)
    Console().print(table)
