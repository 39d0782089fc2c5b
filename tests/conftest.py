"""Fixtures and plugins for all tests: tiers, directories, hosts, and a check that no process or file is left behind.

The fast tier leaves out tests marked ``slow`` and tries fewer examples of each property; see CONTRIBUTING.md.
"""

from __future__ import annotations

import atexit
import gc
import multiprocessing.util
import os
import tempfile
from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import hypothesis
import pytest
from support.hosts import Hosts, lacking, namespace_hosts
from support.processes import deadline, marked_processes, wait_until
from support.slow_links import Link

os.environ["PIPEDEC_TARGET"] = "reference-pair"  # of answers without --target, whatever is installed

pytest_plugins = ["support.durations", "support.tiers", "support.numbers", "support.selection"]

TEST_SECONDS = 180.0

# Examples of a property: --hypothesis-profile chooses how many. They are always the same, but for those of "random", which follow
# from --hypothesis-seed. No deadlines: the machine may be busy.
hypothesis.settings.register_profile("full", max_examples=100, deadline=None, derandomize=True)
hypothesis.settings.register_profile("fast", max_examples=5, deadline=None, derandomize=True)
hypothesis.settings.register_profile("random", max_examples=100, deadline=None, database=None)
hypothesis.settings.load_profile("fast")


def pytest_configure(config: pytest.Config) -> None:
    """Load the fixtures of models where tests run: importing torch and transformers would take xdist's controller seconds."""
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        for plugin in ("support.shared_models", "support.residents"):
            config.pluginmanager.import_plugin(plugin)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect tests without collecting garbage: of what is made here hardly anything is ever freed, and to look takes seconds."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()
        atexit.register(gc.unfreeze)  # see ``cluster.rank``


@pytest.fixture
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own, into which GGUF files are expanded."""
    directory = tmp_path_factory.mktemp("state")
    monkeypatch.setenv("PIPEDEC_STATE_DIR", str(directory))
    return directory


@pytest.fixture(scope="module")
def hosts3() -> Iterator[Hosts]:
    """Three hosts that no test may leave unplugged or blocked. Where they cannot be made the test is skipped."""
    with _three_hosts() as hosts:
        yield hosts


@pytest.fixture(scope="module")
def slow_hosts3() -> Iterator[Hosts]:
    """The same with links that a test may slow down, and must set back."""
    with _three_hosts(Link()) as hosts:
        yield hosts


def _three_hosts(links: Link | None = None) -> AbstractContextManager[Hosts]:
    if missing := lacking(slow_links=links is not None):
        pytest.skip(f"hosts on one machine need {', '.join(missing)} (Debian: openssh-server, iproute2)")
    return namespace_hosts(3, links)


@pytest.fixture
def state_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A state directory of this test's own, and no Redis named in the environment."""
    directory = tmp_path / "state"
    directory.mkdir(mode=0o700)
    monkeypatch.setenv("PIPEDEC_STATE_DIR", str(directory))
    for name in ("PIPEDEC_REDIS_URL", "PIPEDEC_REDIS_PASSWORD"):
        monkeypatch.delenv(name, raising=False)
    return directory


@pytest.fixture(scope="session")
def short_directory() -> Iterator[Path]:
    """A directory whose name leaves room for names of Unix sockets, which have 107 bytes at most; that of tmp_path does not."""
    multiprocessing.util.get_temp_dir()  # its own, for the whole session, outside of this one
    with tempfile.TemporaryDirectory(prefix="t-", ignore_cleanup_errors=True) as directory:
        yield Path(directory)


@pytest.fixture
def leaves_nothing(request: pytest.FixtureRequest, short_directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fails the test if it hangs, or if a process it started or a temporary file of ours is still there after its end."""
    scratch = Path(tempfile.mkdtemp(dir=short_directory))
    monkeypatch.setenv("TMPDIR", str(scratch))
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    before = marked_processes()
    limit = request.node.get_closest_marker("seconds")
    with deadline(TEST_SECONDS if limit is None else limit.args[0]):
        yield
    assert wait_until(lambda: not marked_processes() - before), [
        (pid, Path(f"/proc/{pid}/cmdline").read_bytes()[-200:]) for pid in marked_processes() - before
    ]
    assert list(scratch.glob("pipedec-*")) == []
