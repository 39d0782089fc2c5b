"""The record of a part: a file of one case per line, and what differs between two of them.

It knows nothing of what a case means, but for two names: keys that begin with ``report:`` are not compared, and cases that begin
with ``rounded/`` only if both records were made on one kind of processor.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

PARTS = ("texts", "schedule", "processes", "faces")
RECORDS = Path(__file__).parent / "records"
PRECISION = 1e-4
REPORT = "report:"
ROUNDED = "rounded/"
PROCESSOR = REPORT + "processor"  # the case that says where those of ROUNDED were made
SHOWN = 100  # characters of a value
NOTHING = object()

Cases = dict[str, Any]


def make(part: str, scratch: Path, **limits: Any) -> Cases:
    """Compute the cases of a part now, or some of them, as they would be read from a file."""
    cases: Cases = json.loads(json.dumps(import_module(f"golden.{part}").make(scratch, **limits)))
    return cases


def read(part: str, folder: Path = RECORDS) -> Cases:
    """An empty record if there is none yet."""
    path = folder / f"{part}.json"
    cases: Cases = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return cases


def write(part: str, cases: Cases, folder: Path = RECORDS) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(f"{_text(name)}: {_text(case)}" for name, case in cases.items())
    (folder / f"{part}.json").write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")


def is_of_another_processor(recorded: Cases, made: Cases) -> bool:
    return bool(recorded.get(PROCESSOR) != made.get(PROCESSOR))


def differences(part: str, recorded: Cases, made: Cases) -> list[str]:
    """A line for each place in which a case differs; of a list, the first one alone."""
    skipped = (REPORT, ROUNDED) if is_of_another_processor(recorded, made) else (REPORT,)
    old, new = ({name: case for name, case in cases.items() if not name.startswith(skipped)} for cases in (recorded, made))
    return [f"{part}, {line}" for line in _differences("", old, new)]


def _differences(place: str, recorded: Any, made: Any) -> Iterator[str]:
    if isinstance(recorded, dict) and isinstance(made, dict):
        for key in dict.fromkeys((*recorded, *made)):
            if not key.startswith(REPORT):
                where = f"{place}: {key}" if place else key
                yield from _differences(where, recorded.get(key, NOTHING), made.get(key, NOTHING))
    elif isinstance(recorded, list) and isinstance(made, list):
        yield from _first_difference(place, recorded, made)
    elif not _are_equal(recorded, made):
        yield f"{place}: {_shown(made)}, recorded {_shown(recorded)}"


def _first_difference(place: str, recorded: list[Any], made: list[Any]) -> Iterator[str]:
    for index, values in enumerate(zip(recorded, made, strict=False)):
        if found := list(_differences(f"{place}[{index}]", *values)):
            yield from found
            return
    if len(recorded) != len(made):
        shorter = min(len(recorded), len(made))
        ended, further = ((values[shorter:] or [NOTHING])[0] for values in (recorded, made))
        yield from _differences(f"{place}[{shorter}]", ended, further)


def _are_equal(recorded: Any, made: Any) -> bool:
    if isinstance(recorded, float) and isinstance(made, float):
        return recorded == made or abs(recorded - made) <= PRECISION
    return type(recorded) is type(made) and bool(recorded == made)


def _shown(value: Any) -> str:
    if value is NOTHING:
        return "nothing"
    text = _text(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
