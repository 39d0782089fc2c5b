"""Command-line options from annotated dataclass fields, so that an option's name, type, range, default and help are written once.

A field ``max_seqs: Annotated[int, Meta(ge=1), Help("Queue limit.")] = 64`` becomes ``--max-seqs N``. Knows click, but no command
and no setting.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import click
from click.core import ParameterSource
from msgspec import Meta

Command = TypeVar("Command", bound=Callable[..., Any])
Option = Callable[[Any], Any]  # a decorator that adds one option to a command


@dataclass(frozen=True)
class Help:
    """How a field is shown as an option. Stands in the annotation of the field.

    Attributes:
        text: what ``--help`` says about it.
        metavar: the name of its value; by default N for an integer and X for any other number.
        flag: the option, where it is not the field's name: ``--no-prefix-cache`` of ``prefix_cache`` is derived.
        repeated: each use of the option adds an entry to a tuple; otherwise a tuple is written with commas.
        hidden: not listed by ``--help``.
    """

    text: str
    metavar: str | None = None
    flag: str | None = None
    repeated: bool = False
    hidden: bool = False


def options_of(kind: type, parameter: str, only: Collection[str] | None = None) -> Callable[[Command], Command]:
    """Decorate a command with an option for each field of the dataclass ``kind``; it gets one ``kind`` as ``parameter``.

    Args:
        only: the names of the fields that become options; the others keep their defaults. None for all.
    """

    def decorate(command: Command) -> Command:
        return with_options(command, option_fields(kind, only), lambda values: {parameter: kind(**values)})

    return decorate


def with_options(command: Command, declared: Mapping[str, Option], gather: Callable[[dict[str, Any]], dict[str, Any]]) -> Command:
    """Add options to a command, which gets what ``gather`` makes of their values by name instead of the values."""

    @functools.wraps(command)
    def gathering(**given: Any) -> Any:
        return command(**gather({name: given.pop(name) for name in declared}), **given)

    wrapped: Any = gathering
    for option in reversed(list(declared.values())):
        wrapped = option(wrapped)
    return wrapped


def given_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of options that the user has given to the current command."""
    context = click.get_current_context()
    return {name: value for name, value in values.items() if context.get_parameter_source(name) is not ParameterSource.DEFAULT}


def option_fields(kind: type, only: Collection[str] | None = None) -> dict[str, Option]:
    """The options of a dataclass by field: of those with a ``Help``, in the order of the fields."""
    hints = get_type_hints(kind, include_extras=True)
    found = {}
    for field in fields(kind):
        note = next(_notes(hints[field.name], Help), None)
        if note is not None and (only is None or field.name in only):
            found[field.name] = _option(field, hints[field.name], note)
    return found


def flag_name(name: str) -> str:
    """The option of a field, like ``--max-model-len``."""
    return "--" + name.replace("_", "-")


def arguments_of(values: Mapping[str, Any]) -> list[str]:
    """Values by field as the arguments of a command that has their options."""
    words: list[str] = []
    for name, value in values.items():
        match value:
            case None:
                continue
            case True:
                words.append(flag_name(name))
            case False:
                words.append(flag_name(f"no_{name}"))
            case tuple():
                words += [flag_name(name), ",".join(map(str, value))]
            case _:
                words += [flag_name(name), str(value)]
    return words


def _option(field: Field[Any], hint: Any, note: Help) -> Option:
    default = None if field.default is MISSING else field.default
    members, meta = _members(hint), list(_notes(hint, Meta))
    settings: dict[str, Any] = {"help": note.text, "metavar": note.metavar, "hidden": note.hidden, "default": default}
    names = [field.name, note.flag or flag_name(field.name)]
    if bool in members:
        return _switch(field.name, note, bool(default))
    if note.repeated:
        (inner,) = get_args(next(member for member in members if get_origin(member) is tuple))[:1]
        settings |= {"multiple": True, "type": _click_type(_members(inner), list(_notes(inner, Meta)))}
    else:
        settings |= {
            "type": _click_type(members, meta),
            "required": field.default is MISSING and field.default_factory is MISSING,
        }
        settings["show_default"] = default is not None
    if settings["metavar"] is None and not note.repeated:
        settings["metavar"] = None if str in members else "N" if int in members else "X" if float in members else None
    return click.option(*names, **settings)


def _switch(name: str, note: Help, default: bool) -> Option:
    """An option without a value, which turns the field's default around."""
    flag = note.flag or flag_name(f"no_{name}" if default else name)
    return click.option(name, flag, flag_value=not default, is_flag=True, default=default, help=note.text, hidden=note.hidden)


def _click_type(members: list[Any], meta: list[Meta]) -> Any:
    """What click checks a value against: the ranges and choices of the annotation."""
    choices = [choice for member in members if get_origin(member) is Literal for choice in get_args(member)]
    lists = [member for member in members if get_origin(member) is tuple]
    if lists:
        inner = get_args(lists[0])[0]
        return _List(_click_type(_members(inner), list(_notes(inner, Meta))), choices)
    if choices:
        return click.Choice(choices)
    if str in members:
        return click.STRING
    low: Any = next((one.ge if one.ge is not None else one.gt for one in meta if one.ge is not None or one.gt is not None), None)
    high: Any = next((one.le for one in meta if one.le is not None), None)
    if int in members:
        return click.IntRange(low, high) if (low, high) != (None, None) else click.INT
    if float in members:
        is_open = any(one.gt is not None for one in meta)
        return click.FloatRange(low, high, min_open=is_open) if (low, high) != (None, None) else click.FLOAT
    return click.Path(path_type=Path) if Path in members else click.STRING


class _List(click.ParamType):
    """Values with commas between them, or one of some words."""

    name = "list"

    def __init__(self, inner: click.ParamType, words: Collection[str]) -> None:
        self._inner, self._words = inner, words

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, tuple) or value in self._words:
            return value
        return tuple(self._inner.convert(part.strip(), param, ctx) for part in value.split(","))


def _members(hint: Any) -> list[Any]:
    """The types that a value may have, without None and annotations."""
    if get_origin(hint) is Annotated:
        return _members(get_args(hint)[0])
    if get_origin(hint) in (Union, types.UnionType):
        return [one for member in get_args(hint) if member is not type(None) for one in _members(member)]
    return [hint]


_Note = TypeVar("_Note")


def _notes(hint: Any, kind: type[_Note]) -> Iterator[_Note]:
    """What stands in an annotation, from the outside in; nothing of the entries of a tuple."""
    if get_origin(hint) is Annotated:
        yield from (note for note in hint.__metadata__ if isinstance(note, kind))
        yield from _notes(get_args(hint)[0], kind)
    elif get_origin(hint) in (Union, types.UnionType):
        for member in get_args(hint):
            yield from _notes(member, kind)
