"""Decoding methods with options, as benchmarks take them from a command line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pipedec.bench.record import Row, plain
from pipedec.core.errors import UserError
from pipedec.core.request import MethodOptions
from pipedec.methods import make_options


@dataclass(frozen=True)
class Policy:
    """A method with its options; ``name`` is the user's text, like ``pipedec-bestfirst:width=64``."""

    name: str
    method: str
    options: MethodOptions

    @classmethod
    def parse(cls, text: str, flag: str = "--policy") -> Policy:
        """``METHOD[:KEY=VALUE,…]``, like ``pipedec-bestfirst:width=64,proposers=draft+ngrams``.

        Raises UserError if the text is not of this form, or the method has no such option.
        """
        method, _, settings = text.partition(":")
        try:
            return cls(text, method, make_options(method, dict(_setting(each) for each in settings.split(",") if each)))
        except UserError as error:
            raise UserError(f"{flag} {text}: {error}") from None

    @property
    def limits(self) -> Row:
        """The method's options, defaults included."""
        return plain(self.options)


def _setting(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    if name == "proposers":
        return name, tuple(value.split("+"))
    return name, int(value) if value.isdecimal() else value


def parse_policies(texts: Sequence[str], flag: str) -> tuple[Policy, ...]:
    """The policies of a repeated flag, whose texts are ``NAME,…`` or one ``NAME:KEY=VALUE,…``.

    Raises UserError for an unknown method or option, or a policy that is given twice.
    """
    specs = [spec for text in texts for spec in ([text] if ":" in text else text.split(","))]
    if len(set(specs)) < len(specs):
        raise UserError(f"{flag} {','.join(specs)}: one of them is given twice")
    return tuple(Policy.parse(spec, flag) for spec in specs)
