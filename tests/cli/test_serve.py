"""``pipedec serve`` as a process: its start and its end, and what becomes of requests when clients, ranks or servers go away."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import socket
import ssl
import subprocess
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
import psutil
import pytest
from support.processes import wait_until
from support.programs import Calls as Pipedec
from support.programs import Started, Terminal
from support.serving import PROMPT, START_SECONDS, Serving, body, in_front_of, is_idle, metric, streaming
from support.tiny_pair import Pair

from pipedec.cli.answers import submit
from pipedec.cli.serve import serve
from pipedec.client.client import Client
from pipedec.cluster.local import LocalCluster
from pipedec.cluster.state import running_here
from pipedec.config import RedisConfig
from pipedec.core.sampling import SamplingParams
from pipedec.messages.request import PromptRequest
from pipedec.scheduler import connect
from pipedec.server.run import ClusterEnded, ClusterProcess

pytestmark = pytest.mark.usefixtures("leaves_nothing")

KEY = "sk-nobody-reads-this"
LONG = 1500  # tokens: a stream that is still running when the test does something to it


@pytest.fixture(scope="module")
def cluster(resident: LocalCluster) -> LocalCluster:
    """The cluster that the front-ends of these tests share."""
    return resident


@pytest.fixture(scope="module")
def expected(cluster: LocalCluster) -> str:
    """The answer of 64 tokens."""
    return asked_without_http(cluster, 64)


def asked_without_http(cluster: LocalCluster, max_tokens: int) -> str:
    assert cluster.scheduler is not None
    asked = PromptRequest(PROMPT, raw=True, sampling=SamplingParams(max_tokens=max_tokens, ignore_eos=True))
    return Client(cluster.scheduler).ask(asked).text.rstrip("\ufffd")  # HTTP streams no unfinished characters


def raw_request(asked: dict[str, Any]) -> bytes:
    content = json.dumps(asked).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    return head % len(content) + content


def own_cluster(started: Started, pair: Pair, *flags: str | Path) -> Serving:
    flags = (*pair.flags, "--stages", "2", "--served-model-name", "tiny", "--port", "0", *flags)
    return Serving(started("serve", *flags)).wait_for("listening")


def ranks_of(serving: Serving) -> list[psutil.Process]:
    """The processes below the fork server, which is below the supervisor; without those that are just ending."""
    (supervisor,) = psutil.Process(serving.process.pid).children()
    ranks = []
    for child in supervisor.children():
        with suppress(psutil.NoSuchProcess):
            ranks += child.children()
    return ranks


def loads_torch(pid: int) -> bool:
    return "libtorch" in Path(f"/proc/{pid}/maps").read_text()


def test_a_cluster_that_a_signal_ended_has_the_status_of_a_shell() -> None:
    assert [ClusterEnded(returncode).status for returncode in (1, -signal.SIGINT)] == [1, 130]


@pytest.mark.failure_case("H18")
def test_one_command_starts_everything_answers_and_ends_it(started: Started, pair: Pair, pipedec: Pipedec, expected: str) -> None:
    """While the cluster loads, the model is listed and everything else is refused with 503."""
    serving = own_cluster(started, pair, "--stages", "1")
    with serving.client as client:
        loading = [client.get(path).status_code for path in ("/health", "/ready", "/v1/models")]
        refused = client.post("/v1/completions", json=body(4))
        assert loading == [503, 503, 200] and refused.status_code == 503 and "loading" in refused.json()["error"]["message"]
        assert int(refused.headers["retry-after"]) > 0
        serving.wait_for("ready")
        assert [client.get(path).status_code for path in ("/health", "/ready", "/v1/models")] == [200, 200, 200]
        answer = client.post("/v1/completions", json=body(64)).json()
        assert answer["choices"][0]["text"] == expected and answer["usage"]["completion_tokens"] == 64
        assert metric(client, "vllm:generation_tokens_total") == 64
    assert not loads_torch(serving.process.pid) and any(loads_torch(rank.pid) for rank in ranks_of(serving))
    assert "up" in pipedec("status").err
    err = serving.finish()
    assert f"at {serving.url}/v1. Try: curl {serving.url}/v1/completions" in err


@pytest.mark.failure_case("K9")
def test_connections_wait_where_descriptors_end_and_streams_go_on(started: Started, cluster: LocalCluster) -> None:
    def limited(*arguments: str | Path) -> subprocess.Popen[bytes]:
        process = started(*arguments)
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (128, 128))  # long before it counts them
        return process

    serving = in_front_of(cluster, limited)
    with serving.client as client, ExitStack() as open_ones:
        streams = [open_ones.enter_context(streaming(client, 100)) for _ in range(4)]
        address = (urlsplit(serving.url).hostname, urlsplit(serving.url).port)
        for _ in range(300):
            half_open = open_ones.enter_context(socket.create_connection(address, timeout=60))
            half_open.sendall(b"GET /v1/mod")
        assert wait_until(lambda: serving.events("connections_full"))
        assert {stream.read_all().text for stream in streams} == {asked_without_http(cluster, 100)}
    with serving.client as client:
        assert client.post("/v1/completions", json=body(4)).status_code == 200
    assert len(serving.events("connections_full")) < 5 and not serving.events("lost")
    serving.finish()


@pytest.mark.slow
@pytest.mark.in_turn(2)
def test_pipedec_down_ends_it_in_order(started: Started, pair: Pair, pipedec: Pipedec) -> None:
    serving = own_cluster(started, pair).wait_for("ready")
    assert pipedec("down").status == 0
    assert serving.ended()[0] == 0


@pytest.mark.slow
@pytest.mark.in_turn(2)
@pytest.mark.failure_case("M14")
def test_a_rank_that_dies_ends_streams_with_an_error_and_the_server_with_the_cause(started: Started, pair: Pair) -> None:
    """Where none is replaced."""
    serving = own_cluster(started, pair, "--max-restarts", "0").wait_for("ready")
    with serving.client as client, streaming(client, LONG) as stream:
        ranks_of(serving)[-1].kill()
        stream.read_all()
    assert stream.error is not None and "rank" in stream.error["message"] and stream.finish_reason is None
    status, err = serving.ended()
    (lost,) = serving.events("lost")
    assert stream.error["message"] == f"the cluster was lost: {lost['reason']}"
    assert status == 1 and "was killed by SIGKILL" in err.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.in_turn(2)
@pytest.mark.failure_case("S1")
def test_a_rank_that_dies_is_replaced_and_the_stream_goes_on(started: Started, pair: Pair, cluster: LocalCluster) -> None:
    serving = own_cluster(started, pair).wait_for("ready")
    with serving.client as client, streaming(client, 200) as stream:
        ranks_of(serving)[-1].kill()
        assert stream.read_all().text == asked_without_http(cluster, 200) and stream.error is None
    err = serving.finish()
    assert "was killed by SIGKILL; went on after" in err


@pytest.mark.slow
@pytest.mark.in_turn(2)
def test_a_server_that_is_killed_takes_its_cluster_with_it(started: Started, pair: Pair) -> None:
    """``leaves_nothing`` looks for what is left."""
    serving = own_cluster(started, pair).wait_for("ready")
    serving.end(signal.SIGKILL)
    serving.process.wait(10)


@pytest.mark.slow
@pytest.mark.in_turn(2)
@pytest.mark.failure_case("K7")
def test_ctrl_c_while_it_starts(started: Started, pair: Pair) -> None:
    """Nothing is left five seconds later, Redis included: ``leaves_nothing`` waits longer, this test does not."""
    serving = own_cluster(started, pair)
    assert wait_until(lambda: psutil.Process(serving.process.pid).children() and len(ranks_of(serving)) >= 3, START_SECONDS)
    family = serving.descendants
    os.killpg(serving.process.pid, signal.SIGINT)
    assert wait_until(lambda: not any(process.is_running() and process.status() != "zombie" for process in family), 5.0)
    assert serving.ended(5.0)[0] in (0, 130)


def test_what_cannot_work_is_refused_before_anything_is_loaded(
    pipedec: Pipedec, pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ClusterProcess, "start", lambda self: pytest.fail("it was started"))
    empty = tmp_path / "keys"
    empty.write_text("# none\n")
    (tmp_path / "generation_config.json").write_text('{"temperature": "hot"}')
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert f"port {port} on 127.0.0.1 is in use" in pipedec("serve", "--port", port).refused()
    for flags, words in (
        (("--ssl-certfile", tmp_path / "nowhere"), "there is no such file"),
        (("--host", "192.0.2.1"), "is no address of this machine"),
        (("--api-key-file", empty), "holds no key"),
        (("--api-key-file", tmp_path / "nowhere"), "No such file"),
        (("--api-key", ""), "an API key is empty"),
        (("--allowed-origins", "https://example.org"), "write a JSON list"),
        (("--allow-credentials",), "name the pages in --allowed-origins"),
        (("--port", "99999"), "99999"),
        (("--log-format", "xml"), "Invalid value for '--log-format': must be one of auto, json, text,"),
        (("--generation-config", tmp_path / "nowhere"), "there is no such directory"),
        (("--generation-config", tmp_path), "generation_config.json: temperature: must be a number (at least 0), not 'hot'"),
        (("--running",), "no cluster is running here"),
        (("--running", "--stages", "2"), "--stages: a running cluster is served as it is"),
    ):
        assert words in pipedec("serve", "--port", "0", *flags).refused()
    nobody = ("--redis", "redis://:secret@127.0.0.1:1/0")
    assert "secret" not in (line := pipedec("serve", "--port", "0", *nobody).refused(1)) and "127.0.0.1:1" in line


@pytest.mark.slow
@pytest.mark.failure_case("M1")
def test_a_target_that_cannot_be_loaded_ends_it_with_one_line(started: Started, tmp_path: Path) -> None:
    serving = Serving(started("serve", "--target", tmp_path, "--draft", "none", "--port", "0"))
    status, err = serving.ended(START_SECONDS)
    assert status == 2 and len(err.splitlines()) == 1 and str(tmp_path) in err


@pytest.mark.slow
@pytest.mark.failure_case("K6")
def test_sigterm_lets_running_answers_finish(cluster: LocalCluster, started: Started) -> None:
    serving = in_front_of(cluster, started)
    with serving.client as client, serving.client as other, streaming(client, LONG // 3) as stream:
        serving.end()
        serving.wait_for("draining")
        assert other.get("/ready").status_code == 503 and other.get("/health").status_code == 200
        refused = other.post("/v1/completions", json=body(4))
        assert refused.status_code == 503 and "shutting down" in refused.json()["error"]["message"]
        stream.read_all()
    assert stream.finish_reason == "length" and stream.is_done and stream.error is None
    assert serving.ended()[0] == 0


@pytest.mark.slow
@pytest.mark.failure_case("K6")
def test_answers_that_take_too_long_are_ended_with_what_they_have(cluster: LocalCluster, started: Started) -> None:
    serving = in_front_of(cluster, started, "--shutdown-timeout", "0")
    with serving.client as client, streaming(client, LONG) as stream:
        serving.end()
        stream.read_all()
    assert stream.finish_reason == "abort" and stream.is_done and stream.text
    assert serving.ended()[0] == 0
    assert wait_until(lambda: is_idle(cluster))


@pytest.mark.slow
@pytest.mark.failure_case("K6")
def test_a_second_signal_ends_at_once(cluster: LocalCluster, started: Started) -> None:
    serving = in_front_of(cluster, started)
    with serving.client as client, streaming(client, LONG) as stream:
        serving.end()
        serving.wait_for("draining")
        serving.end()
        stream.read_all()
    assert stream.finish_reason == "abort"
    status, err = serving.ended()
    assert status == 1 and "1 answers were cut" in err.splitlines()[-1]
    assert wait_until(lambda: is_idle(cluster))


@pytest.mark.slow
@pytest.mark.failure_case("K8")
def test_a_killed_front_end_loses_its_requests_and_nobody_elses(cluster: LocalCluster, started: Started, expected: str) -> None:
    dying, living = in_front_of(cluster, started), in_front_of(cluster, started)
    with dying.client as one, living.client as other, streaming(one, LONG), streaming(other, 64) as stream:
        dying.end(signal.SIGKILL)
        dying.process.wait(10)
        assert stream.read_all().text == expected
        assert wait_until(lambda: is_idle(cluster), 30.0)
    living.finish()


@pytest.mark.slow
@pytest.mark.failure_case("K3")
def test_a_client_that_stops_reading_holds_little_memory_and_nobody_up(
    cluster: LocalCluster, started: Started, expected: str
) -> None:
    """Its receive window is full after a few kilobytes; what it has asked for would be hundreds of times that."""
    front = in_front_of(cluster, started)
    server = psutil.Process(front.process.pid)
    with socket.socket() as connection, front.client as client:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        connection.connect(("127.0.0.1", httpx2.URL(front.url).port or 0))
        client.post("/v1/completions", json=body(64))  # everything is loaded
        before = server.memory_info().rss
        connection.sendall(raw_request(body(LONG, stream=True, logprobs=20, n=8)))
        assert wait_until(lambda: not is_idle(cluster))
        for _ in range(3):
            assert client.post("/v1/completions", json=body(64)).json()["choices"][0]["text"] == expected
        assert server.memory_info().rss < before + 64 * 2**20
    assert wait_until(lambda: is_idle(cluster))


@pytest.mark.fast_cases
@pytest.mark.parametrize("flags", [(), ("--enable-log-requests", "--max-log-len", "7")])
@pytest.mark.failure_case("M13")
def test_the_log_names_requests_and_keeps_secrets(
    cluster: LocalCluster, started: Started, tmp_path: Path, expected: str, flags: tuple[str, ...]
) -> None:
    """Prompts only if they are asked for, keys and passwords never, what requests get that set nothing, and no polls."""
    keys, file = tmp_path / "keys", tmp_path / "generation_config.json"
    keys.write_text("sk-file-1234\n")
    file.write_text('{"temperature": 0, "max_new_tokens": 6}')
    flags = ("--api-key", "sk-flag-5678", "--api-key-file", keys, "--generation-config", tmp_path, *flags)
    serving = in_front_of(cluster, started, *flags)
    with serving.client as client:
        for path in ("/health", "/ready", "/metrics"):
            assert client.get(path).status_code == 200
        unset = {name: value for name, value in body(64).items() if name != "temperature"}
        assert client.post("/v1/completions", json=unset).status_code == 401
        client.headers.update({"Authorization": "Bearer sk-file-1234", "X-Request-Id": "mine"})
        assert client.post("/v1/completions", json=unset).json()["choices"][0]["text"] == expected
        client.post("/v1/completions", json=body(4, prompt="sk-flag-5678 is my key"))
        chat = client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "Hi"}], "ignore_eos": True})
        assert chat.json()["usage"]["completion_tokens"] == 6
    err = serving.finish()
    (request, other, _), (answer, *_) = serving.events("request"), serving.events("answer")
    assert request["request_id"] == answer["request_id"] == "mine" and answer["output_tokens"] == 64
    is_shown = "--max-log-len" in flags
    assert (request.get("prompt"), "prompt" in other) == ((PROMPT[:7], True) if is_shown else (None, False))
    assert PROMPT not in serving.text
    password = urlsplit(cluster.address.redis_url).password
    for secret in ("sk-file-1234", "sk-flag-5678", password):
        assert secret and secret not in serving.text + err
    (defaults,) = serving.events("sampling_defaults")
    assert (defaults["source"], defaults["temperature"], defaults["top_p"], defaults["max_tokens"]) == (str(file), 0, 1, 6)
    assert [line["route"] for line in serving.events("response")] == [
        "other", "/v1/completions", "/v1/completions", "/v1/chat/completions",
    ]  # fmt: skip
    states = [line["event"] for line in serving.log if line["event"] in ("listening", "ready", "draining", "lost")]
    assert states == ["listening", "ready", "draining"]


def test_a_terminal_shows_where_to_go_and_how_it_samples(
    cluster: LocalCluster, terminal: Callable[..., Terminal], pair: Pair
) -> None:
    """Lines for people there; what is not a terminal gets the same events as JSON."""
    address = cluster.address
    flags = ("--redis", address.redis_url, "--run", address.run_id, "--port", "0", "--generation-config", "vllm")
    serving = terminal("serve", *flags, COLUMNS="400")
    lines = serving.until(" ready ").splitlines()
    serving.process.terminate()
    assert serving.ended() == 0
    first, second, *_ = [line for line in lines if re.match(r"\d\d:\d\d:\d\d ", line)]
    url = re.search(r" INFO    API  (http://127.0.0.1:\d+)/v1   chat  (\S+)/   live page  (\S+)/live   loading (\S+)$", first)
    assert url is not None and url[1] == url[2] == url[3] and url[4] == str(pair.target)
    expected = "sampling_defaults source=vllm temperature=1.0 top_p=1.0 top_k=0 min_p=0.0 repetition_penalty=1.0"
    assert second.endswith(f"INFO    {expected}")


@pytest.mark.slow
def test_a_unix_socket(cluster: LocalCluster, started: Started, short_directory: Path) -> None:
    path = short_directory / "serve.sock"
    serving = in_front_of(cluster, started, "--uds", path)
    with httpx2.Client(transport=httpx2.HTTPTransport(uds=str(path)), base_url="http://localhost") as client:
        assert client.post("/v1/completions", json=body(4)).json()["usage"]["completion_tokens"] == 4
    serving.end()
    assert serving.ended()[0] == 0 and not path.exists()


@pytest.mark.slow
def test_https(cluster: LocalCluster, started: Started, tmp_path: Path) -> None:
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "1",
         "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate],
        check=True, capture_output=True,
    )  # fmt: skip
    serving = in_front_of(cluster, started, "--ssl-certfile", certificate, "--ssl-keyfile", key)
    assert serving.url.startswith("https://")
    with (
        httpx2.Client(base_url=serving.url, verify=ssl.create_default_context(cafile=certificate)) as client,
        streaming(client, 16) as stream,
    ):
        assert stream.read_all().is_done
    serving.finish()


@pytest.mark.slow
@pytest.mark.failure_case("M14")
def test_a_front_end_of_a_cluster_that_is_lost_ends_with_the_cause(pair: Pair, started: Started) -> None:
    with LocalCluster(pair.spec(2)) as cluster:
        serving = in_front_of(cluster, started)
        cluster.kill()
        status, err = serving.ended()
    assert status == 1 and len(err.splitlines()) == 2 and err.splitlines()[-1].startswith("pipedec: ")


@pytest.mark.slow
def test_a_tokenizer_that_is_not_there_is_told_in_one_line(cluster: LocalCluster, started: Started, tmp_path: Path) -> None:
    address = cluster.address
    flags = ("--redis", address.redis_url, "--run", address.run_id, "--tokenizer", tmp_path, "--port", "0")
    status, err = Serving(started("serve", *flags)).ended()
    assert status == 2 and len(err.splitlines()) == 1 and "--tokenizer DIR" in err and str(tmp_path) in err


@pytest.mark.slow
@pytest.mark.failure_case("M13")
def test_neither_password_nor_key_are_shown(
    started: Started, pipedec: Pipedec, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIPEDEC_API_KEY", KEY)
    serving = own_cluster(started, pair).wait_for("ready")
    (state,) = running_here()
    password = RedisConfig(state.redis_url).password
    assert password
    shown = [" ".join(process.cmdline()) for process in (psutil.Process(serving.process.pid), *serving.descendants)]
    shown.append(pipedec("status").out)
    with serving.client as client:
        shown += [answered(client, path) for path in ("/health", "/metrics", "/version", "/openapi.json")]
        shown.append(client.post("/v1/completions", json=body(4), headers={"Authorization": "Bearer wrong"}).text)
        client.headers["Authorization"] = f"Bearer {KEY}"
        assert client.post("/v1/completions", json=body(4)).status_code == 200
    shown += stored(state.redis_url)
    err = serving.finish()
    assert len(shown) > 9
    for text in (*shown, serving.text, err):
        assert password not in text and KEY not in text


def stored(redis_url: str) -> list[str]:
    """All that is in Redis, key by key."""
    client = connect(redis_url)
    client.config_set("rdbcompression", "no")  # what DUMP returns holds every text as it is
    dumped = [(client.dump(key) or b"").decode(errors="replace") for key in client.scan_iter()]
    client.close()
    assert any("tiny" in text or "target" in text for text in dumped)
    return dumped


def answered(client: httpx2.Client, path: str) -> str:
    response = client.get(path)
    return f"{response.headers}{response.text}"


GUIDE = (Path(__file__).resolve().parents[2] / "docs" / "serving.md").read_text()


def test_every_flag_exists() -> None:
    flags = {name for command in (serve, submit) for parameter in command.params for name in parameter.opts} | {"--help"}
    spoken = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", re.sub(r"```(nginx|ini).*?```", "", GUIDE, flags=re.DOTALL)))
    assert spoken <= flags, spoken - flags
