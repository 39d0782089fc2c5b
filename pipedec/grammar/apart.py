"""Checks of structures in processes of their own, since llguidance can neither be stopped nor be kept from overflowing its stack.

The program of such a process reads the tokens of the target once, and forks for each structure: what exceeds the limits of time,
stack or memory is lost with its fork. Both sides speak JSON, one line each.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import resource
import select
import signal
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from pipedec.core.errors import QueueFull, UserError
from pipedec.core.sampling import StructuredOutputs
from pipedec.families import model_config
from pipedec.grammar.structures import TOO_DEEP, Vocabulary, check
from pipedec.text.prompt import end_token_ids, load_tokenizer

MAX_WAITING = 32  # structures
_PROCESSES = 2  # at most, that check at a time
_SECONDS = 1.0  # processor time for one structure; a rank that admits it needs no more
_STACK_BYTES = 4 << 20  # half of what threads have in a rank
_MEMORY_BYTES = 8 << 30
_MAX_VERDICTS = 1024  # that are kept
_DONE = "done: "  # before a result
_ENDED = "structures are not checked any more here: try again"
_TOO_COSTLY = f"it takes more than {_SECONDS:g} s to compile: simplify it"


class StructureChecks:
    """Checks structures for the target whose tokenizer is in ``directory``, or without a model. For one event loop."""

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._is_closed = False
        self._slots = asyncio.Semaphore(_PROCESSES)
        self._processes: list[_Process] = []
        self._idle: list[_Process] = []
        self._work: dict[bytes, _Work] = {}
        self._verdicts: OrderedDict[bytes, str] = OrderedDict()  # the complaints, empty for what is right

    async def check(self, structure: StructuredOutputs) -> None:
        """Returns if a rank would admit the structure. When all callers are cancelled, so is the check.

        Raises:
            UserError: as ``Vocabulary.check``, or the structure needs too much time or memory.
            QueueFull: too many others wait.
        """
        try:
            document = msgspec.json.encode(structure)
        except UnicodeEncodeError:
            raise UserError(f"structured_outputs.{structure.kind}: half a surrogate pair is no character") from None
        digest = hashlib.sha256(document).digest()
        if (verdict := self._verdicts.get(digest)) is None:
            verdict = await self._found(digest, document)
        if verdict:
            raise UserError(verdict)

    async def aclose(self) -> None:
        """End the processes, and refuse what they have not checked as if too many waited."""
        self._is_closed = True
        for process in self._processes:
            await process.end()

    async def _found(self, digest: bytes, document: bytes) -> str:
        work = self._work.get(digest)
        if work is None:
            if len(self._work) >= MAX_WAITING + _PROCESSES:
                raise QueueFull("too many structures wait to be checked: try again")
            work = self._work[digest] = _Work(asyncio.create_task(self._checked(digest, document)))
        work.num_waiting += 1
        try:
            return await asyncio.shield(work.task)
        finally:
            work.num_waiting -= 1
            if not work.num_waiting and self._work.get(digest) is work:
                del self._work[digest]
                work.task.cancel()

    async def _checked(self, digest: bytes, document: bytes) -> str:
        async with self._slots:
            if self._is_closed:
                raise QueueFull(_ENDED)
            if not self._idle:
                self._idle.append(_Process(self._directory))
                self._processes.append(self._idle[-1])
            process = self._idle.pop()
            try:
                verdict = await process.verdict(document)
            finally:
                self._idle.append(process)
        self._verdicts[digest] = verdict
        if len(self._verdicts) > _MAX_VERDICTS:
            self._verdicts.popitem(last=False)
        return verdict


def check_apart(structure: StructuredOutputs, directory: Path | None = None) -> None:
    """As ``StructureChecks.check``, for callers without an event loop."""

    async def once() -> None:
        checks = StructureChecks(directory)
        try:
            await checks.check(structure)
        finally:
            await checks.aclose()

    asyncio.run(once())


@dataclass(eq=False)
class _Work:
    task: asyncio.Task[str]
    num_waiting: int = 0


class _Process:
    """One process, started when it is needed. It is asked for one verdict at a time."""

    def __init__(self, directory: Path | None) -> None:
        self._arguments = () if directory is None else (str(directory),)
        self._process: asyncio.subprocess.Process | None = None
        self._number = 0  # the last question has it

    async def verdict(self, document: bytes) -> str:
        if self._process is None or self._process.returncode is not None:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", __name__, *self._arguments,
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
            )  # fmt: skip
        questions, answers = self._process.stdin, self._process.stdout
        assert questions is not None and answers is not None
        self._number += 1
        try:
            questions.write(b"%d %b\n" % (self._number, document))
            while line := await answers.readline():
                number, verdict = json.loads(line)
                if number == self._number:
                    return str(verdict)
        except asyncio.CancelledError:
            questions.write(b"\n")
            raise
        raise QueueFull(_ENDED)

    async def end(self) -> None:
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            await self._process.wait()


def main() -> None:
    """Answer lines of standard input until it ends: a number and a structure, by the number and the complaint. Anything that
    arrives before the answer ends the check.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # which is for the server
    os.nice(5)
    verify = _verifier()
    received = b""
    while piece := os.read(0, 1 << 20):
        *lines, received = (received + piece).split(b"\n")
        if lines and lines[-1]:  # those before it are not waited for any more
            number, document = lines[-1].split(b" ", 1)
            structure = msgspec.json.decode(document, type=StructuredOutputs)
            verdict = _forked(partial(_complaint, verify, structure), f"structured_outputs.{structure.kind}")
            print(json.dumps([int(number), verdict]), flush=True)


def _verifier() -> Callable[[StructuredOutputs], None]:
    if len(sys.argv) == 1:
        return check
    directory = Path(sys.argv[1])
    known: tuple[tuple[int, ...], int | None] = (), None  # the tokenizer may not be beside the model
    try:
        with suppress(UserError):
            known = end_token_ids(directory), model_config(directory).vocab_size
        return Vocabulary(load_tokenizer(directory), *known).check
    except UserError as error:
        message = str(error)

    def refuse(_: StructuredOutputs) -> None:
        raise UserError(message)

    return refuse


def _complaint(verify: Callable[[StructuredOutputs], None], structure: StructuredOutputs) -> str:
    try:
        verify(structure)
    except UserError as error:
        return str(error)
    return ""


def _forked(work: Callable[[], str], place: str) -> str:
    """The result of ``work`` within the limits; a complaint about ``place`` if it exceeds one."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        _limit()
        threading.stack_size(_STACK_BYTES)
        thread = threading.Thread(target=lambda: os.write(writer, f"{_DONE}{work()}".encode(errors="replace")))
        thread.start()
        thread.join()
        os._exit(0)
    os.close(writer)
    if 0 in select.select([reader, 0], [], [])[0]:
        os.kill(child, signal.SIGKILL)
    with os.fdopen(reader, "rb") as results:
        result = results.read().decode()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if result.startswith(_DONE):
        return result.removeprefix(_DONE)
    return f"{place}: {_TOO_COSTLY if status == -signal.SIGPROF else TOO_DEEP}"


def _limit() -> None:
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, _SECONDS)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))


if __name__ == "__main__":
    main()
