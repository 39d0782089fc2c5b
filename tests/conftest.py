"""What tests of several packages share: the tiers, tiny checkpoints, a resident cluster, the proof that nothing is left.

The fast tier leaves out tests marked ``slow`` and tries fewer examples of each property; see CONTRIBUTING.md.
"""

from __future__ import annotations

import multiprocessing.util
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import hypothesis
import pytest
from support.hosts import Hosts, lacking, namespace_hosts
from support.processes import deadline, marked_processes, wait_until
from support.thread_models import ThreadModels
from support.tiny_pair import Pair, make_pair, tiny_tokenizer
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from pipedec.cluster.local import LocalCluster
from pipedec.engine.spec import DISPATCHES
from pipedec.verify.reference import Reference

pytest_plugins = ["support.cpu_seconds", "support.tiers", "support.numbers", "support.thirds"]

TEST_SECONDS = 180.0

# Examples of a property: --hypothesis-profile chooses how many. They are always the same. No deadlines: the machine may be busy.
hypothesis.settings.register_profile("full", max_examples=100, deadline=None, derandomize=True)
hypothesis.settings.register_profile("fast", max_examples=5, deadline=None, derandomize=True)
hypothesis.settings.load_profile("fast")

transformers_logging.disable_progress_bar()  # "Writing model shards" would stand in the report of every failure


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="session")
def tokenizer_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tokenizer of ``pair``, for tests that need no model."""
    directory = tmp_path_factory.mktemp("tokenizer")
    tiny_tokenizer().save_pretrained(directory)
    return directory


@pytest.fixture
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own, into which GGUF files are expanded."""
    directory = tmp_path_factory.mktemp("state")
    monkeypatch.setenv("PIPEDEC_STATE_DIR", str(directory))
    return directory


@pytest.fixture(scope="session")
def thread_models(tmp_path_factory: pytest.TempPathFactory) -> ThreadModels:
    return ThreadModels(tmp_path_factory.mktemp("threads"))


@pytest.fixture(scope="session")
def tokenizer(pair: Pair) -> PreTrainedTokenizerBase:
    return PreTrainedTokenizerFast.from_pretrained(pair.target)


@pytest.fixture(scope="session")
def reference(pair: Pair) -> Reference:
    """The target alone, in transformers."""
    return Reference(pair.spec())


@pytest.fixture(scope="session")
def resident_windows(pair: Pair) -> Iterator[LocalCluster]:
    with LocalCluster(replace(pair.spec(2), dispatch="windows")) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def resident_tasks(pair: Pair) -> Iterator[LocalCluster]:
    with LocalCluster(replace(pair.spec(2), dispatch="tasks")) as cluster:
        yield cluster


@pytest.fixture(scope="session", params=list(DISPATCHES))
def resident(request: pytest.FixtureRequest) -> LocalCluster:
    """A running cluster of 2 stages that no test may break; with each way to dispatch. Both go on until the session ends."""
    cluster: LocalCluster = request.getfixturevalue(f"resident_{request.param}")
    return cluster


@pytest.fixture(scope="module")
def hosts3() -> Iterator[Hosts]:
    """Three hosts that no test may leave unplugged or blocked. Where they cannot be made the test is skipped."""
    if missing := lacking():
        message = f"hosts on one machine need {', '.join(missing)} (Debian: openssh-server, iproute2)"
        pytest.skip(message)
    with namespace_hosts(3) as hosts:
        yield hosts


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
def leaves_nothing(short_directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fails the test if it hangs, or if a process it started or a temporary file of ours is still there after its end."""
    scratch = Path(tempfile.mkdtemp(dir=short_directory))
    monkeypatch.setenv("TMPDIR", str(scratch))
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    before = marked_processes()
    with deadline(TEST_SECONDS):
        yield
    assert wait_until(lambda: not marked_processes() - before), [
        (pid, Path(f"/proc/{pid}/cmdline").read_bytes()[-200:]) for pid in marked_processes() - before
    ]
    assert list(scratch.glob("pipedec-*")) == []
