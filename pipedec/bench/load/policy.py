"""A method with its options as a command line gives them, like ``pipedec-bestfirst:width=64``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pipedec.bench.record import Row, plain
from pipedec.core import MethodOptions, UserError
from pipedec.methods import METHODS, make_options

# The options of each method. BiTA is left out: what its mask rows would propose is in no recording.
LIMITS = {name: entry.option_names for name, entry in METHODS.items() if not entry.needs_bita}


@dataclass(frozen=True)
class Policy:
    """A method with its options; ``name`` is what the user wrote."""

    name: str
    method: str
    options: MethodOptions

    @classmethod
    def parse(cls, text: str, flag: str = "--policy") -> Policy:
        """``METHOD[:KEY=VALUE,…]``, like ``pipedec-bestfirst:width=64,proposers=draft+ngrams``.

        Raises:
            UserError: the text is not of this form, or the method has no such limit.
        """
        method, _, settings = text.partition(":")
        if method not in LIMITS:
            raise UserError(f"{flag} {text}: unknown method {method!r}; choose one of {', '.join(LIMITS)}")
        try:
            return cls(text, method, make_options(method, dict(_limit(method, each) for each in settings.split(",") if each)))
        except UserError as error:
            raise UserError(f"{flag} {text}: {error}") from None

    @property
    def limits(self) -> Row:
        """The method's options, defaults included."""
        limits: Row = plain(self.options)
        return limits


def parse_policies(texts: Sequence[str], flag: str) -> tuple[Policy, ...]:
    """The policies of a repeated flag, whose texts are ``NAME,…`` or one ``NAME:KEY=VALUE,…``.

    Raises:
        UserError: an unknown method or option, or a policy is given twice.
    """
    specs = [spec for text in texts for spec in ([text] if ":" in text else text.split(","))]
    if len(set(specs)) < len(specs):
        raise UserError(f"{flag} {','.join(specs)}: one of them is given twice")
    return tuple(Policy.parse(spec, flag) for spec in specs)


def _limit(method: str, setting: str) -> tuple[str, Any]:
    name, _, value = setting.partition("=")
    if name not in LIMITS[method]:
        raise UserError(f"{method} has no limit {name!r}; it has {', '.join(LIMITS[method]) or 'none'}")
    if name == "proposers":
        return name, tuple(value.split("+"))
    try:
        return name, int(value)
    except ValueError:
        raise UserError(f"{name} must be a whole number, not {value!r}") from None
