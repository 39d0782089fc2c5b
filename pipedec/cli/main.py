"""The ``pipedec`` program: its commands and its exit statuses. An error ends it with one line, never with a traceback."""

from __future__ import annotations

import sys
from typing import NoReturn

import click

from pipedec import __version__
from pipedec.cli.lazy_group import LazyGroup
from pipedec.core import PipedecError, UserError

# command: (module, help line). A module is imported only when its command runs.
COMMANDS = {
    "generate": ("pipedec.cli.generate", "Answer one prompt with a temporary cluster on this machine."),
    "chat": (
        "pipedec.cli.chat",
        "Talk with a model: on this machine, in a running cluster, or behind any OpenAI-compatible URL.",
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
    "bench": ("pipedec.cli.bench", "Run benchmarks."),
    "train": ("pipedec.cli.train", "Train draft models, BiTA prompts and models that open threads."),
}

_BENCH_PACKAGES = ("matplotlib", "pandas")  # of the extra ``bench``


@click.group(cls=LazyGroup, lazy_commands=COMMANDS, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="pipedec")
def program() -> None:
    """Pipeline-parallel speculative decoding: one request on many GPUs, with exactly the target model's own output."""


def main(command: click.Command = program) -> NoReturn:
    """Run the program, or another command. Exit status: 0 success, 1 failure, 2 invalid usage, 130 interrupted."""
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
    except ModuleNotFoundError as error:
        if error.name not in _BENCH_PACKAGES:
            raise
        _leave(f"this command needs {error.name}: pip install 'pipedec[bench]'", 2)
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
