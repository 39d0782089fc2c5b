"""Limits, keys and states of the server: heads and bodies that are too large or too slow, 401, 503, and clients that leave."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from support.http_server import (
    BOTH,
    CHAT,
    COMPLETIONS,
    USER,
    Site,
    ask,
    chunks,
    filled,
    next_chunk,
    open_stream,
    send,
    served,
    stream,
    text_of,
)
from support.processes import wait_until
from support.scripted_engine import ANSWER, ScriptedEngine, attach, in_bursts

from pipedec.core.errors import QueueFull, RankLost, UserError
from pipedec.scheduler.protocol import RunStatus
from pipedec.server.front import Front, Generation, HttpExchange, Observer, ServerSettings
from pipedec.server.listening import MAX_HEAD_BYTES, LimitedConnection
from pipedec.server.prompts import READERS
from pipedec.text.tokenizer import Tokenizer

KEYS = ("first-key", "second-key")


class Notes(Observer):
    """Writes down what it hears."""

    def __init__(self) -> None:
        self.exchanges: list[HttpExchange] = []
        self.answers: list[str] = []

    def began(self, generation: Generation) -> None:
        self.answers.append(f"began {generation.endpoint} {generation.prompt_tokens} {generation.request_id}")

    def tokens(self, generation: Generation, count: int, arrived: float) -> None:
        self.answers.append(f"tokens {count}")

    def ended(self, generation: Generation, reason: str, completion: object) -> None:
        self.answers.append(f"ended {reason} {generation.output_tokens}")

    def responded(self, exchange: HttpExchange) -> None:
        self.exchanges.append(exchange)


@pytest.fixture
def loading() -> Iterator[Site]:
    """A server of the test's own that has keys and allows an origin, and whose cluster loads."""
    settings = ServerSettings(("tiny",), api_keys=KEYS, allowed_origins=("https://chat.example",))
    with served(Front(settings, [Notes()])) as site:
        site.client.headers["authorization"] = f"Bearer {KEYS[1]}"
        yield site


Load = Callable[[Front], ScriptedEngine]


@pytest.fixture
def load(text_tokenizer: Tokenizer, answer_ids: list[int]) -> Load:
    return lambda front: attach(front, text_tokenizer, lambda request: in_bursts(answer_ids))


@pytest.fixture
def own_site(loading: Site, load: Load) -> Site:
    """The same when it has loaded."""
    load(loading.front)
    return loading


def raw_answer(connection: socket.socket) -> bytes:
    """All that comes until the server closes the connection."""
    received = b""
    with suppress(ConnectionResetError):
        while piece := connection.recv(65536):
            received += piece
    return received


@pytest.mark.failure_case("H10")
def test_heads_that_are_too_long_are_refused_and_others_are_not(site: Site) -> None:
    for filler in (b"GET / HTTP/1.1\r\nA: ", b"GET /", b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 20_000):
        with site.connect() as connection:
            with suppress(OSError):  # it is closed in the middle of it
                connection.sendall(filler)
                for _ in range(200):
                    connection.sendall(b"x" * 1024)
            assert not (answer := raw_answer(connection)) or answer.startswith(b"HTTP/1.1 431 ")
    large = "x" * (MAX_HEAD_BYTES // 4)
    for _ in range(3):  # on one connection: every head has the whole limit
        response = site.client.post("/tokenize", json={"prompt": "many words " * 20_000}, headers={"a": large, "b": large})
        assert response.status_code == 400 and "220000 characters" in response.text


@pytest.mark.failure_case("H10")
def test_a_head_that_never_ends_is_given_up(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LimitedConnection, "head_seconds", 0.2)
    for beginning in (b"", b"GET / HT", b"GET /health HTTP/1.1\r\nHost: a\r\n\r\nGET / HTTP/1.1\r\n"):
        with site.connect() as connection:
            connection.sendall(beginning)
            assert (b"200 OK" in raw_answer(connection)) == (b"\r\n\r\n" in beginning)


@pytest.mark.failure_case("H9")
def test_a_large_body_is_refused_before_all_of_it_has_come(site: Site) -> None:
    with site.connect() as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 50000000\r\n\r\n" + b"x" * 1000)
        answer = raw_answer(connection)
    assert answer.startswith(b"HTTP/1.1 413") and b"1,000,000 bytes" in answer


def test_a_client_that_sends_a_large_body_reads_the_refusal(site: Site) -> None:
    for content in (b"x" * 3_000_000, (b"x" * 100_000 for _ in range(15))):  # the second of unknown length
        response = site.client.post(COMPLETIONS, content=content)
        assert response.status_code == 413 and response.json()["error"]["type"] == "RequestTooLargeError"


@pytest.mark.failure_case("H10")
def test_a_slow_body_is_given_up(site: Site) -> None:
    with site.connect() as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: 10\r\n\r\n{}1"
        )
        answer = raw_answer(connection)
    assert answer.startswith(b"HTTP/1.1 408") and b"1 seconds" in answer
    assert site.engine.requests == [] and site.front.unfinished == 0
    ask(site, COMPLETIONS)


def test_who_reads_a_stream_for_longer_than_a_body_may_take_goes_on(site: Site) -> None:
    site.engine.allowed = 2
    with open_stream(site, CHAT) as response:
        lines = response.iter_lines()
        begun = next_chunk(lines)
        time.sleep(1.2)  # a body may take one second
        site.engine.allowed = 1000
        assert text_of([begun, *chunks("\n".join(lines))]) == ANSWER


@pytest.mark.failure_case("H16")
def test_without_a_valid_key_only_pages_health_and_metrics_are_open(own_site: Site) -> None:
    for header in (b"", b"Bearer wrong", b"Basic first-key", b"first-key", b"Bearer", b"Bearer first-ke\xff"):
        headers = {"authorization": header}
        for method, path in (("GET", "/v1/models"), ("POST", COMPLETIONS), ("POST", CHAT), ("GET", "/v1/nothing"),
                             ("POST", "/tokenize"), ("POST", "/detokenize")):  # fmt: skip
            response = own_site.client.request(method, path, headers=headers)
            assert response.status_code == 401 and response.headers["www-authenticate"] == "Bearer"
            assert response.json()["error"]["type"] == "AuthenticationError"
        assert own_site.client.get("/health", headers=headers).status_code == 200
    del own_site.client.headers["authorization"]
    assert own_site.client.post(CHAT).status_code == 401
    for key in KEYS:
        assert own_site.client.get("/v1/models", headers={"authorization": f"bearer {key}"}).status_code == 200


def test_each_key_is_a_tenant_of_its_own(own_site: Site) -> None:
    """The same for every request and choice with that key; its name has nothing of the key."""
    for key in (*KEYS, KEYS[0]):
        own_site.client.headers["authorization"] = f"Bearer {key}"
        ask(own_site, COMPLETIONS, n=2)
        ask(own_site, CHAT)
    tenants = [request.tenant for request in own_site.engine.requests]
    first, second = tenants[0], tenants[3]
    assert tenants == [first] * 3 + [second] * 3 + [first] * 3 and first != second
    for tenant in (first, second):
        assert tenant is not None and all(key not in tenant for key in KEYS) and len(tenant) == 32


def test_without_keys_requests_have_no_tenant(site: Site) -> None:
    for path in (COMPLETIONS, CHAT):
        response = site.client.post(path, json=filled(path, {}), headers={"authorization": f"Bearer {KEYS[0]}"})
        assert response.status_code == 200 and site.engine.requests[-1].tenant is None


def test_pages_of_allowed_origins_may_ask(own_site: Site) -> None:
    origin = {"origin": "https://chat.example"}
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    response = own_site.client.options(CHAT, headers=asked | origin)
    assert response.status_code == 200 and response.headers["access-control-allow-origin"] == "https://chat.example"
    assert own_site.client.options(CHAT, headers={**asked, "origin": "https://evil.example"}).status_code == 400
    response = own_site.client.get("/v1/models", headers={**origin, "authorization": ""})
    assert response.status_code == 401 and "access-control-allow-origin" in response.headers


@pytest.mark.failure_case("H18")
def test_while_the_model_is_loading_requests_are_refused_and_models_are_listed(loading: Site, load: Load) -> None:
    for method, path in (("POST", COMPLETIONS), ("POST", CHAT), ("POST", "/tokenize"), ("GET", "/health"), ("GET", "/ready")):
        body = {"prompt": "hello", "messages": USER} if method == "POST" else None
        response = loading.client.request(method, path, json=body)
        assert response.status_code == 503 and "loading" in response.json()["error"]["message"]
        assert int(response.headers["retry-after"]) > 0
    assert loading.client.get("/v1/models").json()["data"][0]["id"] == "tiny"
    load(loading.front)
    assert loading.client.get("/health").status_code == loading.client.get("/ready").status_code == 200
    ask(loading, CHAT)


@BOTH
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.failure_case("H17")
def test_a_full_queue_is_503_with_retry_after(site: Site, path: str, streamed: bool) -> None:
    site.engine.full, site.engine.full_after = QueueFull("1000 requests are unfinished: try again later"), 2
    response = site.client.post(path, json=filled(path, {"n": 4, "stream": streamed}))
    assert response.status_code == 503 and int(response.headers["retry-after"]) > 0
    assert response.json()["error"]["type"] == "ServiceUnavailableError"
    assert wait_until(lambda: site.engine.cancelled == [0, 1]) and site.front.unfinished == 0


@BOTH
def test_what_the_engine_refuses_is_a_bad_request(site: Site, path: str) -> None:
    site.engine.refusal = UserError("the prompt is wrong: mend it")
    response = site.client.post(path, json=filled(path, {}))
    assert response.status_code == 400 and response.json()["error"]["message"] == "the prompt is wrong: mend it"


@BOTH
def test_a_lost_cluster_ends_open_answers_with_an_error(site: Site, path: str) -> None:
    site.engine.allowed = 4
    with open_stream(site, path) as response:
        lines = response.iter_lines()
        next_chunk(lines)
        site.engine.failure = RankLost("rank 2 died")
        rest = [line for line in lines if line]
    assert json.loads(rest[-2][6:])["error"]["code"] == 503 and "rank 2 died" in rest[-2]
    assert rest[-1] == "data: [DONE]"
    response = site.client.post(path, json=filled(path, {}))
    assert response.status_code == 503 and "rank 2 died" in response.json()["error"]["message"]
    assert site.front.unfinished == 0


def test_a_lost_cluster_takes_no_requests(own_site: Site) -> None:
    own_site.front.lose("rank 2 died")
    for method, path in (("POST", COMPLETIONS), ("GET", "/health"), ("GET", "/ready")):
        response = own_site.client.request(method, path, json={"prompt": "hello"} if method == "POST" else None)
        assert response.status_code == 503 and "rank 2 died" in response.json()["error"]["message"]


def test_health_tells_of_a_recovery(own_site: Site) -> None:
    """A cluster that replaces a rank goes on taking requests."""
    assert own_site.client.get("/health").json() == {"status": "ok", "epoch": 0}
    for serving, status in ((2, "recovering"), (3, "ok")):
        own_site.engine.last_status = RunStatus("up", 1, 0, (), (0, 1), epoch=3, serving=serving, recovers=True)
        for path in ("/health", "/ready"):
            response = own_site.client.get(path)
            assert (response.status_code, response.json()) == (200, {"status": status, "epoch": 3})


def test_a_draining_server_finishes_what_it_has_and_takes_nothing_new(own_site: Site) -> None:
    own_site.engine.allowed = 4
    with open_stream(own_site, CHAT) as response:
        lines = response.iter_lines()
        begun = next_chunk(lines)
        own_site.front.drain()
        assert own_site.client.get("/ready").status_code == 503 and own_site.client.get("/health").status_code == 200
        refusal = own_site.client.post(CHAT, json={"messages": USER})
        assert refusal.status_code == 503 and "retry-after" in refusal.headers
        assert own_site.front.unfinished == 1
        own_site.engine.allowed = 1000
        parts = [begun, *chunks("\n".join(lines))]
    assert text_of(parts) == ANSWER and own_site.front.unfinished == 0


def test_aborted_answers_end_with_what_they_have(own_site: Site) -> None:
    engine = own_site.engine
    engine.allowed = 8
    with open_stream(own_site, CHAT, stream_options={"include_usage": True}) as response:
        lines = response.iter_lines()
        begun = next_chunk(lines)
        own_site.call(own_site.front.abort)
        *parts, usage = [begun, *chunks("\n".join(lines))]
    assert parts[-1]["choices"][0]["finish_reason"] == "abort" and ANSWER.startswith(text_of(parts)) and text_of(parts)
    assert usage["usage"]["completion_tokens"] <= 8 and engine.cancelled == [0]
    engine.allowed, engine.refusal = 0, UserError("the request was cancelled before it began")
    own_site.call(own_site.front.abort)
    assert wait_until(lambda: own_site.front.unfinished == 0)


@pytest.mark.failure_case("K4")
def test_request_ids_come_back_and_mix_nothing(site: Site) -> None:
    site.engine.allowed = 3
    with open_stream(site, CHAT) as one, open_stream(site, CHAT, n=2) as other:
        site.engine.allowed = 1000
        texts = [text_of(chunks("\n".join(response.iter_lines()))) for response in (one, other)]
    assert texts == [ANSWER, ANSWER]
    documents = [site.client.post(CHAT, json={"messages": USER}, headers={"x-request-id": "same"}) for _ in range(2)]
    assert [response.headers["x-request-id"] for response in documents] == ["same", "same"]
    assert len({response.json()["id"] for response in documents}) == 2
    strange = site.client.get("/health", headers={"x-request-id": "x" * 200})
    assert strange.headers["x-request-id"] != "x" * 200


def test_the_observer_hears_of_answers_and_of_refusals(loading: Site, load: Load) -> None:
    notes: Any = loading.front.observers[0]
    loading.client.post(COMPLETIONS, json={"prompt": "hi"})
    load(loading.front)
    loading.client.post(COMPLETIONS, json={"prompt": "hi", "max_tokens": 2}, headers={"x-request-id": "mine"})
    loading.client.get("/nothing")
    assert wait_until(lambda: len(notes.exchanges) == 3)
    assert notes.answers == ["began /v1/completions 2 mine", "tokens 1", "tokens 1", "ended length 2"]
    assert [(one.method, one.route, one.status) for one in notes.exchanges] == [
        ("POST", COMPLETIONS, 503), ("POST", COMPLETIONS, 200), ("GET", "other", 404),
    ]  # fmt: skip
    assert "loading" in (notes.exchanges[0].error or "") and notes.exchanges[1].error is None


def test_an_internal_error_says_nothing_of_the_inside(own_site: Site) -> None:
    own_site.engine.script = lambda request: 1 / 0  # type: ignore[assignment, return-value]
    response = own_site.client.post(CHAT, json={"messages": USER})
    assert response.status_code == 500 and "division" not in response.text
    assert response.json()["error"]["type"] == "InternalServerError"
    own_site.call(own_site.front.abort)
    assert own_site.front.unfinished == 0
    notes: Any = own_site.front.observers[0]
    assert wait_until(lambda: [one.status for one in notes.exchanges] == [500])


def test_the_openapi_document_names_fields_and_errors(site: Site) -> None:
    document = site.client.get("/openapi.json").json()
    for path, kind in ((COMPLETIONS, "CompletionBody"), (CHAT, "ChatBody")):
        responses = document["paths"][path]["post"]["responses"]
        assert {"200", "400", "401", "404", "408", "413", "500", "503"} <= set(responses)
        assert set(responses["200"]["content"]) == {"application/json", "text/event-stream"}
        assert {"logit_bias", "stream_options", "method", "threads"} <= set(document["components"]["schemas"][kind]["properties"])
    assert "swagger" in site.client.get("/docs").text
    assert "422" not in json.dumps(document["paths"])


def test_a_silent_stream_pings_so_that_proxies_keep_it(load: Load) -> None:
    front = Front(ServerSettings(("tiny",), ping_seconds=0.05))
    engine = load(front)
    engine.allowed = 0
    with served(front) as site, open_stream(site, CHAT) as response:
        lines = response.iter_lines()
        assert next(lines).startswith(": ping")
        engine.allowed = 1000
        assert text_of(chunks("\n".join(lines))) == ANSWER


def reset(connection: socket.socket) -> None:
    """As when a client's machine vanishes and comes back: RST instead of FIN."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


@BOTH
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.failure_case("K1", "K2")
def test_the_requests_of_a_client_that_leaves_are_cancelled(site: Site, path: str, n: int, streamed: bool) -> None:
    for leave in (socket.socket.close, reset):
        site.engine.reset()
        site.engine.allowed = 2
        connection = site.connect()
        send(site, path, connection, n=n, stream=streamed)
        assert wait_until(lambda: site.front.unfinished == n)
        leave(connection)
        assert wait_until(lambda: site.front.unfinished == 0)
        assert wait_until(lambda: sorted(site.engine.cancelled) == list(range(n)))


@BOTH
def test_a_client_that_leaves_in_mid_stream_is_noticed_before_the_next_token(site: Site, path: str) -> None:
    site.engine.allowed = 6
    with open_stream(site, path) as response:
        next_chunk(response.iter_lines())
    assert wait_until(lambda: site.engine.cancelled == [0]) and site.front.unfinished == 0


@pytest.mark.failure_case("K11")
def test_a_prompt_whose_client_has_left_is_not_read(own_site: Site) -> None:
    may_end, (notes,) = threading.Event(), own_site.front.observers
    assert isinstance(notes, Notes)
    busy = [asyncio.run_coroutine_threadsafe(READERS.run(may_end.wait), own_site.loop) for _ in range(2)]
    try:
        with own_site.connect() as connection:
            send(own_site, CHAT, connection)
            assert own_site.client.get("/health").status_code == 200
        assert wait_until(lambda: [exchange.status for exchange in notes.exchanges if exchange.method == "POST"] == [499])
    finally:
        may_end.set()
    assert [one.result(20) for one in busy] == [True, True]
    ask(own_site, CHAT)
    assert len(own_site.engine.requests) == 1


def test_an_answer_that_was_read_is_not_cancelled(site: Site) -> None:
    stream(site, CHAT)
    site.client.post(COMPLETIONS, json={"prompt": "hello"})
    assert site.front.unfinished == 0 and site.engine.cancelled == []


@pytest.mark.failure_case("K3")
def test_a_client_that_stops_reading_stalls_nobody_and_loses_its_stream(site: Site) -> None:
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", site.port))
        send(site, CHAT, connection, stream=True, n=8, ignore_eos=True, max_tokens=900, logprobs=True, top_logprobs=5)
        assert wait_until(lambda: site.front.unfinished > 0)
        assert text_of(stream(site, CHAT)) == ANSWER
        assert wait_until(lambda: site.front.unfinished == 0)
