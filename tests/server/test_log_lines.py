"""The server's log: one line for each event, as JSON or for people, without secrets, and never in anybody's way."""

from __future__ import annotations

import json
import logging
import os
import pty
import re
from dataclasses import replace
from pathlib import Path

import pytest
from support.http_server import Site, served

from pipedec.server.front import Front, ServerSettings
from pipedec.server.logs import LogFormat, RequestLog, log, written_log


def written(folder: Path, *secrets: str, form: LogFormat = "auto", **fields: object) -> str:
    path = folder / "log"
    with path.open("wb") as file, written_log(file.fileno(), secrets, form):
        log("something happened", **fields)
    return path.read_text()


def test_a_line_is_one_json_object(tmp_path: Path) -> None:
    text = written(tmp_path, request_id="abc", prompt='two\nlines, "quoted", ü, \ud800', seconds=0.5, nothing=None)
    assert text.count("\n") == 1
    line = json.loads(text)
    assert line["event"] == "something happened" and line["level"] == "info" and line["time"].endswith("+00:00")
    assert (line["request_id"], line["seconds"]) == ("abc", 0.5) and "nothing" not in line
    assert line["prompt"] == 'two\nlines, "quoted", ü, \ud800'


def test_people_read_words(tmp_path: Path) -> None:
    text = written(tmp_path, form="text", route="/v1/models", status=200, prompt='two\n"lines"', nested={"a": 1.5}, none=None)
    assert re.match(r"\d\d:\d\d:\d\d ", text)
    assert text[9:] == 'INFO    something happened route=/v1/models status=200 prompt="two\\n\\"lines\\"" nested={"a": 1.5}\n'


def test_no_prompt_moves_the_cursor(tmp_path: Path) -> None:
    text = written(tmp_path, form="text", prompt="\x1b[2Jgone\x9b2J", id="a\x1bb", seen="東京 ü")
    assert text.rstrip("\n").isprintable() and "東京 ü" in text


def test_a_terminal_gets_lines_for_people_unless_they_are_to_be_json() -> None:
    for form, is_json in (("auto", False), ("text", False), ("json", True)):
        master, slave = pty.openpty()
        with written_log(slave, form=form):
            log("listening", text="API  http://127.0.0.1:1/v1", url="http://127.0.0.1:1")
        line = os.read(master, 1000).decode()
        assert line.startswith("{") == is_json
        assert ('"event": "listening", "url": "http://127.0.0.1:1"}' if is_json else "INFO    API  http://127.0.0.1:1/v1") in line
        os.close(master)
        os.close(slave)


@pytest.mark.parametrize("form", ["json", "text"])
@pytest.mark.failure_case("M13")
def test_secrets_never_appear(tmp_path: Path, form: LogFormat) -> None:
    for secret in ("sk-1234567890", 'with "quotes" and \\', "schlüssel", 'ü "'):
        text = written(tmp_path, secret, form=form, header=f"Bearer {secret}", nested={"key": [secret]})
        assert secret not in text and json.dumps(secret)[1:-1] not in text and text.count("***") == 2


@pytest.mark.failure_case("M13")
def test_passwords_in_urls_never_appear(tmp_path: Path) -> None:
    for url in ("redis://:hunter2@127.0.0.1:6379/0", "rediss://user:hunter2@host/0", "unix://:hunter2@/a/b"):
        text = written(tmp_path, cause=f"cannot reach {url}: it does not answer")
        assert "hunter2" not in text and "***@" in text and json.loads(text)


def test_a_traceback_stays_on_its_line_and_keeps_no_secret(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("wb") as file, written_log(file.fileno(), ("hunter2",)):
        try:
            raise ValueError("the key hunter2 is wrong")
        except ValueError:
            logging.getLogger("uvicorn.error").exception("internal error")
    (line,) = path.read_text().splitlines()
    assert "Traceback" in json.loads(line)["traceback"] and "hunter2" not in line


@pytest.mark.failure_case("M11")
def test_a_full_disk_is_told_once_and_nothing_fails(capsys: pytest.CaptureFixture[str]) -> None:
    with open("/dev/full", "wb") as full, written_log(full.fileno()):
        for _ in range(3):
            log("lost")
    assert capsys.readouterr().err == "pipedec: log lines cannot be written: No space left on device\n"


def test_a_reader_that_stalls_costs_lines_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    """The pipe is never read: a server that wrote by itself, or waited at its end, would hang here."""
    reader, writer = os.pipe()
    with written_log(writer):
        for number in range(12_000):
            log("an event of some length, so that the pipe is full soon", number=number)
    assert capsys.readouterr().err == "pipedec: log lines are being lost: standard output is not read\n"
    os.close(reader)  # the thread's write fails now, and it goes on to the end
    os.close(writer)


def test_polls_leave_no_lines(site: Site, tmp_path: Path) -> None:
    """While the model loads, when it is there, and while the server drains; what is no answer to a poll is logged."""
    front = Front(ServerSettings(), [RequestLog()])
    path = tmp_path / "log"

    def poll() -> list[int]:
        return [client.get(route).status_code for route in ("/health", "/ready")]

    with served(front) as loading, path.open("wb") as file, written_log(file.fileno()):
        client = loading.client
        assert poll() == [503, 503]
        loading.call(lambda: front.attach(replace(site.front.require())))
        assert poll() == [200, 200]
        loading.call(front.drain)
        assert poll() == [200, 503]
        assert client.post("/ready").status_code == 405 and client.get("/v1/models").status_code == 200
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["event"], line["route"], line["status"]) for line in lines] == [
        ("response", "/ready", 405), ("response", "/v1/models", 200),
    ]  # fmt: skip
