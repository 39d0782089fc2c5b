"""The image of the Dockerfile, built and run: users that it does not know, a root that cannot be written to, a CPU quota, proxies
that are away, a locale of ASCII, several servers; lost ranks, orphans, and its end.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.containers import ROOT, Podman, lacking, podman
from support.processes import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("leaves_nothing")]

IMAGE = "localhost/pipedec:tests"
TOKENS = 400  # of an answer during which something happens
CLOSED = ("--network", "none", "--read-only", "--cap-drop", "all", "--security-opt", "no-new-privileges")
ODD = (
    "--env=LANG=C",
    "--env=LC_ALL=C",
    *(f"--env={name}=http://127.0.0.1:9" for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY")),
)
# Streams an answer; prints a line for each part of it, and at the end its number of tokens.
ASK = """
import http.client, json, sys
connection = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]), timeout=120)
body = {"model": "reference-pair", "prompt": "What does os.walk() do?", "max_tokens": int(sys.argv[2]), "ignore_eos": True,
        "stream": True, "stream_options": {"include_usage": True}}
connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
for line in iter(connection.getresponse().readline, b""):
    if line.startswith(b"data: {"):
        print((json.loads(line[6:]).get("usage") or {}).get("completion_tokens", "part"), flush=True)
"""
PROCESSES = """
import json, psutil
print(json.dumps([process.as_dict(["pid", "ppid", "status", "name", "cmdline"]) for process in psutil.process_iter()]))
"""


@pytest.fixture(scope="module")
def image(short_directory: Path) -> Iterator[Podman]:
    """Podman with the image. Skipped where podman or debootstrap is missing, or no container runs."""
    if missing := lacking():
        pytest.skip(f"images need {', '.join(missing)} (Debian: podman, debootstrap, runc)")
    [base] = re.findall(r"^ARG BASE=(.*)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    with podman(short_directory / "podman") as made:
        try:
            made.import_base(base)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            pytest.skip(f"no mirror of Debian: {(error.output or b'')[-200:]!r}")
        if (tried := made.call("run", "--rm", "--network", "none", base, "true")).returncode:
            pytest.skip(f"podman runs no container here: {tried.stderr}")
        built = made.build(IMAGE)
        if "(from versions: none)" in built.stdout + built.stderr:
            pytest.skip(f"no index of packages: {built.stderr[-200:]}")
        assert built.returncode == 0, built.stdout + built.stderr
        yield made


@pytest.fixture
def served(image: Podman) -> Iterator[Callable[..., None]]:
    """Starts servers, by name, port, and options of podman; returns when they are ready."""
    names: list[str] = []

    def start(name: str, port: int, *options: str) -> None:
        names.append(name)
        flags = ("--host", "127.0.0.1", "--port", str(port), "--stages", "2")
        image("run", "--detach", "--name", name, *options, IMAGE, "serve", *flags)
        assert wait_until(lambda: '"event": "ready"' in image("logs", name), 120)

    yield start
    for name in reversed(names):
        image("rm", "--force", "--volumes", "--time", "0", name)


def asked(image: Podman, name: str, port: int, tokens: int) -> subprocess.Popen[str]:
    """An answer that has begun."""
    running = image.start("exec", name, "python3", "-c", ASK, str(port), str(tokens))
    assert running.stdout is not None and running.stdout.readline() == "part\n"
    return running


def tokens_of(running: subprocess.Popen[str]) -> int:
    """The number of tokens of an answer, when it has ended."""
    lines, _ = running.communicate(timeout=120)
    return int(lines.splitlines()[-1])


def processes(image: Podman, name: str) -> list[dict[str, Any]]:
    """The processes of a container, as psutil describes them."""
    found: list[dict[str, Any]] = json.loads(image("exec", name, "python3", "-c", PROCESSES))
    return found


def ranks(image: Podman, name: str) -> list[int]:
    """Process ids of the ranks, which the fork server has started."""
    forked = {
        one["pid"]: one["ppid"] for one in processes(image, name) if "multiprocessing.forkserver" in " ".join(one["cmdline"])
    }
    return [pid for pid, parent in forked.items() if parent in forked]


def test_packages_are_those_of_the_constraints(image: Podman) -> None:
    pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().lower().splitlines() if "==" in line)
    frozen = image("run", "--rm", "--entrypoint", "pip", IMAGE, "freeze", "--exclude-editable").lower()
    found = dict(re.findall(r"^([\w.-]+)==([^+\s]+)", frozen, re.MULTILINE))
    assert found["torch"] and {name: version for name, version in found.items() if pinned.get(name, version) != version} == {}
    image("run", "--rm", "--entrypoint", "pip", IMAGE, "check")


@pytest.mark.failure_case("M24", "M25", "M26")
def test_a_server_without_a_name_survives_a_lost_rank_beside_another_and_drains(
    image: Podman, served: Callable[..., None]
) -> None:
    served("one", 8000, *CLOSED, *ODD, "--user", "12345:0", "--cpus", "1", "--volume", "shared:/var/lib/pipedec")
    image("healthcheck", "run", "one")
    assert image("exec", "one", "python3", "-c", "from pipedec.config.environment import usable_cpus as n; print(n())") == "1"
    beside = ("--network", "container:one", "--read-only", "--user", "12346:12346", "--env", "HOME=/nowhere")
    served("two", 8001, *beside, "--volume", "shared:/var/lib/pipedec")
    lost = ranks(image, "one")[1]
    answer, other = asked(image, "one", 8000, TOKENS), asked(image, "two", 8001, TOKENS)
    image("exec", "one", "sh", "-c", f"kill -9 {lost}")
    assert answer.poll() is None
    assert (tokens_of(answer), tokens_of(other)) == (TOKENS, TOKENS)
    for name, has_lost in (("one", True), ("two", False)):
        assert ("Epoch 1: rank" in image.call("exec", name, "pipedec", "status").stderr) == has_lost
    image("exec", "one", "sh", "-c", "sleep 0.1 & exit")  # an orphan
    assert wait_until(lambda: all(one["status"] != "zombie" and one["name"] != "sleep" for one in processes(image, "one")))
    answer = asked(image, "one", 8000, TOKENS)
    assert answer.poll() is None
    image("stop", "--time", "100", "one")
    assert tokens_of(answer) == TOKENS and image.inspect("one")["State"]["ExitCode"] == 0


@pytest.mark.failure_case("M25")
def test_users_share_a_volume_each_with_a_directory_of_their_own(image: Podman) -> None:
    where = ("--entrypoint", "python3", IMAGE, "-c", "from pipedec.directories import state_directory as d; print(d())")
    for user in ("0", "10001:0", "23456:0", "23457:23457"):
        found = image("run", "--rm", "--user", user, "--volume", "users:/var/lib/pipedec", *where)
        assert found == f"/var/lib/pipedec/state/pipedec-{user.partition(':')[0]}"


def test_one_line_says_that_there_is_no_place_for_temporary_files(image: Podman) -> None:
    ended = image.call("run", "--rm", *CLOSED, "--read-only-tmpfs=false", IMAGE, "generate", "--prompt", "Hello")
    [line] = [line for line in ended.stderr.splitlines() if line.startswith("pipedec: ")]
    assert ended.returncode == 1 and ended.stdout == "" and "set TMPDIR" in line
