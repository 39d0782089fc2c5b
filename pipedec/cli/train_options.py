"""What several ``pipedec train`` commands share and needs no torch: options, refusals, tables."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import click
from msgspec import Meta
from rich.console import Console
from rich.table import Table

from pipedec.cli.options import Command
from pipedec.config import secret_from_environment
from pipedec.core import UserError
from pipedec.data.prompts import PromptSource
from pipedec.flags import Help
from pipedec.text.prompt import Prompter
from pipedec.train.chat_endpoint import ChatEndpoint
from pipedec.train.prompts import SplitPrompts, file_prompts

Problems = Annotated[Path | None, Help("Word problems in the GSM8K JSONL format (training split).", "FILE")]
Answers = Annotated[tuple[Path, ...], Help("Annotated answers (JSONL); may be repeated.", "FILE", "--in", repeated=True)]


@dataclass(frozen=True)
class PromptFlags:
    """Prompts to learn from."""

    prompts: Annotated[
        tuple[str, ...], Help("Prompts to learn from; may be repeated.", "[NAME=]FILE[#KEY=VALUE]", repeated=True)
    ] = ()
    max_prompts: Annotated[int | None, Meta(ge=1), Help("Maximum number of prompts of each set (default: all).")] = None

    def check(self, alternative: str = "") -> None:
        """Raises UserError if there are no prompts."""
        if not self.prompts:
            raise UserError(f"no prompts to learn from: give --prompts FILE{alternative}")

    def read(self, prompter: Prompter, new_tokens: int, taken: tuple[str, ...] = ()) -> dict[str, SplitPrompts]:
        """Token ids of the prompts of every set. Raises UserError as ``file_prompts`` does."""
        return file_prompts(prompter, tuple(map(PromptSource.parse, self.prompts)), new_tokens, self.max_prompts, taken)


@dataclass(frozen=True)
class EndpointFlags:
    """How an OpenAI-compatible server is reached."""

    api_key_env: Annotated[str | None, Help("With a URL: the environment variable that holds the key.", "NAME")] = None
    timeout: Annotated[float, Help("With a URL: how long to wait for a reply.", "SECONDS")] = 120.0
    tries: Annotated[int, Help("With a URL: attempts while the server is unavailable.")] = 5

    def endpoint(self, url: str, model: str, role: str) -> ChatEndpoint:
        """The server at ``url``. Raises UserError if the address or a value is wrong, or the key is not set."""
        api_key = secret_from_environment(self.api_key_env) if self.api_key_env else None
        return ChatEndpoint(url, model, api_key, self.timeout, self.tries, role=role)


def moved_option(name: str, message: str, **attributes: Any) -> Callable[[Command], Command]:
    """An option of earlier versions, which is refused with the command that does the same now."""

    def refuse(ctx: click.Context, parameter: click.Parameter, value: Any) -> None:
        if value:
            raise UserError(f"{name} has moved: {message}")

    return click.option(name, hidden=True, expose_value=False, callback=refuse, **attributes)


recipe_command = partial("in a checkout of pipedec, use python -m recipes.reference_models {}".format)


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
