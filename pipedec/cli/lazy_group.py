"""A group of commands that imports only the command that runs, so that no command waits for another's imports."""

from __future__ import annotations

import importlib
from typing import Any

import click

from pipedec.cli.moved import moved_command

Commands = dict[str, tuple[str, str]]  # name: (module, help line)


class LazyGroup(click.Group):
    """A group whose commands are imported when they run.

    Args:
        lazy_commands: the module and the help line of every command. The module defines a ``click.Command`` of the command's
            name, with underscores for hyphens.
    """

    def __init__(self, *args: Any, lazy_commands: Commands, **options: Any) -> None:
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
