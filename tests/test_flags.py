"""Options from annotations: every option takes what its field may be, says so in --help, and refuses the rest in one line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import click
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Meta
from support.option_words import option_words

from pipedec.core.errors import UserError
from pipedec.core.values import check_fields, field_hints
from pipedec.flags import (
    ON_OFF,
    Help,
    given_values,
    option_fields,
    options_of,
    own_options,
    partial_of,
    with_options,
)  # fmt: skip

Seats = Annotated[int, Meta(ge=1, le=9), Help("Seats.")]


@dataclass(frozen=True, kw_only=True)
class Trip:
    """One field of every kind."""

    to: Annotated[str, Help("Where to.", "TOWN")]
    seats: Seats = 2
    share: Annotated[float, Meta(gt=0, le=1), Help("Share of the way.")] = 0.5
    stops: Annotated[tuple[Annotated[int, Meta(ge=0)], ...], Meta(min_length=1), Help("Stops.")] = (1, 2)
    split: Annotated[Literal["even"] | tuple[int, ...], Help("Parts.")] = "even"
    via: Annotated[tuple[str, ...], Help("A town on the way; may be repeated.", "TOWN", "--by", repeated=True)] = ()
    speed: Annotated[Literal["slow", "fast"] | None, Help("Speed.")] = None
    rest: Annotated[bool, Help("Do not rest.")] = True
    quick: Annotated[bool, Help("Hurry.")] = False
    lights: Annotated[bool, Help("Lights.", flag="--lights/--no-lights")] = True
    map: Annotated[Path | None, Help("A map.", "FILE", variables=("TRIP_MAP",))] = None
    guide: Annotated[Literal["ann", "bo"] | None, Help("A guide.")] = None
    radio: Annotated[bool, Help("Radio.", ON_OFF)] = True
    years: Annotated[tuple[int, ...], Help("Years (default: all).")] = field(default_factory=lambda: (7,))
    notes: str = "not an option"

    def __post_init__(self) -> None:
        check_fields(self)


TRIP = options_of(Trip, "trip")


def command(decorate: Callable[[Any], Any] = TRIP) -> tuple[click.Command, list[Any]]:
    """A command with the options of a trip, and the list of what it was called with."""
    seen: list[Any] = []

    @click.command()
    @decorate
    def go(**values: Any) -> None:
        seen.append(values)

    return go, seen


def parsed(*words: str, **environment: str) -> Trip:
    go, seen = command()
    done = CliRunner().invoke(go, words, env=environment, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    (values,) = seen
    trip: Trip = values["trip"]
    return trip


def test_every_option_sets_its_field() -> None:
    trip = parsed(
        "--to", "Rome", "--seats", "9", "--share", "1", "--stops", "0, 3", "--split", "4,5", "--by", "Bern", "--by", "Pisa",
        "--speed", "fast", "--no-rest", "--quick", "--no-lights", "--guide", "bo", "--radio", "off", "--years", "1,2",
        TRIP_MAP="a.txt",
    )  # fmt: skip
    assert trip == Trip(
        to="Rome", seats=9, share=1.0, stops=(0, 3), split=(4, 5), via=("Bern", "Pisa"), speed="fast", rest=False, quick=True,
        lights=False, map=Path("a.txt"), guide="bo", radio=False, years=(1, 2),
    )  # fmt: skip
    assert parsed("--to", "Rome", "--split", "even") == parsed("--to", "Rome") == Trip(to="Rome")


VALUES = {
    "seats": st.integers(1, 9), "stops": st.lists(st.integers(0, 99), min_size=1).map(tuple), "rest": st.booleans(),
    "share": st.floats(0, 1, exclude_min=True), "speed": st.sampled_from(["slow", "fast"]), "quick": st.booleans(),
    "split": st.just("even") | st.lists(st.integers(), min_size=2).map(tuple), "guide": st.sampled_from(["ann", "bo"]),
}  # fmt: skip


@given(st.fixed_dictionaries({}, optional=VALUES))
def test_arguments_of_values_are_read_back(values: dict[str, Any]) -> None:
    """Values that have their defaults are left out, as ``--no-NAME`` exists for some of them only."""
    changed = {name: value for name, value in values.items() if value != getattr(Trip, name)}
    assert parsed("--to", "Rome", *option_words(changed, field_hints(Trip))) == Trip(to="Rome", **values)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "Missing option '--to'"),
        (["--seats", "0"], "'--seats': must be an integer (1 to 9), not 0"),
        (["--seats", "two"], "'--seats': must be an integer (1 to 9), not 'two'"),
        (["--seats", "2.5"], "'--seats': must be an integer (1 to 9), not '2.5'"),
        (["--share", "0"], "'--share': must be a number (above 0, at most 1), not 0.0"),
        (["--stops", "1,,2"], "'--stops': [1]: must be an integer (at least 0), not ''"),
        (["--stops", "3,-1"], "'--stops': [1]: must be an integer (at least 0), not -1"),
        (["--split", "odd"], "'--split': [0]: must be an integer, not 'odd'"),
        (["--speed", "medium"], "'--speed': must be one of slow, fast, not 'medium'"),
        (["--guide", "cy"], "'--guide': must be one of ann, bo, not 'cy'"),
        (["--radio", "maybe"], "'--radio': 'maybe' is not one of 'on', 'off'"),
        (["--rest"], "No such option '--rest'"),
        (["--notes", "a"], "No such option '--notes'"),
    ],
)
def test_wrong_arguments_are_refused(words: list[str], message: str) -> None:
    go, seen = command()
    done = CliRunner().invoke(go, words if words == [] else ["--to", "Rome", *words])
    assert done.exit_code == 2 and message in done.stderr and not seen


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"seats": 0}, "seats: must be an integer (1 to 9), not 0"),
        ({"seats": 10}, "seats: must be an integer (1 to 9), not 10"),
        ({"share": 0.0}, "share: must be a number (above 0, at most 1), not 0.0"),
        ({"share": 1.5}, "share: must be a number (above 0, at most 1), not 1.5"),
        ({"share": float("nan")}, "share: must be a number (above 0, at most 1), not nan"),
        ({"stops": ()}, "stops: must be a list (not empty), not ()"),
        ({"stops": (2, -1)}, "stops[1]: must be an integer (at least 0), not -1"),
        ({"speed": "medium"}, "speed: must be one of slow, fast, not 'medium'"),
        ({"split": "odd"}, "split: must be even or a list, not 'odd'"),
        ({"guide": "cy"}, "guide: must be one of ann, bo, not 'cy'"),
    ],
)
def test_objects_without_a_command_line_have_the_same_ranges(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as refused:
        Trip(to="Rome", **values)
    assert str(refused.value) == message


def test_help_shows_names_values_ranges_and_defaults() -> None:
    lines = CliRunner().invoke(command()[0], ["--help"], terminal_width=200).output.splitlines()
    shown = {line.split()[0]: " ".join(line.split()) for line in lines if line.startswith("  --")}
    assert shown["--to"] == "--to TOWN Where to. [required]"
    assert shown["--seats"] == "--seats N Seats. [default: 2; 1 to 9]"
    assert shown["--share"] == "--share X Share of the way. [default: 0.5; above 0, at most 1]"
    assert shown["--stops"] == "--stops N,… Stops. [default: 1,2]"
    assert shown["--by"] == "--by TOWN A town on the way; may be repeated."
    assert shown["--speed"] == "--speed [slow|fast] Speed."
    assert shown["--no-rest"] == "--no-rest Do not rest." and shown["--lights"].startswith("--lights / --no-lights Lights.")
    assert shown["--radio"] == "--radio on|off Radio. [default: on]"
    assert shown["--years"] == "--years N,… Years (default: all)."
    assert list(option_fields(Trip)) == [one.name for one in fields(Trip) if one.name != "notes"], "in the order of the fields"


def test_a_command_completes_a_partial_object() -> None:
    go, seen = command(partial_of(Trip, "planned", ("to", "seats")))
    CliRunner().invoke(go, ["--to", "Rome", "--seats", "3"], catch_exceptions=False)
    (values,) = seen
    assert isinstance(values["planned"], partial) and values["planned"](share=0.2) == Trip(to="Rome", seats=3, share=0.2)


def test_parameters_of_a_command_are_options() -> None:
    seen = []

    @click.command()
    @options_of(Trip, "trip", ("to",))
    @own_options
    def go(trip: Trip, seats: Seats, fare: Annotated[float | None, Help("Fare.")] = None) -> None:
        seen.append((trip.to, seats, fare))

    assert CliRunner().invoke(go, ["--to", "Rome"]).exit_code == 2, "without a default it is required"
    CliRunner().invoke(go, ["--to", "Rome", "--seats", "4"], catch_exceptions=False)
    assert seen == [("Rome", 4, None)]


def test_a_value_that_equals_its_default_counts_as_given() -> None:
    go, seen = command(lambda inner: with_options(inner, option_fields(Trip), lambda values: {"given": given_values(values)}))
    CliRunner().invoke(go, ["--to", "Rome", "--seats", "2"], catch_exceptions=False)
    assert seen == [{"given": {"to": "Rome", "seats": 2}}]
