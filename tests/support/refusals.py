"""How a command that is run in this process refuses its arguments."""

from __future__ import annotations

from click.testing import Result

from pipedec.core.errors import UserError


def refusal(done: Result) -> str:
    """What is printed: a UserError, or what click says of an option's value."""
    assert done.exit_code != 0, done.output
    return str(done.exception) if isinstance(done.exception, UserError) else done.stderr
