"""``pipedec chat`` as a user types: history, commands, Ctrl-C on a terminal, and servers behind a URL."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from support.called import Calls as Pipedec
from support.programs import Terminal
from support.tiny_pair import Pair
from transformers import PreTrainedTokenizerBase

from pipedec.cluster.local import LocalCluster
from pipedec.verify.reference import Reference

pytestmark = pytest.mark.usefixtures("leaves_nothing")

Answered = Callable[..., str]
Terminals = Callable[..., Terminal]


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
    for line in ("There is no answer yet.", "/reset", "There is no /foo", "hit rate", "1 answers with 3 tokens, 2 messages"):
        assert line in ended.err


def test_a_message_that_does_not_fit_is_refused_and_forgotten(pipedec: Pipedec, known_resident: LocalCluster) -> None:
    long = "clips " * 3000
    ended = pipedec("chat", "--running", "--max-tokens", "3", stdin=f"{long}\nHi\n/stats\n".encode())
    assert ended.status == 0
    assert "tokens, but the context is 2048: /reset starts over" in ended.err
    assert "1 answers with 3 tokens, 2 messages" in ended.err


def begun(terminal: Terminals, *flags: str) -> Terminal:
    """A conversation on a terminal in which a long answer has begun."""
    chat = terminal("chat", *flags, "--max-tokens", "1900", TERM="dumb", COLUMNS="120")
    chat.until(">>> ")
    chat.type("Tell a long story\r")
    chat.until("\n")
    while not chat.shown.strip():
        assert chat.read(), "nothing is shown"
    return chat


def test_ctrl_c_cancels_the_answer_and_not_the_program(known_resident: LocalCluster, terminal: Terminals) -> None:
    chat = begun(terminal, "--running")
    chat.type("\x03")
    assert "(cancelled)" in chat.until(">>> ")
    chat.type("half a line")
    chat.until("half a line")
    while "Ctrl-D or /exit leaves." not in chat.shown:  # CPython loses one that comes between a key and its wait for the next
        chat.type("\x03")
        chat.read(5.0)
    chat.until("Ctrl-D or /exit leaves.")
    for line, told in (("/reset", "begins anew"), ("/stats", "There is no answer yet.")):
        chat.until(">>> ")
        chat.type(f"{line}\r")
        chat.until(told)
    chat.until(">>> ")
    chat.type("\x04")
    assert chat.ended() == 0


@pytest.mark.slow
def test_a_cluster_of_its_own_ends_with_the_conversation(pair: Pair, terminal: Terminals) -> None:
    chat = begun(terminal, *pair.flags, "--stages", "2")
    chat.type("\x03")
    chat.until("(cancelled)", ">>> ")
    chat.type("/exit\r")
    assert chat.ended() == 0


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
    named = ("chat", "--url", url, "--api-key", "wrong", "--model", "x")
    assert f"{url} answers 401: Unauthorized" in pipedec(*named, stdin=b"Hi\n").err
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
