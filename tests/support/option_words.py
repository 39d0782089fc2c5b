"""Settings as the words of a command line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipedec.flags import ON_OFF, _help, flag_name


def option_words(values: Mapping[str, Any], hints: Mapping[str, Any]) -> list[str]:
    """Values by field, with the annotated types of these, as the arguments of a command that has their options."""
    words: list[str] = []
    for name, value in values.items():
        match value:
            case None:
                continue
            case bool() if (note := _help(hints[name])) is not None and note.metavar == ON_OFF:
                words += [flag_name(name), "on" if value else "off"]
            case True:
                words.append(flag_name(name))
            case False:
                words.append(flag_name(f"no_{name}"))
            case tuple():
                words += [flag_name(name), ",".join(map(str, value))]
            case _:
                words += [flag_name(name), str(value)]
    return words
