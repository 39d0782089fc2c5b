"""Command-line options from annotated fields of dataclasses and parameters of commands; exit statuses of programs.

An option's name, type, range, default and help are written once.

A field ``max_seqs: Annotated[int, Meta(ge=1), Help("Queue limit.")] = 64`` becomes ``--max-seqs N``. Values are
checked as those of files are (``core.values``). Knows click, but no command and no setting.
"""

from __future__ import annotations

import errno
import functools
import inspect
import io
import re
import sys
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar, get_args, get_origin, get_type_hints

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from pipedec.core.errors import BadValue, PipedecError, UserError
from pipedec.core.values import choices, members, range_of, value_of

Command = TypeVar("Command", bound=Callable[..., Any])
Option = Callable[[Any], Any]  # a decorator that adds one option to a command
ON_OFF = "on|off"  # the metavar of a truth value that is written as one of these words
_BENCH_PACKAGES = ("matplotlib", "pandas")  # what the extra ``bench`` installs


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
    """

    text: str
    metavar: str | None = None
    flag: str | None = None
    repeated: bool = False
    hidden: bool = False
    variables: tuple[str, ...] = ()


def options_of(kind: type, parameter: str, only: Collection[str] | None = None) -> Callable[[Command], Command]:
    """Decorate a command with options for the fields of a dataclass (those in ``only``); it gets a ``kind`` as ``parameter``."""
    return functools.partial(with_options, declared=option_fields(kind, only), gather=lambda values: {parameter: kind(**values)})


def own_options(command: Command) -> Command:
    """Decorate a command with an option for each of its parameters that has a ``Help``."""
    hints, decorated = get_type_hints(command, include_extras=True), command
    for name, parameter in reversed(list(inspect.signature(command).parameters.items())):
        note = _help(hints[name])
        if note is not None:
            default = MISSING if parameter.default is parameter.empty else parameter.default
            decorated = option(name, hints[name], note, default)(decorated)
    return decorated


def partial_of(kind: type, parameter: str, only: Collection[str] | None = None) -> Callable[[Command], Command]:
    """As ``options_of``, for a dataclass with fields that are no options: the command calls ``parameter`` with these."""
    declared = option_fields(kind, only)
    return functools.partial(
        with_options, declared=declared, gather=lambda values: {parameter: functools.partial(kind, **values)}
    )


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
        note = _help(hints[field.name])
        if note is not None and (only is None or field.name in only):
            default = field.default_factory if field.default is MISSING else field.default
            if not shows_defaults and not isinstance(default, bool):
                default = None
            found[field.name] = option(field.name, hints[field.name], note, default)
    return found


def option(name: str, hint: Any, note: Help, default: Any) -> Option:
    """The option of one field: its name, its annotated type, and its default; MISSING where it is required."""
    names, entry, settings = [name, note.flag or flag_name(name)], _entry(hint), {"help": note.text, "hidden": note.hidden}
    if any(kind is bool for kind, _ in members(hint)):
        return _truth_option(names, note, default, settings)
    one = entry if note.repeated else hint
    usual = _metavar(one) if one is entry or entry is None else f"{_metavar(entry) or 'NAME'},…"
    if isinstance(default, tuple) and default and not note.repeated:
        default = ",".join(map(str, default))
    if default is MISSING:
        settings |= {"required": True}
    else:
        settings |= {"default": default, "show_default": default not in (None, ()) and not callable(default)}
    settings |= {"multiple": note.repeated, "envvar": note.variables or None, "metavar": note.metavar or usual}
    return click.option(*names, type=_Value(one), cls=_ShownOption, **settings)


def flag_name(name: str) -> str:
    """The option of a field, like ``--max-model-len``."""
    return "--" + name.replace("_", "-")


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
        if error.errno == errno.ENOENT and error.filename is None:  # tempfile's
            _leave(f"{error.strerror}: set TMPDIR to a directory that can be written to, in a container to a tmpfs", 1)
        _leave(f"{error.filename or 'output'}: {error.strerror}", 1)


def _leave(message: str, status: int) -> NoReturn:
    click.echo(f"pipedec: {message}", err=True)
    sys.exit(status)


def _entry(hint: Any) -> Any:
    """The annotated type of a list's entries; None for other types."""
    return next((get_args(kind)[0] for kind, _ in members(hint) if get_origin(kind) is tuple), None)


def _metavar(hint: Any) -> str | None:
    kinds = [kind for kind, _ in members(hint)]
    if all(get_origin(kind) is Literal for kind in kinds):
        return f"[{'|'.join(choices(hint))}]"
    return None if str in kinds else "N" if int in kinds else "X" if float in kinds else None


def _truth_option(names: list[str], note: Help, default: bool, settings: dict[str, Any]) -> Option:
    """An option with the value on or off; a pair of options without one; or a single one, which inverts the default."""
    if note.metavar == ON_OFF:
        settings |= {"type": click.Choice(("on", "off")), "callback": lambda _context, _option, word: word == "on"}
        return click.option(*names, default="on" if default else "off", show_default=True, metavar=ON_OFF, **settings)
    if "/" in names[1]:
        return click.option(*names, default=default, show_default=True, **settings)
    flag = note.flag or flag_name(f"no_{names[0]}" if default else names[0])
    return click.option(names[0], flag, flag_value=not default, is_flag=True, default=default, **settings)


class _ShownOption(click.Option):
    """An option whose help has the range of its number, and whose values a shell completes from its metavar."""

    def get_help_extra(self, ctx: click.Context) -> click.types.OptionHelpExtra:
        extra = super().get_help_extra(ctx)
        assert isinstance(self.type, _Value)
        return extra | {"range": words} if (words := range_of(self.type.hint)) else extra

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """The words of a metavar like ``DIR|none`` or ``[auto|cpu]``, in a list after its last comma; paths for DIR and FILE."""
        parts = re.split(r"[][|,…]+", self.metavar or "")
        begun, comma, last = incomplete.rpartition(",")
        words = [word for word in parts if re.fullmatch(r"[a-z][\w-]*", word) and word.startswith(last)]
        kind = "file" if {"FILE", "PATH"} & {*parts} else "dir" if "DIR" in parts else None
        if kind is not None and (not incomplete or not words):
            return [CompletionItem(incomplete, type=kind)]
        return [CompletionItem(f"{begun}{comma}{word}") for word in words]


class _Value(click.ParamType):
    """The value of an annotated type, written as text: the entries of a list with commas between them."""

    name = "text"

    def __init__(self, hint: Any) -> None:
        self.hint = hint

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return value_of(self.hint, _read(self.hint, value)) if isinstance(value, str) else value
        except BadValue as error:
            self.fail(str(error), param, ctx)


def _read(hint: Any, text: str) -> Any:
    """The plain value that a text stands for; the text itself if it is none of its type."""
    kinds = {kind for kind, _ in members(hint)}
    for kind in (int, float, Path):
        if kind in kinds:
            with suppress(ValueError):
                return kind(text)
    if (entry := _entry(hint)) is None or text in choices(hint):
        return text
    return tuple(_read(entry, part.strip()) for part in text.split(","))


def _help(hint: Any) -> Help | None:
    """The note of an annotated type, or of a member of a union."""
    notes = (*getattr(hint, "__metadata__", ()), *map(_help, get_args(hint)))
    return next((note for note in notes if isinstance(note, Help)), None)
