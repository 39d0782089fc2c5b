"""``pipedec chat`` as a user types: history, commands, Ctrl-C on a terminal, and servers behind a URL."""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from support.programs import take_terminal
from support.tiny_pair import Pair
from transformers import PreTrainedTokenizerBase

from pipedec.cluster.local import LocalCluster
from pipedec.verify.reference import Reference

pytestmark = pytest.mark.usefixtures("leaves_nothing")

Pipedec = Callable[..., Any]
TYPED_SECONDS = 60.0


class Terminal:
    """A program on a pseudo-terminal, and what it has shown."""

    def __init__(self, *arguments: str) -> None:
        self._master, slave = pty.openpty()
        environment = {**os.environ, "TERM": "dumb", "COLUMNS": "120"}
        self.process = subprocess.Popen(
            [Path(sys.executable).parent / "pipedec", "chat", *arguments], stdin=slave, stdout=slave, stderr=slave,
            env=environment, preexec_fn=lambda: take_terminal(slave),
        )  # fmt: skip
        os.close(slave)
        self.shown = ""

    def until(self, text: str) -> str:
        """What is shown from now on up to ``text``."""
        ends = time.monotonic() + TYPED_SECONDS
        while (place := self.shown.find(text)) < 0:
            assert time.monotonic() < ends and select.select([self._master], [], [], TYPED_SECONDS)[0], self.shown
            self.shown += os.read(self._master, 4096).decode(errors="replace")
        before, self.shown = self.shown[:place], self.shown[place + len(text) :]
        return before

    def until_anything(self) -> None:
        """Until something else than blanks is shown."""
        while not self.shown.strip():
            assert select.select([self._master], [], [], TYPED_SECONDS)[0], "nothing is shown"
            self.shown += os.read(self._master, 4096).decode(errors="replace")

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def interrupt_until(self, text: str) -> None:
        """Ctrl-C, again if need be: CPython loses one that comes between a key and its wait for the next key."""
        while text not in self.shown:
            self.type("\x03")
            if select.select([self._master], [], [], 5.0)[0]:
                self.shown += os.read(self._master, 4096).decode(errors="replace")
        self.until(text)

    def ended(self) -> int:
        """The exit status, and the terminal is closed."""
        status = self.process.wait(TYPED_SECONDS)
        os.close(self._master)
        return status


Answered = Callable[..., str]


@pytest.fixture
def answered(reference: Reference, tokenizer: PreTrainedTokenizerBase) -> Answered:
    """What transformers answers to a conversation."""

    def answer(*said: str, system: str | None = None, tokens: int = 12) -> str:
        messages = [] if system is None else [{"role": "system", "content": system}]
        messages += [{"role": ("user", "assistant")[turn % 2], "content": text} for turn, text in enumerate(said)]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        return tokenizer.decode(reference.generate(prompt, tokens), skip_special_tokens=True)

    return answer


def test_a_conversation_remembers_what_was_said(pipedec: Pipedec, known_resident: LocalCluster, answered: Answered) -> None:
    lines = "How many clips?\n\nAnd then?\n/reset\nAnd then?\n/exit\nnever\n"
    ended = pipedec("chat", "--running", "--system", "Be kind.", "--max-tokens", "12", stdin=lines.encode())
    assert ended.status == 0
    first = answered("How many clips?", system="Be kind.")
    second = answered("How many clips?", first, "And then?", system="Be kind.")
    assert ended.out == f"{first}\n{second}\n{answered('And then?', system='Be kind.')}\n"
    assert "The conversation begins anew." in ended.err


def test_commands_tell_what_there_is(pipedec: Pipedec, known_resident: LocalCluster) -> None:
    ended = pipedec("chat", "--running", "--max-tokens", "3", stdin=b"/stats\n/help\n/foo bar\nHi\n/stats\n")
    assert ended.status == 0 and len(ended.out.splitlines()) >= 1
    for line in (
        "There is no answer yet.",
        "/reset",
        "There is no /foo",
        "hit rate",
        "1 answers with 3 tokens, 2 messages",
    ):
        assert line in ended.err


def test_a_message_that_does_not_fit_is_refused_and_forgotten(pipedec: Pipedec, known_resident: LocalCluster) -> None:
    long = "clips " * 3000
    ended = pipedec("chat", "--running", "--max-tokens", "3", stdin=f"{long}\nHi\n/stats\n".encode())
    assert ended.status == 0
    assert "tokens, but the context is 2048: /reset starts over" in ended.err
    assert "1 answers with 3 tokens, 2 messages" in ended.err


def test_ctrl_c_cancels_the_answer_and_not_the_program(known_resident: LocalCluster, pair: Pair) -> None:
    terminal = Terminal("--running", "--max-tokens", "1900")
    terminal.until(">>> ")
    terminal.type("Tell a long story\r")
    terminal.until("\n")
    terminal.until_anything()  # it has begun to answer
    terminal.type("\x03")
    assert "(cancelled)" in terminal.until(">>> ")
    terminal.type("half a line")
    terminal.until("half a line")
    terminal.interrupt_until("Ctrl-D or /exit leaves.")
    for line, told in (("/reset", "begins anew"), ("/stats", "There is no answer yet.")):
        terminal.until(">>> ")
        terminal.type(f"{line}\r")
        terminal.until(told)
    terminal.until(">>> ")
    terminal.type("\x04")
    assert terminal.ended() == 0


@pytest.mark.slow
def test_a_cluster_of_its_own_ends_with_the_conversation(pair: Pair, state_directory: Path) -> None:
    terminal = Terminal(*pair.flags, "--stages", "2", "--max-tokens", "1900")
    terminal.until(">>> ")
    terminal.type("Hello\r")
    terminal.until("\n")
    terminal.until_anything()
    terminal.type("\x03")
    terminal.until("(cancelled)")
    terminal.until(">>> ")
    terminal.type("/exit\r")
    assert terminal.ended() == 0


class Scripted(BaseHTTPRequestHandler):
    """A server that says back what it was asked, one word per chunk."""

    asked: list[dict[str, Any]]

    def do_GET(self) -> None:
        if self._may():
            self._send(200, {"data": [{"id": "first"}, {"id": "second"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        type(self).asked.append(body)
        if not self._may():
            return
        words = body["messages"][-1]["content"].split()
        if words[0] == "refuse":
            self._send(400, {"error": {"message": "temperature must be\nless", "type": "BadRequestError"}})
            return
        chunks: list[dict[str, Any]] = [{"choices": [{"delta": {"role": "assistant", "content": ""}}]}]
        chunks += [{"choices": [{"delta": {"content": f"{word} "}}]} for word in words]
        if words[0] == "break":
            chunks = [chunks[1], {"error": {"message": "rank 2 is lost"}}]
        chunks.append({"choices": [{"delta": {}, "finish_reason": "length"}]})
        chunks.append({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": len(words)}})
        self.send_response(200)
        self.end_headers()
        events = [": ping\n\n", *(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks), "data: [DONE]\n\n"]
        self.wfile.write("".join(events).encode())

    def _may(self) -> bool:
        if self.headers["Authorization"] == "Bearer right":
            return True
        self._send(401, {"error": {"message": "Unauthorized"}})
        return False

    def _send(self, status: int, body: dict[str, Any]) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    Scripted.asked = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Scripted)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    server.shutdown()
    server.server_close()
    thread.join()


def test_any_server_behind_a_url_answers(pipedec: Pipedec, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "right")
    ended = pipedec("chat", "--url", url, "--seed", "7", "--method", "pp", stdin=b"one two\nrefuse\nbreak\nthree\n/stats\n")
    assert (ended.status, ended.out) == (0, "one two \nbreak three \n")
    assert f"{url} answers 400: temperature must be less" in ended.err and f"{url}: rank 2 is lost" in ended.err
    assert "TTFT" in ended.err and "2 answers with 3 tokens, 4 messages" in ended.err
    roles = [[message["role"] for message in body["messages"]] for body in Scripted.asked]
    assert roles == [["user"], ["user", "assistant", "user"]] + [["user", "assistant", "user"]] * 2
    assert {key: Scripted.asked[0][key] for key in ("model", "seed", "method")} == {"model": "first", "seed": 7, "method": "pp"}
    assert "temperature" not in Scripted.asked[0], "the server's own default"


def test_a_server_behind_a_url_is_asked_for_a_form(pipedec: Pipedec, url: str) -> None:
    for flags, asked in (
        (["--choice", "yes", "--choice", "no"], {"choice": ["yes", "no"]}),
        (["--json-schema", '{"type": "object"}'], {"json": '{"type": "object"}'}),
    ):
        assert pipedec("chat", "--url", url, "--api-key", "right", *flags, stdin=b"Hello\n").status == 0
        assert Scripted.asked[-1]["structured_outputs"] == asked


def test_a_url_that_does_not_answer_is_refused_in_one_line(pipedec: Pipedec, url: str) -> None:
    assert (
        f"{url} answers 401: Unauthorized"
        in pipedec("chat", "--url", url, "--api-key", "wrong", "--model", "x", stdin=b"Hi\n").err
    )
    assert "answers 401: Unauthorized" in pipedec("chat", "--url", url, "--api-key", "wrong").refused()
    assert "cannot be reached" in pipedec("chat", "--url", "http://127.0.0.1:9/v1").refused()
    assert "give one like" in pipedec("chat", "--url", "localhost:8000").refused()


def test_flags_that_do_not_go_together_are_refused(pipedec: Pipedec) -> None:
    assert "--stages: the cluster runs already" in pipedec("chat", "--running", "--stages", "2").refused()
    assert "--stages: the cluster runs already" in pipedec("chat", "--url", "http://h/v1", "--stages", "2").refused()
    assert "--running: not used with --url" in pipedec("chat", "--url", "http://h/v1", "--running").refused()
    assert "--model: goes with --url" in pipedec("chat", "--model", "x").refused()
    assert "top_p must be" in pipedec("chat", "--top-p", "2", "--running", "--redis", "redis://127.0.0.1:9").refused()


def test_a_model_without_a_chat_template_is_refused(
    pipedec: Pipedec, known_resident: LocalCluster, pair: Pair, tmp_path: Path
) -> None:
    assert "give --tokenizer DIR if it is elsewhere" in pipedec("chat", "--running", "--tokenizer", tmp_path).refused()
    (tmp_path / "tokenizer.json").write_bytes((pair.target / "tokenizer.json").read_bytes())
    assert "has no chat template: use `pipedec generate`" in pipedec("chat", "--running", "--tokenizer", tmp_path).refused()
