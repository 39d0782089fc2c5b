"""A real Prometheus reads a real server, with the configuration of the repository: every panel of the dashboard has data."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
import pytest
from support.processes import wait_until
from support.programs import Started
from support.serving import body, in_front_of
from support.tiny_pair import Pair

from pipedec.cluster.local import LocalCluster

MONITORING = Path(__file__).resolve().parents[2] / "monitoring"
SECONDS = 60.0

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="no prometheus (Debian: apt-get install prometheus)"),
    pytest.mark.usefixtures("leaves_nothing"),
]


def configuration(folder: Path, target: str) -> Path:
    """The repository's, for another port and with a scrape each second."""
    text = (MONITORING / "prometheus.yml").read_text()
    assert "127.0.0.1:8000" in text and "scrape_interval: 5s" in text
    path = folder / "prometheus.yml"
    path.write_text(text.replace("127.0.0.1:8000", target).replace("scrape_interval: 5s", "scrape_interval: 1s"))
    return path


@contextmanager
def prometheus(folder: Path, target: str) -> Iterator[httpx2.Client]:
    """A Prometheus that reads ``target``, and a client of its API."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(
            ["prometheus", f"--config.file={configuration(folder, target)}", f"--storage.tsdb.path={folder / 'data'}",
             f"--web.listen-address={address}"],
            stdout=log, stderr=log,
        )  # fmt: skip
    try:
        with httpx2.Client(base_url=f"http://{address}/api/v1", timeout=10) as client:
            yield client
    finally:
        process.terminate()
        process.wait(20)


def result(client: httpx2.Client, expression: str) -> list[dict[str, Any]]:
    """What Prometheus answers to a query; nothing while it starts."""
    try:
        answer = client.get("/query", params={"query": expression}).json()
    except (httpx2.TransportError, ValueError):
        return []
    assert answer["status"] == "success", answer
    found: list[dict[str, Any]] = answer["data"]["result"]
    return found


def queries() -> list[str]:
    """Those of the dashboard that have data where nothing is refused."""
    panels = json.loads((MONITORING / "grafana.json").read_text())["panels"]
    asked = [target["expr"] for panel in panels for target in panel.get("targets", [])]
    return [query.replace("$__rate_interval", "1m").replace("$model_name", "tiny") for query in asked if "503" not in query]


def generated(api: httpx2.Client) -> float:
    """The newest count of tokens that Prometheus has read."""
    found = result(api, "sum(vllm:generation_tokens_total)")
    return float(found[0]["value"][1]) if found else 0.0


def test_prometheus_reads_the_server_and_fills_the_dashboard(pair: Pair, started: Started, tmp_path: Path) -> None:
    with LocalCluster(pair.spec(2)) as cluster:
        serving = in_front_of(cluster, started)
        with serving.client as client, prometheus(tmp_path, urlsplit(serving.url).netloc) as api:
            assert wait_until(lambda: result(api, 'up{job="pipedec"} == 1'), SECONDS)
            for count in (4, 8):  # rates need a change between two scrapes
                for _ in range(4):
                    assert client.post("/v1/completions", json=body(64)).status_code == 200
                assert wait_until(partial(_has_read, api, 64 * count), SECONDS)
            for query in queries():
                assert wait_until(partial(result, api, query), SECONDS), query
        serving.end()
        assert serving.ended()[0] == 0


def _has_read(api: httpx2.Client, tokens: int) -> bool:
    return generated(api) >= tokens
