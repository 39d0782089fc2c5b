"""The password of Redis and the API key appear nowhere: not in output, command lines, HTTP answers or Redis."""

from __future__ import annotations

import httpx2
import psutil
import pytest
from support.called import Calls as Pipedec
from support.programs import Started
from support.serving import Serving, body
from support.tiny_pair import Pair

from pipedec.cluster.state import read_state
from pipedec.config import RedisConfig
from pipedec.scheduler import connect

pytestmark = pytest.mark.usefixtures("leaves_nothing")
KEY = "sk-nobody-reads-this"


@pytest.mark.slow
@pytest.mark.failure_case("M13")
def test_neither_password_nor_key_are_shown(
    started: Started, pipedec: Pipedec, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIPEDEC_API_KEY", KEY)
    flags = (*pair.flags, "--stages", "2", "--served-model-name", "tiny", "--port", "0")
    serving = Serving(started("serve", *flags)).wait_for("ready")
    state = read_state()
    assert state is not None
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
    serving.end()
    status, err = serving.ended()
    assert status == 0 and len(shown) > 9
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
