"""A real nginx with the configuration of docs/serving.md in front of a real server."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import httpx2
import pytest
from support.processes import wait_until
from support.programs import Started
from support.serving import in_front_of, is_idle, streaming
from support.tiny_pair import Pair

from pipedec.cluster.local import LocalCluster

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "serving.md"
TOKENS = 1000

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("nginx") is None, reason="no nginx (Debian: apt-get install nginx-light)"),
    pytest.mark.usefixtures("leaves_nothing"),
]


def configuration(folder: Path, listen: str, behind: str) -> Path:
    """The server of the guide, without TLS and for other ports."""
    found = re.search(r"```nginx\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    assert found is not None
    server = re.sub(r"    ssl_.*\n", "", found[1]).replace("443 ssl", listen).replace("127.0.0.1:8000", behind)
    paths = "".join(f"{name}_temp_path {folder}/{name}; " for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
    path = folder / "nginx.conf"
    path.write_text(
        f"daemon off; pid {folder}/pid; error_log {folder}/error.log; events {{}} http {{ access_log off; {paths}\n{server}}}\n"
    )
    return path


@contextmanager
def nginx(folder: Path, behind: str) -> Iterator[httpx2.Client]:
    """nginx in front of a server, and a client of it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    path = configuration(folder, address, behind)
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(["nginx", "-c", path, "-p", folder], stdout=output, stderr=output)
    try:
        with httpx2.Client(base_url=f"http://{address}", timeout=60) as client:
            assert wait_until(lambda: can_connect(client) or process.poll() is not None) and process.poll() is None, (
                folder / "output"
            ).read_text()
            yield client
    finally:
        process.terminate()
        process.wait(20)


def can_connect(client: httpx2.Client) -> bool:
    try:
        return client.get("/version").status_code == 200
    except httpx2.TransportError:
        return False


def test_streams_pass_a_reverse_proxy_as_they_come_and_so_do_disconnects(
    pair: Pair, started: Started, short_directory: Path
) -> None:
    with LocalCluster(pair.spec(2)) as cluster:
        serving = in_front_of(cluster, started)
        with nginx(short_directory, urlsplit(serving.url).netloc) as client:
            assert client.get("/metrics").status_code == 403
            with streaming(client, TOKENS) as stream:
                assert not is_idle(cluster)  # the first event has arrived, and the answer is still being generated
                assert stream.read_all().is_done and stream.finish_reason == "length"
            with streaming(client, TOKENS):
                pass  # the client goes away in the middle
            assert wait_until(lambda: is_idle(cluster))
            assert wait_until(lambda: len(serving.events("answer")) == 2)
        first, second = serving.events("answer")
        assert first["output_tokens"] == TOKENS
        assert (second["finish_reason"], second["output_tokens"] < TOKENS) == ("abort", True)
        serving.end()
        assert serving.ended()[0] == 0
