"""The ``pipedec`` program: its commands, and how an error ends it (one line, non-zero exit, never a traceback)."""

from __future__ import annotations

import sys
from typing import NoReturn

import click

from pipedec import __version__
from pipedec.cli.lazy_group import LazyGroup
from pipedec.core import PipedecError, UserError

# command: (module, one line of help); modules are imported when their command runs.
COMMANDS = {
    "generate": ("pipedec.cli.generate", "Answer one prompt: start a cluster here, submit, stop it."),
    "up": ("pipedec.cli.cluster", "Start a resident cluster on this machine."),
    "submit": ("pipedec.cli.submit", "Send a prompt to a running cluster and stream the answer."),
    "status": ("pipedec.cli.cluster", "Show the running cluster."),
    "down": ("pipedec.cli.cluster", "Stop the running cluster."),
    "plan": ("pipedec.cli.plan", "Show what a cluster.yaml would do before anything is started."),
    "verify": ("pipedec.cli.verify", "Compare the pipeline's tokens with those of transformers."),
    "bench": ("pipedec.cli.bench", "Measure."),
    "train": ("pipedec.cli.train", "Train drafts, BiTA and thread-opening models for a target."),
}


@click.group(cls=LazyGroup, lazy_commands=COMMANDS, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="pipedec")
def program() -> None:
    """Pipeline-parallel speculative decoding: one request, many GPUs, exactly the target's own answer."""


def main(command: click.Command = program) -> NoReturn:
    """Run the program, or another command. Exit status: 0 done, 1 it failed, 2 the user's mistake, 130 interrupted."""
    try:
        sys.exit(command(standalone_mode=False) or 0)
    except click.exceptions.Exit as leave:
        sys.exit(leave.exit_code)
    except click.ClickException as error:
        _leave(error.format_message(), 2)
    except UserError as error:
        _leave(str(error), 2)
    except PipedecError as error:
        _leave(str(error), 1)
    except (KeyboardInterrupt, click.Abort):
        _leave("interrupted", 130)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(1)
    except OSError as error:
        _leave(f"{error.filename or 'output'}: {error.strerror}", 1)


def _leave(message: str, status: int) -> NoReturn:
    click.echo(f"pipedec: {message}", err=True)
    sys.exit(status)
