"""The command line. Parses flags, calls the engine, prints; decides nothing. Heavy imports wait until a command needs them."""

from pipedec.cli.main import main

__all__ = ["main"]
