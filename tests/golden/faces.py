"""The part *faces*: what users, clients and other programs see of the program, whatever it computes.

Help of every command, the Python API, keys of cluster.yaml, messages and keys in Redis, headers of Lua scripts, environment
variables and exit statuses, as the package itself tells them; and what a running server says (``golden.served``). A case is one
option, one field or one name, so that a change is one line. Rows of benchmarks are those of ``sweep`` and of ``load`` alone.
"""

from __future__ import annotations

import ast
import inspect
import io
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr
from dataclasses import is_dataclass
from itertools import chain
from pathlib import Path
from typing import Any, get_args
from unittest.mock import patch

import click
import msgspec

import pipedec
from golden.served import served_faces
from golden.shapes import shape_of_schema
from pipedec.bench.sweep.rows import SweepRow
from pipedec.cli.main import program
from pipedec.client.resumption import Resumption
from pipedec.config.cluster import _ClusterDocument
from pipedec.core.errors import PipedecError, UserError
from pipedec.core.stage_message import NewRequest
from pipedec.flags import run_command
from pipedec.messages.events import Event
from pipedec.messages.request import PromptRequest
from pipedec.messages.run import RunDescription
from pipedec.messages.stats import ActivityReport, Recovery, RunStats, StageStats
from pipedec.scheduler.keys import Keys
from pipedec.threads.dialect import Dialect

PACKAGE = Path(pipedec.__file__).parent
LUA = PACKAGE.parent / "lua"
WIDTH = 100_000  # columns: every option is one line of help
STORED = (PromptRequest, NewRequest, RunDescription, RunStats, StageStats, ActivityReport, Recovery)
_VARIABLE = re.compile(r"(PIPEDEC|OPENAI|GLOO|NCCL|CUDA|OMP|MKL|ONEDNN|DNNL|XDG|SSH)_[A-Z_]*")

Faces = Iterator[tuple[str, Any]]


def make(scratch: Path) -> dict[str, Any]:
    told = _commands(program, "pipedec", None), _torchrun(), _python_api(), _schemas(), _redis_keys(), _lua(), _variables()
    return dict(chain(*told, _exit_statuses(), served_faces(scratch)))


def _commands(command: click.Command, name: str, parent: click.Context | None) -> Faces:
    """What ``--help`` of a command and of those below it prints."""
    settings = command.context_settings | {"terminal_width": WIDTH, "max_content_width": WIDTH}
    context = click.Context(command, parent=parent, info_name=name.split()[-1], **settings)
    yield from _help(name, command.get_help(context))
    for inner in command.list_commands(context) if isinstance(command, click.Group) else ():
        found = command.get_command(context, inner)
        assert found is not None
        yield from _commands(found, f"{name} {inner}", context)


def _torchrun() -> Faces:
    """The ranks' own program, of argparse."""
    command = [sys.executable, "-m", "pipedec.cluster.torchrun", "--help"]
    environment = os.environ | {"COLUMNS": str(WIDTH)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
    yield from _help("torchrun", done.stdout)


def _help(name: str, text: str) -> Faces:
    """One case for each option and each command that a help text lists, and one for the text before the lists."""
    before: list[str] = []
    items: dict[str, str] = {}
    item = None  # the one to which further lines belong; "" before the first
    for line in filter(str.strip, text.splitlines()):
        indent, line = len(line) - len(line.lstrip()), line.strip()
        if indent == 0 and line.endswith(":"):
            item = ""
        elif item is None:
            before.append(line)
        elif indent == 2:
            item, _, explained = line.partition("  ")
            items[item] = explained.strip()
        else:
            items[item] += line
    yield f"help: {name}", before
    yield from ((f"help: {name}, {item}", explained) for item, explained in items.items())


def _python_api() -> Faces:
    for name in pipedec.__all__:
        value = getattr(pipedec, name)
        for parameter in _parameters(value if is_dataclass(value) or issubclass(value, msgspec.Struct) else value.__init__):
            yield f"python: {name}({parameter.name})", str(parameter)
        for method, function in inspect.getmembers(value, _is_public_method):
            yield f"python: {name}.{method}", str(inspect.signature(function))
        for attribute, _ in inspect.getmembers(value, lambda member: isinstance(member, property)):
            yield f"python: {name}.{attribute}", "property"


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """The parameters of a constructor; of ``Resident``'s if it passes everything on to that."""
    found = list(inspect.signature(function).parameters.values())
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in found):
        from pipedec.llm import Resident

        return _parameters(Resident.__init__)
    written: dict[str, Any] = {}
    for kind in reversed(getattr(function, "__mro__", ())):
        written |= inspect.get_annotations(kind)
    found = [one.replace(annotation=written.get(one.name, one.annotation)) for one in found]
    return [parameter for parameter in found if parameter.name != "self"]


def _is_public_method(member: Any) -> bool:
    return inspect.isfunction(member) and not member.__name__.startswith("_")


def _schemas() -> Faces:
    """The fields and types of what is stored in files and in Redis."""
    kinds: dict[str, Any] = {
        "cluster.yaml": _ClusterDocument,
        "dialect": Dialect,
        "resume": Resumption,
        "rows of bench sweep": SweepRow,
    }
    kinds |= {f"redis: {kind.__name__}": kind for kind in STORED}
    for event in get_args(Event):
        kinds[f"redis: event {event.__struct_config__.tag}"] = event
    for name, kind in kinds.items():
        schema = msgspec.json.schema(kind)
        if name.startswith("redis: event"):
            del schema["$defs"][kind.__name__]["properties"]["kind"]  # which is in the name
        for path, rules in shape_of_schema(schema).items():
            yield f"{name}: {path or 'itself'}", rules
    for schema in sorted(set(re.findall(r'"(pipedec\.[a-z]+/[0-9]+)"', "".join(map(Path.read_text, _sources()))))):
        yield f"schema of rows: {schema}", "known"


def _redis_keys() -> Faces:
    keys = Keys("RUN")
    for name, key in sorted(vars(keys).items()):
        if isinstance(key, str) and name != "run_id":
            yield f"redis key: {key}", []
    for name, method in inspect.getmembers(Keys, _is_public_method):
        if not name.startswith("is_"):
            yield f"redis key: {method(keys, 'WHICH')}", list(inspect.signature(method).parameters)[1:]


def _lua() -> Faces:
    """The keys, arguments and result of each script, as its header states them."""
    for script in sorted(LUA.glob("*.lua")):
        header = re.match(r"(--.*\n)+", script.read_text())
        assert header is not None
        lines = [line[2:].strip() for line in header[0].splitlines()]
        first = next((number for number, line in enumerate(lines) if line.startswith(("KEYS", "ARGV", "Returns"))), None)
        yield f"lua: {script.name}", [] if first is None else lines[first:]


def _variables() -> Faces:
    """Names of environment variables in the sources, and what is taken from ``os.environ`` under other names."""
    found = set()
    for node in chain.from_iterable(ast.walk(ast.parse(source.read_text())) for source in _sources()):
        match node:
            case ast.Constant(value=str(name)) if _VARIABLE.fullmatch(name):
                found.add(name)
            case ast.Subscript(ast.Attribute(attr="environ"), ast.Constant(value=str(name))) | ast.Call(
                ast.Attribute(ast.Attribute(attr="environ")), [ast.Constant(value=str(name)), *_]
            ):
                found.add(name)
    for name in sorted(found):
        yield f"environment: {name}", "known"


def _sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def _exit_statuses() -> Faces:
    for error in (UserError("why"), PipedecError("why"), click.UsageError("why"), KeyboardInterrupt(), OSError(2, "why", "FILE")):

        def fail(error: BaseException = error) -> None:
            raise error

        said = io.StringIO()
        try:
            with redirect_stderr(said), patch.object(sys, "argv", ["pipedec"]):
                run_command(click.Command("fails", callback=fail, params=[]))
        except SystemExit as leave:
            yield f"exit status: {type(error).__name__}", [leave.code, said.getvalue()]
