"""The server's log: one JSON object on each line, without secrets, and never in anybody's way."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import pytest

from pipedec.server.logs import log, written_log


def written(folder: Path, *secrets: str, **fields: object) -> str:
    path = folder / "log"
    with path.open("wb") as file, written_log(file.fileno(), secrets):
        log("something happened", **fields)
    return path.read_text()


def test_a_line_is_one_json_object(tmp_path: Path) -> None:
    text = written(tmp_path, request_id="abc", prompt='two\nlines, "quoted", ü, \ud800', seconds=0.5, nothing=None)
    assert text.count("\n") == 1
    line = json.loads(text)
    assert line["event"] == "something happened" and line["level"] == "info" and line["time"].endswith("+00:00")
    assert (line["request_id"], line["seconds"]) == ("abc", 0.5) and "nothing" not in line
    assert line["prompt"] == 'two\nlines, "quoted", ü, \ud800'


@pytest.mark.parametrize("secret", ["sk-1234567890", 'with "quotes" and \\', "schlüssel"])
def test_secrets_never_appear(tmp_path: Path, secret: str) -> None:
    text = written(tmp_path, secret, header=f"Bearer {secret}", nested={"key": [secret]})
    assert secret not in text and json.dumps(secret)[1:-1] not in text and text.count("***") == 2
    json.loads(text)


@pytest.mark.parametrize("url", ["redis://:hunter2@127.0.0.1:6379/0", "rediss://user:hunter2@host/0", "unix://:hunter2@/a/b"])
def test_passwords_in_urls_never_appear(tmp_path: Path, url: str) -> None:
    text = written(tmp_path, cause=f"cannot reach {url}: it does not answer")
    assert "hunter2" not in text and "***@" in text
    json.loads(text)


def test_a_traceback_stays_on_its_line_and_keeps_no_secret(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("wb") as file, written_log(file.fileno(), ("hunter2",)):
        try:
            raise ValueError("the key hunter2 is wrong")
        except ValueError:
            logging.getLogger("uvicorn.error").exception("internal error")
    (line,) = path.read_text().splitlines()
    assert "Traceback" in json.loads(line)["traceback"] and "hunter2" not in line


def test_a_full_disk_is_told_once_and_nothing_fails(capsys: pytest.CaptureFixture[str]) -> None:
    with open("/dev/full", "wb") as full, written_log(full.fileno()):
        for _ in range(3):
            log("lost")
    assert capsys.readouterr().err == "pipedec: log lines cannot be written: No space left on device\n"


def test_a_reader_that_stalls_costs_lines_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    """The pipe is never read: a server that wrote by itself, or waited at its end, would hang here."""
    reader, writer = os.pipe()
    with written_log(writer):
        for number in range(15_000):
            log("an event of some length, so that the pipe is full soon", number=number)
    assert capsys.readouterr().err == "pipedec: log lines are being lost: nobody reads standard output\n"
    os.close(reader)  # the thread's write fails now, and it goes on to the end
    os.close(writer)
