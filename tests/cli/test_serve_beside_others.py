"""A real nginx and a real Prometheus beside a real server, with the configurations of docs/serving.md and of monitoring/."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
import pytest
from support.processes import wait_until
from support.programs import Started
from support.serving import body, in_front_of, is_idle, streaming

from pipedec.cluster.local import LocalCluster

ROOT = Path(__file__).resolve().parents[2]
TOKENS = 1000
SECONDS = 60.0

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("leaves_nothing")]


def needs(program: str, package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(shutil.which(program) is None, reason=f"no {program} (Debian: apt-get install {package})")


@contextmanager
def beside(folder: Path, command: Callable[[str], list[str | Path]]) -> Iterator[httpx2.Client]:
    """A program that listens on a free port, and a client of it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(command(address), stdout=output, stderr=output)
    try:
        with httpx2.Client(base_url=f"http://{address}", timeout=60) as client:
            yield client
    finally:
        process.terminate()
        process.wait(20)


def nginx(folder: Path, behind: str, address: str) -> list[str | Path]:
    """With the server of the guide, without TLS and for other ports."""
    found = re.search(r"```nginx\n(.*?)```", (ROOT / "docs" / "serving.md").read_text(), re.DOTALL)
    assert found is not None
    server = re.sub(r"    ssl_.*\n", "", found[1]).replace("443 ssl", address).replace("127.0.0.1:8000", behind)
    paths = "".join(f"{name}_temp_path {folder}/{name}; " for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
    path = folder / "nginx.conf"
    path.write_text(
        f"daemon off; pid {folder}/pid; error_log {folder}/error.log; events {{}} http {{ access_log off; {paths}\n{server}}}\n"
    )
    return ["nginx", "-c", path, "-p", folder]


def can_connect(client: httpx2.Client) -> bool:
    try:
        return client.get("/version").status_code == 200
    except httpx2.TransportError:
        return False


@needs("nginx", "nginx-light")
def test_streams_pass_a_reverse_proxy_as_they_come_and_so_do_disconnects(
    resident: LocalCluster, started: Started, short_directory: Path
) -> None:
    serving = in_front_of(resident, started)
    with beside(short_directory, partial(nginx, short_directory, urlsplit(serving.url).netloc)) as client:
        assert wait_until(lambda: can_connect(client)), (short_directory / "output").read_text()
        assert client.get("/metrics").status_code == 403
        with streaming(client, TOKENS) as stream:
            assert not is_idle(resident)  # the first event has arrived, and the answer is still being generated
            assert stream.read_all().is_done and stream.finish_reason == "length"
        with streaming(client, TOKENS):
            pass  # the client goes away in the middle
        assert wait_until(lambda: is_idle(resident))
        assert wait_until(lambda: len(serving.events("answer")) == 2)
    first, second = serving.events("answer")
    assert first["output_tokens"] == TOKENS
    assert (second["finish_reason"], second["output_tokens"] < TOKENS) == ("abort", True)
    serving.finish()


def prometheus(folder: Path, target: str, address: str) -> list[str | Path]:
    """With the repository's configuration for another port and with a scrape each second."""
    text = (ROOT / "monitoring" / "prometheus.yml").read_text()
    assert "127.0.0.1:8000" in text and "scrape_interval: 5s" in text
    path = folder / "prometheus.yml"
    path.write_text(text.replace("127.0.0.1:8000", target).replace("scrape_interval: 5s", "scrape_interval: 1s"))
    flags = {"config.file": path, "storage.tsdb.path": folder / "data", "web.listen-address": address}
    return ["prometheus", *(f"--{name}={value}" for name, value in flags.items())]


def result(client: httpx2.Client, expression: str) -> list[dict[str, Any]]:
    """What Prometheus answers to a query; nothing while it starts."""
    try:
        answer = client.get("/api/v1/query", params={"query": expression}).json()
    except (httpx2.TransportError, ValueError):
        return []
    assert answer["status"] == "success", answer
    found: list[dict[str, Any]] = answer["data"]["result"]
    return found


@needs("prometheus", "prometheus")
def test_prometheus_reads_the_server_and_fills_the_dashboard(resident: LocalCluster, started: Started, tmp_path: Path) -> None:
    panels = json.loads((ROOT / "monitoring" / "grafana.json").read_text())["panels"]
    # nothing is refused here, ranks on one machine have no link to be measured, and the target has no experts
    empty = re.compile("503|pipedec:link_|pipedec:stage_expert")
    asked = [target["expr"] for panel in panels for target in panel.get("targets", [])]
    serving = in_front_of(resident, started)
    with serving.client as client, beside(tmp_path, partial(prometheus, tmp_path, urlsplit(serving.url).netloc)) as api:
        assert wait_until(lambda: result(api, 'up{job="pipedec"} == 1'), SECONDS)
        for count in (4, 8):  # rates need a change between two scrapes
            for _ in range(4):
                assert client.post("/v1/completions", json=body(64)).status_code == 200
            assert wait_until(partial(result, api, f"sum(vllm:generation_tokens_total) >= {64 * count}"), SECONDS)
        for query in asked:
            query = query.replace("$__rate_interval", "1m").replace("$model_name", "tiny")
            assert empty.search(query) or wait_until(partial(result, api, query), SECONDS), query
    serving.finish()
