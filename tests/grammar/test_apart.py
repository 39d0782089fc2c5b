"""Structures are checked in processes of their own, where nothing that is wrong with one reaches others."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator

import pytest

from pipedec.core.errors import QueueFull, UserError
from pipedec.core.sampling import StructuredOutputs
from pipedec.directories import reference_pair
from pipedec.grammar import apart
from pipedec.grammar.apart import MAX_WAITING, StructureChecks, check_apart

COSTLY = StructuredOutputs(json={"allOf": [{"type": "string", "pattern": f".*a.{{{n}}}b.*"} for n in range(30)]})
RIGHT = StructuredOutputs(regex="a")


@pytest.mark.failure_case("H26")
def test_a_structure_that_takes_too_long_to_compile_is_refused_and_the_next_is_checked() -> None:
    async def asked() -> None:
        checks = StructureChecks(reference_pair() / "target")
        try:
            with pytest.raises(UserError, match="it takes more than"):
                await checks.check(COSTLY)
            await checks.check(RIGHT)
            with pytest.raises(UserError, match="unknown special token"):  # as in a rank, which has the tokens
                await checks.check(StructuredOutputs(grammar="start: <|nope|>"))
        finally:
            await checks.aclose()

    asyncio.run(asked())


def _chain(length: int, of: str) -> StructuredOutputs:
    if of == "schemas":
        links = {f"d{n}": {"properties": {"x": {"$ref": f"#/$defs/d{n + 1}"}}} for n in range(length)}
        return StructuredOutputs(json={"$ref": "#/$defs/d0", "$defs": {**links, f"d{length}": {}}})
    begin, is_, end = {
        "GBNF": ("root ::= r0", "::=", '"y"'),
        "Lark": ("start: r0", ":", '"y"'),
        "JSON": ("start: r0", ":", "%json {}"),
    }[of]
    rules = [f'r{n} {is_} r{n + 1} | "x"' for n in range(length)]
    return StructuredOutputs(grammar="\n".join([begin, *rules, f"r{length} {is_} {end}"]))


@pytest.mark.parametrize("of", ["schemas", "GBNF", "Lark", "JSON"])
@pytest.mark.failure_case("H26")
def test_what_llguidance_recurses_into_too_deeply_is_refused_and_the_next_is_checked(of: str) -> None:
    check_apart(_chain(100, of))

    async def asked() -> None:
        checks = StructureChecks(None)
        try:
            with pytest.raises(UserError, match=r"nested too deeply|takes more than"):
                await checks.check(_chain(4000, of))
            await checks.check(RIGHT)
        finally:
            await checks.aclose()

    asyncio.run(asked())


def test_without_a_model_mistakes_are_found_too() -> None:
    check_apart(RIGHT)
    with pytest.raises(UserError, match="invalid regex"):
        check_apart(StructuredOutputs(regex="(a"))


@pytest.mark.failure_case("H34")
def test_the_process_and_the_check_in_it_end_with_the_server() -> None:
    command = [sys.executable, "-m", "pipedec.grammar.apart"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(b'1 {"regex": "a"}\n')
        process.stdin.flush()
        assert process.stdout.readline() == b'[1, ""]\n'
        process.stdin.close()
        assert process.stdout.read() == b""  # no process has it open any more
        assert process.wait(30) == 0


def test_the_process_has_neither_torch_nor_the_server() -> None:
    program = "import sys, pipedec.grammar.apart; print([name for name in ('torch', 'pipedec.server') if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "[]\n"


class Paused:
    """Stands in for a process: checks nothing until it may."""

    asked = 0
    cancelled = 0
    may: asyncio.Event

    def __init__(self, _: object) -> None:
        pass

    async def verdict(self, _: bytes) -> str:
        Paused.asked += 1
        try:
            await Paused.may.wait()
        except asyncio.CancelledError:
            Paused.cancelled += 1
            raise
        return ""


@pytest.fixture
def paused(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(apart, "_Process", Paused)
    Paused.asked = Paused.cancelled = 0
    yield


async def begun(checks: StructureChecks, structures: list[StructuredOutputs]) -> list[asyncio.Task[None]]:
    Paused.may = asyncio.Event()
    tasks = [asyncio.create_task(checks.check(structure)) for structure in structures]
    for _ in range(10):
        await asyncio.sleep(0)
    return tasks


@pytest.mark.usefixtures("paused")
@pytest.mark.failure_case("H27")
def test_the_same_structure_is_checked_once_and_ends_when_all_callers_have_left() -> None:
    async def asked() -> None:
        checks = StructureChecks(None)
        tasks = await begun(checks, [RIGHT, RIGHT, RIGHT])
        tasks.pop().cancel()
        Paused.may.set()
        await asyncio.gather(*tasks)
        await checks.check(RIGHT)
        assert (Paused.asked, Paused.cancelled) == (1, 0)
        tasks = await begun(checks, [StructuredOutputs(regex="a" * n) for n in range(2, 9)])
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await asyncio.sleep(0)
        assert (Paused.asked, Paused.cancelled) == (3, 2)
        Paused.may.set()
        await checks.check(StructuredOutputs(regex="b"))
        assert Paused.asked == 4

    asyncio.run(asked())


@pytest.mark.usefixtures("paused")
@pytest.mark.failure_case("H27")
def test_no_more_structures_wait_than_there_is_room_for() -> None:
    async def asked() -> None:
        checks = StructureChecks(None)
        tasks = await begun(checks, [StructuredOutputs(regex="a" * n) for n in range(1, MAX_WAITING + 20)])
        refused = [task for task in tasks if task.done()]
        assert 0 < len(refused) < 20 and all(isinstance(task.exception(), QueueFull) for task in refused)
        Paused.may.set()
        await asyncio.gather(*(task for task in tasks if task not in refused))

    asyncio.run(asked())
