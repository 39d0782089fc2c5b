"""The embedded server, and the error messages when Redis cannot be used."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import redis
from support.processes import wait_until

from pipedec.config import RedisConfig
from pipedec.core.errors import SchedulerLost, UserError
from pipedec.scheduler import EmbeddedRedis, connect
from pipedec.scheduler.client import address_of, check_version
from pipedec.scheduler.keys import Keys
from pipedec.scheduler.redis_process import ALL_ADDRESSES, find_server_binary, server_version


def is_alive(pid: int) -> bool:
    """Whether the process runs. A zombie counts as dead (signal 0 would still reach it)."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] not in ("Z", "X")


def test_a_server_lives_as_long_as_its_with_block() -> None:
    with EmbeddedRedis() as server:
        pid = server.pid
        assert connect(server.url).set("a", "1")
        command = Path(f"/proc/{pid}/cmdline").read_bytes().decode()
        assert server.url.split("@")[0].removeprefix("redis://:") not in command
    assert not is_alive(pid)
    server.stop()


def test_no_connection_is_ever_given_the_port_of_a_server() -> None:
    """So that it can be started again where it was, however busy the machine is."""
    given = Path("/proc/sys/net/ipv4/ip_local_port_range")
    first = int(given.read_text().split()[0]) if given.exists() else 32768
    with EmbeddedRedis() as server:
        assert 10_000 <= server.port < first


def test_a_server_takes_the_port_and_the_password_that_it_is_given(tmp_path: Path) -> None:
    with EmbeddedRedis(bind=ALL_ADDRESSES) as first:
        port = first.port
        with pytest.raises(UserError, match=f"port {port} is in use: choose another port for Redis"):
            EmbeddedRedis(bind=ALL_ADDRESSES, port=port)
    odd = 'it\'s "odd" \\ @:/#% ü'
    with EmbeddedRedis(port=port, password=odd, settings=[f"unixsocket {tmp_path / 'socket'}"]) as second:
        assert second.port == port
        unix_url = second.url.replace("redis:", "unix:").replace(second.address, str(tmp_path / "socket")).removesuffix("/0")
        assert connect(second.url).ping() and connect(unix_url).ping()
        assert connect(RedisConfig(f"redis://{second.address}/0", odd).connection_url or "").ping()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


@pytest.mark.failure_case("R5")
def test_a_server_that_has_died_is_started_again_at_its_url_with_its_data(folder: Path) -> None:
    with EmbeddedRedis() as server:
        url, pid = server.url, server.pid
        connect(url).set("a", "1")
        server.keep()
        assert server.pid == pid and connect(url).get("a") == b"1"
        (directory,) = folder.iterdir()
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not server.is_running)
        with socket.create_server(("127.0.0.1", server.port)):
            server.keep()
        assert not server.is_running
        server.keep()
        assert server.url == url and server.pid != pid and connect(url).get("a") == b"1"
    assert not any(folder.iterdir())


@pytest.mark.failure_case("M11")
def test_a_server_whose_file_cannot_be_written_goes_on_without(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with EmbeddedRedis() as server, connect(server.url) as client:
        (directory,) = folder.iterdir()
        shutil.rmtree(directory)
        with suppress(redis.ResponseError):  # newer servers see it at once
            client.bgrewriteaof()

        def is_kept() -> bool:
            server.keep()
            return client.config_get("appendonly") == {"appendonly": "no"}

        assert wait_until(is_kept)
        assert client.set("a", "1") and [record.getMessage() for record in caplog.records] == [
            f"Redis cannot write to {directory}, and goes on without: should it die, the run ends"
        ]


def test_a_server_dies_when_its_parent_is_killed_and_its_data_is_deleted(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pipedec.scheduler import EmbeddedRedis\n"
        "server = EmbeddedRedis(); print(server.pid, flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": str(tmp_path)}
    )
    try:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert is_alive(pid) and any(tmp_path.iterdir())
    finally:
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait()
        parent.stdout and parent.stdout.close()
    assert wait_until(lambda: not is_alive(pid) and not any(tmp_path.iterdir()))


def test_a_server_that_cannot_start_reports_its_last_line(tmp_path: Path) -> None:
    binary = tmp_path / "redis-server"
    binary.write_text("#!/bin/sh\necho cannot load the moon >&2\nexit 3\n", encoding="utf-8")
    binary.chmod(0o700)
    with pytest.raises(SchedulerLost, match="cannot load the moon"):
        EmbeddedRedis(binary=binary)


@pytest.mark.parametrize("script", ["echo Redis server v=5.0.7 sha=0", "exit 127"])
@pytest.mark.failure_case("R13")
def test_an_old_or_broken_server_is_skipped(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    binary = tmp_path / "redis-server"
    binary.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    binary.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert server_version(binary) < (6, 2)
    assert find_server_binary() != binary
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"no Redis server of version 6\.2"):
        find_server_binary()


@pytest.mark.parametrize("password", [":wrong@", ""])
@pytest.mark.failure_case("R2")
def test_a_wrong_password_is_reported_but_not_shown(redis_server: EmbeddedRedis, password: str) -> None:
    with pytest.raises(SchedulerLost) as caught:
        connect(f"redis://{password}{redis_server.address}")
    assert str(caught.value) == f"wrong Redis password for {redis_server.address}"


@pytest.mark.failure_case("R1")
def test_an_unreachable_server_is_reported_without_password() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        with pytest.raises(SchedulerLost) as caught:
            connect(f"redis://:secret@127.0.0.1:{port}")
    assert f"127.0.0.1:{port}" in str(caught.value) and "secret" not in str(caught.value)


def test_connecting_to_a_silent_server_times_out() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        with pytest.raises(SchedulerLost, match="does not answer"):
            connect(f"redis://:secret@127.0.0.1:{silent.getsockname()[1]}")


@pytest.mark.failure_case("R13")
def test_addresses_and_versions() -> None:
    assert address_of("redis://:secret@host:7000/1") == "host:7000"
    assert address_of("unix://:secret@/tmp/redis.sock") == "/tmp/redis.sock"
    check_version("host:1", "6.2.14")
    check_version("host:1", "9.1.2")
    with pytest.raises(SchedulerLost, match=r"version 5\.0\.7; pipedec needs 6\.2"):
        check_version("host:1", "5.0.7")


def test_keys_have_one_hash_tag() -> None:
    keys = Keys("run-1")
    assert keys.queue(3) == "pipedec:{run-1}:queue:0:3"
    for bad in ("", "a}b", "a b", "x" * 101):
        with pytest.raises(UserError, match="run id"):
            Keys(bad)
