"""A server as a user starts it, for clients that were not written for it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.processes import marked_processes, wait_until
from support.programs import programs
from support.serving import Serving
from support.tiny_pair import Pair

MODEL = "tiny"


@dataclass(frozen=True)
class Server:
    """A running ``pipedec serve``."""

    root: str
    target: Path

    @property
    def url(self) -> str:
        """As clients want it."""
        return f"{self.root}/v1"

    def counter(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that have these labels; 0 while there are none."""
        text = httpx2.get(f"{self.root}/metrics", timeout=20).text
        samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
        return sum(sample.value for sample in samples if sample.name == name and labels.items() <= sample.labels.items())

    def is_idle(self) -> bool:
        """Whether no request runs or waits, and nothing but kept prefixes is in the KV memory."""
        return all(self.counter(f"vllm:num_requests_{state}") == 0 for state in ("running", "waiting"))


@contextmanager
def serving(directory: Path, pair: Pair, *flags: str) -> Iterator[Server]:
    """A server of the tiny pair on a free port, which ends with exit status 0 and leaves no process behind."""
    before = marked_processes()
    with pytest.MonkeyPatch.context() as patch, programs() as started:
        patch.setenv("PIPEDEC_STATE_DIR", str(directory / "state"))
        names = ("--served-model-name", MODEL, *pair.flags, "--stages", "2", *flags)
        server = Serving(started("serve", "--port", "0", *names)).wait_for("ready")
        yield Server(server.url, pair.target)
        server.finish()
    assert wait_until(lambda: not marked_processes() - before)


def client_python(name: str) -> Path:
    """The interpreter of a client's own virtual environment. Skips the test where ``make test-clients`` has not made it."""
    return _installed(Path(name) / "bin" / "python")


def agent_program(name: str) -> Path:
    """The program of an agent that npm has installed. Skips the test as ``client_python``."""
    return _installed(Path("agents") / "node_modules" / ".bin" / name)


def _installed(program: Path) -> Path:
    path = Path(os.environ.get("PIPEDEC_CLIENTS", ".clients")) / program
    if not path.exists():
        message = f"there is no {path}: make test-clients installs it"
        pytest.skip(message)
    return path.absolute()


@pytest.fixture(scope="module")
def server(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One for all tests of a file; none of them may break it."""
    with serving(tmp_path_factory.mktemp("server"), pair) as running:
        yield running
