"""``pipedec chat`` as a user types: history, commands, Ctrl-C on a terminal, and servers behind a URL."""

from __future__ import annotations

import io
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from support.http_server import Site, served
from support.programs import Calls as Pipedec
from support.programs import Terminal
from support.scripted_engine import attach
from support.tiny_pair import Pair
from transformers import PreTrainedTokenizerBase

from pipedec.cluster.local import LocalCluster
from pipedec.core.errors import RankLost, UserError
from pipedec.core.sampling import StructuredOutputs
from pipedec.messages.request import PromptRequest
from pipedec.server.front import Front, ServerSettings
from pipedec.text.tokenizer import Tokenizer
from pipedec.verify.reference import Reference

pytestmark = pytest.mark.usefixtures("leaves_nothing")

Answered = Callable[..., str]
ROOT = Path(__file__).resolve().parents[2]
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


@pytest.fixture
def site(tokenizer_files: Path) -> Iterator[Site]:
    """A server with a key that says back what it was asked, word by word, unless that begins with "refuse" or "break"."""
    tokenizer = Tokenizer(tokenizer_files)

    def script(request: PromptRequest) -> Iterator[list[int]]:
        words = tokenizer.decode(request.prompt, skip_special_tokens=False).split("<|user|>")[-1].split("<|")[0].split()
        if words[0] == "refuse":
            raise UserError("temperature must be\nless")
        for word in words:
            yield tokenizer.encode(f"{word} ", add_special_tokens=False)
            if word == "break":
                raise RankLost("rank 2 is lost")

    front = Front(ServerSettings(("first", "second"), api_keys=("right",)))
    attach(front, tokenizer, script)
    with served(front) as running:
        yield running


@pytest.fixture
def url(site: Site) -> str:
    return f"http://127.0.0.1:{site.port}/v1"


def test_any_server_behind_a_url_answers(pipedec: Pipedec, site: Site, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "right")
    said = f"one two\nrefuse\n{'long ' * 3000}\nbreak\nthree\n/stats\n"
    ended = pipedec("chat", "--url", url, "--seed", "7", "--method", "pp", stdin=said.encode())
    assert (ended.status, ended.out) == (0, "one two \nbreak three \n")
    assert f"{url} answers 400: the prompt is too long" in ended.err
    assert f"{url}: temperature must be less" in ended.err and f"{url}: the cluster was lost: rank 2 is lost" in ended.err
    assert "TTFT" in ended.err and "2 answers with" in ended.err and "4 messages" in ended.err
    prompts = [site.engine.tokenizer.decode(request.prompt, skip_special_tokens=False) for request in site.engine.requests]
    assert [prompt.count("<|user|>") for prompt in prompts] == [1, 2, 2, 2]
    assert all("<|user|>one two<|assistant|>one two" in prompt for prompt in prompts[1:])
    sampling = site.engine.requests[0].sampling
    assert (sampling.seed, sampling.temperature, site.engine.requests[0].method) == (7, 1.0, "pp"), "the server's own default"


def test_a_server_behind_a_url_is_asked_for_a_form(pipedec: Pipedec, site: Site, url: str) -> None:
    for flags, asked in (
        (["--choice", "yes", "--choice", "no"], StructuredOutputs(choice=("yes", "no"))),
        (["--json-schema", '{"type": "object"}'], StructuredOutputs(json='{"type": "object"}')),
    ):
        assert pipedec("chat", "--url", url, "--api-key", "right", *flags, stdin=b"Hello\n").status == 0
        assert site.engine.requests[-1].sampling.structured_outputs == asked


def test_a_url_that_does_not_answer_is_refused_in_one_line(pipedec: Pipedec, url: str) -> None:
    named = ("chat", "--url", url, "--api-key", "wrong", "--model", "x")
    assert f"{url} answers 401: give a valid API key" in pipedec(*named, stdin=b"Hi\n").err
    assert "answers 401: give a valid API key" in pipedec("chat", "--url", url, "--api-key", "wrong").refused()
    assert "cannot be reached" in pipedec("chat", "--url", "http://127.0.0.1:9/v1").refused()
    assert "give one like" in pipedec("chat", "--url", "localhost:8000").refused()


@pytest.fixture
def answering() -> Iterator[Callable[[bytes], str]]:
    """Starts a server that answers every chat with one stream, byte by byte; returns its URL."""
    body = b""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.wfile.write(b'HTTP/1.0 200 OK\r\n\r\n{"object": "list", "data": [{"id": "m"}]}')

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.wfile.write(b"HTTP/1.0 200 OK\r\nContent-Type: text/event-stream\r\n\r\n")
            for byte in body:
                self.wfile.write(bytes([byte]))

        def log_message(self, *_: object) -> None:
            pass

    def answer(stream: bytes) -> str:
        nonlocal body
        body = stream
        return f"http://127.0.0.1:{server.server_port}/v1"

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield answer
        server.shutdown()
        thread.join()


def said(text: str) -> bytes:
    """A chunk of an answer, with raw characters as vLLM and llama.cpp write them."""
    return b'{"choices": [{"delta": {"content": "%s"}}]}' % text.encode()


@pytest.mark.failure_case("M21")
@pytest.mark.parametrize("stream, out, complaint", [
    *((b"data: " + said(f"a{end}b") + b"\n\ndata: [DONE]\n\n", f"a{end}b", "") for end in "\u2028\u2029\x85\x0b\x0c\x1c"),
    (b"data:" + said("é") + b"\r\n\r\ndata:[DONE]\r\n\r\n", "é", ""),
    (b"data: " + said("€") + b"\r\rdata: [DONE]\r\r", "€", ""),
    (b"\xef\xbb\xbfevent: x\nid: 1\ndata: " + said("a").replace(b" ", b"\ndata: ") + b"\n\ndata: [DONE]\n", "a", ""),
    (rb'data: {"choices": [{"delta": {"content": "\ud83d"}}]}' + b"\n\ndata: [DONE]\n", "?", ""),
    (b": ping\n\ndata\n\ndata: " + said("a") + b"\n\n: ping\n\ndata: [DONE]\n", "a", ""),
    (b"data: " + said("a") + b"\n\n", "a", "broke off: its stream ends without [DONE]"),
    (b"data: " + said("a") + b"\n\ndata: {\"cho", "a", "broke off"),
    (b'data: {"choices": [{"delta": {"content": "a"}, "finish_reason": "stop"}]}\n\n', "a", ""),
    (b"", "", "broke off"),
    (b'data: {"error": {"message": "out of\\nmemory"}}\n\n', "", "/v1: out of memory"),
    (b"event: error\ndata: it is late\n\n", "", "not an answer of OpenAI's API: it is late"),
    (b'data: {"choices": 7}\n\n', "", "not an answer of OpenAI's API"),
    (b'data: {"choices": null, "error": null}\n\ndata: {"choices": [{"delta": null}]}\n\ndata: [DONE]\n\n', "", ""),
])  # fmt: skip
def test_any_stream_of_events_is_read_or_refused_in_one_line(
    pipedec: Pipedec, answering: Callable[[bytes], str], stream: bytes, out: str, complaint: str
) -> None:
    ended = pipedec("chat", "--url", answering(stream), stdin=b"Hi\n")
    assert (ended.status, ended.out) == (0, out if complaint else f"{out}\n")
    told = [line for line in ended.err.splitlines() if "Ctrl-D leaves" not in line]
    assert len(told) == bool(complaint) and all(complaint in line for line in told), ended.err


@pytest.mark.failure_case("M22")
@pytest.mark.parametrize("name, value, url, complaint", [
    ("ALL_PROXY", "socks5://127.0.0.1:9", "http://h.invalid/v1", "ALL_PROXY names a SOCKS proxy, which pipedec cannot use"),
    ("all_proxy", "socks://u:secret@127.0.0.1:9", "http://h.invalid/v1", "all_proxy names a SOCKS proxy"),
    ("HTTP_PROXY", "ftp://127.0.0.1:9", "http://h.invalid/v1", "names no HTTP proxy: unset it, or set NO_PROXY=h.invalid"),
    ("HTTP_PROXY", "http://127.0.0.1:9", "http://h.invalid/v1", "cannot be reached through the proxy in HTTP_PROXY"),
    ("HTTPS_PROXY", "127.0.0.1:9", "https://h.invalid/v1", "cannot be reached through the proxy in HTTPS_PROXY"),
    ("HTTPS_PROXY", "socks5://127.0.0.1:9", "http://127.0.0.1:9/v1", "cannot be reached: "),
    ("ALL_PROXY", "socks5://127.0.0.1:9", "http://direct.invalid/v1", "cannot be reached: "),
])  # fmt: skip
def test_a_proxy_that_cannot_be_used_is_named_in_one_line(
    pipedec: Pipedec, monkeypatch: pytest.MonkeyPatch, name: str, value: str, url: str, complaint: str
) -> None:
    without_proxies(monkeypatch)
    monkeypatch.setenv(name, value)
    monkeypatch.setenv("NO_PROXY", "direct.invalid")
    refused = pipedec("chat", "--url", url).refused()
    assert complaint in refused and "secret" not in refused


def without_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.mark.failure_case("M22")
@pytest.mark.parametrize(
    "name, value", [("ALL_PROXY", "socks5://127.0.0.1:9"), ("all_proxy", "socks://h"), ("HTTP_PROXY", "http://127.0.0.1:9")]
)
def test_this_machine_is_reached_without_a_proxy(
    pipedec: Pipedec, answering: Callable[[bytes], str], monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    without_proxies(monkeypatch)
    monkeypatch.setenv(name, value)
    url = answering(b"data: " + said("yes") + b"\n\ndata: [DONE]\n\n")
    for host in ("127.0.0.1", "localhost"):
        assert pipedec("chat", "--url", url.replace("127.0.0.1", host), stdin=b"Hi\n").out == "yes\n"


@pytest.mark.failure_case("M23")
@pytest.mark.parametrize("encoding, shown", [("ascii", "caf? ?\n"), ("latin-1", "caf\xe9 ?\n"), ("utf-8", "caf\xe9 \u20ac\n")])
def test_what_standard_output_cannot_show_is_replaced(
    pipedec: Pipedec, answering: Callable[[bytes], str], monkeypatch: pytest.MonkeyPatch, encoding: str, shown: str
) -> None:
    url = answering(b"data: " + said("café €") + b"\n\ndata: [DONE]\n\n")
    for arguments in (
        ["chat", "--url", url],
        ["plan", ROOT / "cluster.yaml"],
        ["--help"],
    ):
        out, err = (io.TextIOWrapper(io.BytesIO(), encoding) for _ in range(2))
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", err)
        assert pipedec(*arguments, stdin="voilà".encode("latin-1")).status == 0
        out.seek(0)
        assert (text := out.read()) and (arguments[0] != "chat" or text == shown)


def test_flags_that_do_not_go_together_are_refused(pipedec: Pipedec) -> None:
    assert "--stages: the cluster runs already" in pipedec("chat", "--running", "--stages", "2").refused()
    assert "--stages: the cluster runs already" in pipedec("chat", "--url", "http://h/v1", "--stages", "2").refused()
    assert "--running: not used with --url" in pipedec("chat", "--url", "http://h/v1", "--running").refused()
    assert "--model: goes with --url" in pipedec("chat", "--model", "x").refused()
    assert "top_p: must be" in pipedec("chat", "--top-p", "2", "--running", "--redis", "redis://127.0.0.1:9").refused()


def test_a_model_without_a_chat_template_is_refused(
    pipedec: Pipedec, known_resident: LocalCluster, pair: Pair, tmp_path: Path
) -> None:
    assert "give --tokenizer DIR if it is elsewhere" in pipedec("chat", "--running", "--tokenizer", tmp_path).refused()
    (tmp_path / "tokenizer.json").write_bytes((pair.target / "tokenizer.json").read_bytes())
    assert "has no chat template: use `pipedec generate`" in pipedec("chat", "--running", "--tokenizer", tmp_path).refused()
