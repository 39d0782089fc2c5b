"""``pipedec completion``: the script by which a shell completes commands, options, their values and paths."""

from __future__ import annotations

import sys
from typing import Literal

import click
from click.shell_completion import get_completion_class

SHELLS = ("bash", "zsh", "fish")


@click.command(
    epilog="""\b
bash  add to ~/.bashrc:  eval "$(pipedec completion bash)"
zsh   add to ~/.zshrc, after compinit:  eval "$(pipedec completion zsh)"
fish  pipedec completion fish > ~/.config/fish/completions/pipedec.fish"""
)
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def completion(context: click.Context, shell: Literal["bash", "zsh", "fish"]) -> None:
    """Print the script that lets a shell complete pipedec's commands."""
    program = context.find_root().command
    sys.stdout.write(get_completion_class(shell)(program, {}, "pipedec", "_PIPEDEC_COMPLETE").source())
