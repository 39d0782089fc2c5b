"""Command-line options from annotated fields of dataclasses and parameters of commands; exit statuses of programs.

An option's name, type, range, default and help are written once.

A field ``max_seqs: Annotated[int, Meta(ge=1), Help("Queue limit.")] = 64`` becomes ``--max-seqs N``. ``check_fields`` applies the
same ranges to objects that are made without a command line. Knows click, but no command and no setting.
"""

from __future__ import annotations

import functools
import inspect
import io
import math
import sys
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

import click
from click.core import ParameterSource
from msgspec import Meta

from pipedec.core.errors import PipedecError, UserError

Command = TypeVar("Command", bound=Callable[..., Any])
Option = Callable[[Any], Any]  # a decorator that adds one option to a command
ON_OFF = "on|off"  # the metavar of a truth value that is written as one of these words
_BENCH_PACKAGES = ("matplotlib", "pandas")  # of the extra ``bench``


@dataclass(frozen=True)
class Help:
    """How a field is shown as an option. Stands in the annotation of the field.

    Attributes:
        metavar: the name of its value; by default N for an integer and X for any other number. ON_OFF for a truth value that is
            written, and no switch.
        flag: the option, where it is not the field's name: ``--no-prefix-cache`` of ``prefix_cache`` is derived. A switch may
            have two: ``--compile/--no-compile``.
        repeated: each use of the option adds an entry to a tuple; otherwise a tuple is written with commas.
        hidden: not listed by ``--help``.
        variables: environment variables that are read where the option is not given.
        choices: of a text, where the annotation has no ``Literal`` of them.
    """

    text: str
    metavar: str | None = None
    flag: str | None = None
    repeated: bool = False
    hidden: bool = False
    variables: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()


def options_of(kind: type, parameter: str, only: Collection[str] | None = None) -> Callable[[Command], Command]:
    """Decorate a command with options for the fields of a dataclass (those in ``only``); it gets a ``kind`` as ``parameter``."""

    def decorate(command: Command) -> Command:
        return with_options(command, option_fields(kind, only), lambda values: {parameter: kind(**values)})

    return decorate


def own_options(command: Command) -> Command:
    """Decorate a command with an option for each of its parameters that has a ``Help``."""
    hints, decorated = get_type_hints(command, include_extras=True), command
    for name, parameter in reversed(list(inspect.signature(command).parameters.items())):
        note = next(_notes(hints[name], Help), None)
        if note is not None:
            default = MISSING if parameter.default is parameter.empty else parameter.default
            decorated = option(name, hints[name], note, default)(decorated)
    return decorated


def partial_of(kind: type, parameter: str, only: Collection[str] | None = None) -> Callable[[Command], Command]:
    """As ``options_of``, for a dataclass with fields that are no options: the command calls ``parameter`` with these."""

    def decorate(command: Command) -> Command:
        return with_options(command, option_fields(kind, only), lambda values: {parameter: functools.partial(kind, **values)})

    return decorate


def with_options(command: Command, declared: Mapping[str, Option], gather: Callable[[dict[str, Any]], dict[str, Any]]) -> Command:
    """Add options to a command, which gets what ``gather`` makes of their values by name instead of the values."""

    @functools.wraps(command)
    def gathering(**given: Any) -> Any:
        return command(**gather({name: given.pop(name) for name in declared}), **given)

    wrapped: Any = gathering
    for add in reversed(list(declared.values())):
        wrapped = add(wrapped)
    return wrapped


def given_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of options that the user has given to the current command."""
    context = click.get_current_context()
    return {name: value for name, value in values.items() if context.get_parameter_source(name) is not ParameterSource.DEFAULT}


def option_fields(kind: type, only: Collection[str] | None = None, shows_defaults: bool = True) -> dict[str, Option]:
    """The options of a dataclass by field: of those with a ``Help`` (and in ``only``), in the order of the fields.

    ``shows_defaults`` is False if what is not given comes from elsewhere, for example from a file.
    """
    hints = get_type_hints(kind, include_extras=True)
    found = {}
    for field in fields(kind):
        note = next(_notes(hints[field.name], Help), None)
        if note is not None and (only is None or field.name in only):
            default = field.default_factory if field.default is MISSING else field.default
            if not shows_defaults and not isinstance(default, bool):
                default = None
            found[field.name] = option(field.name, hints[field.name], note, default)
    return found


def option(name: str, hint: Any, note: Help, default: Any) -> Option:
    """The option of one field: its name, its annotated type, and its default; MISSING where it is required."""
    members, meta = _members(hint), list(_notes(hint, Meta))
    names = [name, note.flag or flag_name(name)]
    if bool in members:
        return _on_off(names, note, default) if note.metavar == ON_OFF else _switch(names, note, default)
    inner = next((get_args(member)[0] for member in members if get_origin(member) is tuple), None)
    settings: dict[str, Any] = {"help": note.text, "hidden": note.hidden, "envvar": note.variables or None}
    if note.repeated:
        kind, usual = _click_type(_members(inner), list(_notes(inner, Meta)), note.choices), _metavar(_members(inner))
    else:
        kind = _click_type(members, meta, note.choices)
        usual = _metavar(members) if inner is None else f"{_metavar(_members(inner)) or 'NAME'},…"
        if isinstance(default, tuple) and default:
            default = ",".join(map(str, default))
    if default is MISSING:
        settings["required"] = True
    else:
        settings |= {"default": default, "show_default": default not in (None, ()) and not callable(default)}
    return click.option(*names, type=kind, metavar=note.metavar or usual, multiple=note.repeated, **settings)


def check_fields(values: Any) -> None:
    """Raise UserError, with the option, for a field that is not None and outside the ranges and choices of its annotation."""
    hints = get_type_hints(type(values), include_extras=True)
    for field in fields(values):
        note, value = next(_notes(hints[field.name], Help), Help("")), getattr(values, field.name)
        if value is not None:
            _check(note.flag or flag_name(field.name), hints[field.name], value, note.choices)


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


def run_command(command: click.Command) -> NoReturn:
    """Run a program. An error ends it with one line, never with a traceback. Characters that a terminal or file cannot show, and
    bytes that are no text, are replaced.

    Exit status: 0 success, 1 failure, 2 invalid usage, 130 interrupted.
    """
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # None if it is closed
            with suppress(io.UnsupportedOperation):  # it was read from already
                stream.reconfigure(errors="replace")
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


def _choices(members: list[Any], words: tuple[str, ...]) -> list[Any]:
    return [*words, *(choice for member in members if get_origin(member) is Literal for choice in get_args(member))]


def _metavar(members: list[Any]) -> str | None:
    return None if str in members else "N" if int in members else "X" if float in members else None


def _switch(names: list[str], note: Help, default: bool) -> Option:
    """An option without a value, which inverts the field's default; or a pair of them, which set it."""
    if "/" in names[1]:
        return click.option(*names, default=default, show_default=True, help=note.text, hidden=note.hidden)
    flag = note.flag or flag_name(f"no_{names[0]}" if default else names[0])
    return click.option(names[0], flag, flag_value=not default, is_flag=True, default=default, help=note.text, hidden=note.hidden)


def _on_off(names: list[str], note: Help, default: bool) -> Option:
    """An option with the value on or off."""
    return click.option(*names, type=_OnOff(), default=on_off(default), show_default=True, help=note.text, hidden=note.hidden)


def is_on_off(hint: Any) -> bool:
    """Whether a field with this annotation has such an option."""
    return any(note.metavar == ON_OFF for note in _notes(hint, Help))


def on_off(value: bool) -> str:
    """A truth value as an argument of such an option."""
    return "on" if value else "off"


def _click_type(members: list[Any], meta: list[Meta], words: tuple[str, ...] = ()) -> Any:
    """The click type that checks a value against the ranges and choices of its annotation."""
    lists = [member for member in members if get_origin(member) is tuple]
    if lists:
        inner = get_args(lists[0])[0]
        listed = _List(_click_type(_members(inner), list(_notes(inner, Meta)), words))
        return _WordOr(listed, own) if (own := _choices(members, ())) else listed
    numbers = [member for member in members if member in (int, float)]
    if choices := _choices(members, words):
        return _WordOr(_click_type(numbers, meta), choices) if numbers else click.Choice(choices)
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


class _OnOff(click.ParamType):
    """A truth value, written on or off."""

    name = ON_OFF

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        return ON_OFF

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> bool:
        if not isinstance(value, bool) and value not in ("on", "off"):
            self.fail(f"{value!r} is neither on nor off", param, ctx)
        return value if isinstance(value, bool) else value == "on"


class _WordOr(click.ParamType):
    """One of some words, or another value."""

    name = "value"

    def __init__(self, inner: click.ParamType, words: Collection[str]) -> None:
        self._inner, self._words = inner, words

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return value if value in self._words else self._inner.convert(value, param, ctx)


class _List(click.ParamType):
    """Values with commas between them."""

    name = "list"

    def __init__(self, inner: click.ParamType) -> None:
        self._inner = inner

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, tuple):
            return value
        return tuple(self._inner.convert(part.strip(), param, ctx) for part in value.split(","))


def _check(flag: str, hint: Any, value: Any, words: tuple[str, ...] = ()) -> None:
    """Raise UserError unless the annotations allow this value."""
    members, meta = _members(hint), list(_notes(hint, Meta))
    if isinstance(value, tuple):
        if not value and any(one.min_length for one in meta):
            raise UserError(f"{flag} must have at least one entry")
        inner = next(get_args(member)[0] for member in members if get_origin(member) is tuple)
        for entry in value:
            _check(flag, inner, entry)
        return
    choices = _choices(members, words)
    if value in choices:
        return
    if choices and not isinstance(value, int | float):
        raise UserError(f"{flag} {value}: choose one of {', '.join(choices)}")
    for one in meta:
        if (one.ge is not None or one.gt is not None) and not math.isfinite(value):
            raise UserError(f"{flag} must be a finite number, not {value}")
        if one.gt is not None and value <= one.gt:
            raise UserError(f"{flag} must be above {one.gt:g}, not {value}")
        if one.le is not None and one.ge is not None and not one.ge <= value <= one.le:
            raise UserError(f"{flag} must be between {one.ge:g} and {one.le:g}, not {value}")
        if one.ge is not None and value < one.ge:
            raise UserError(f"{flag} must be at least {one.ge:g}, not {value}")
        if one.le is not None and value > one.le:
            raise UserError(f"{flag} must be at most {one.le:g}, not {value}")


def _members(hint: Any) -> list[Any]:
    """The types that a value may have, without None and annotations."""
    if get_origin(hint) is Annotated:
        return _members(get_args(hint)[0])
    if get_origin(hint) in (Union, types.UnionType):
        return [one for member in get_args(hint) if member is not type(None) for one in _members(member)]
    return [hint]


_Note = TypeVar("_Note")


def _notes(hint: Any, kind: type[_Note]) -> Iterator[_Note]:
    """Notes of class ``kind`` in an annotation, outermost first; those of a tuple's entries are left out."""
    if get_origin(hint) is Annotated:
        yield from (note for note in hint.__metadata__ if isinstance(note, kind))
        yield from _notes(get_args(hint)[0], kind)
    elif get_origin(hint) in (Union, types.UnionType):
        for member in get_args(hint):
            yield from _notes(member, kind)
