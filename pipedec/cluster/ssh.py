"""How a host is reached: the command that runs a program there, by the user's own ssh and its configuration.

The host ``localhost`` is this machine: programs are started there without ssh. Knows nothing of what the program does.
"""

from __future__ import annotations

import shlex

from pipedec.config import ServerConfig, ssh_program

CONNECT_SECONDS = 8
NO_DIRECTORY = 101  # exit status of the remote command if its directory does not exist
SSH_FAILED = 255  # exit status of ssh itself if it has no connection, or has lost it
# A host that has vanished ends the connection after 15 seconds. ssh never asks for a password.
_OPTIONS = ("BatchMode=yes", f"ConnectTimeout={CONNECT_SECONDS}", "ServerAliveInterval=5", "ServerAliveCountMax=3")


def is_local(server: ServerConfig) -> bool:
    """Whether programs for this host are started here, without ssh."""
    return server.ssh_destination == "localhost"


def remote_command(server: ServerConfig, command: list[str], directory: str | None = None) -> list[str]:
    """The command line, for this machine, that runs ``command`` on a host with the streams of the local process.

    Args:
        directory: where it runs; where it does not exist, the exit status is ``NO_DIRECTORY``. None for where the host's shell
            starts.
    """
    enter = f"cd {shlex.quote(directory)} || exit {NO_DIRECTORY}; " if directory else ""
    script = f"{enter}exec {shlex.join(command)}"
    if is_local(server):
        return ["sh", "-c", script]
    return [*ssh_program(), *(word for option in _OPTIONS for word in ("-o", option)), server.ssh_destination, script]
