"""The clusters that tests of several packages share, each started when a worker first needs it."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from pathlib import Path

import pytest

from pipedec.cluster.local import LocalCluster
from pipedec.plan.spec import DISPATCHES
from support.tiny_pair import Pair


class Residents:
    """Running clusters of 2 stages, one for each way to dispatch: from the first test that asks for one on.

    Each goes on until the next test is of a file that does not need it: idle clusters, too, take CPU seconds.

    Args:
        items: the tests that will run.
    """

    def __init__(self, items: Sequence[pytest.Item], pair: Pair) -> None:
        self._pair = pair
        self._running: dict[str, LocalCluster] = {}
        self._files = {dispatch: {item.path for item in items if _dispatch(item) == dispatch} for dispatch in DISPATCHES}

    def get(self, dispatch: str) -> LocalCluster:
        """The cluster of this dispatch, which is started if it does not run."""
        if dispatch not in self._running:
            cluster = LocalCluster(self._pair.spec(2).replaced(dispatch=dispatch))
            cluster.start()
            self._running[dispatch] = cluster
        return self._running[dispatch]

    def keep_for(self, path: Path | None) -> None:
        """Stop the clusters that no test of this file needs; all of them for None."""
        for dispatch in [dispatch for dispatch in self._running if path not in self._files[dispatch]]:
            self._running.pop(dispatch).stop()


RESIDENTS = pytest.StashKey[Residents]()


def _dispatch(item: pytest.Item) -> str | None:
    """That of the cluster which a test takes, if it takes one."""
    is_taken = "resident" in getattr(item, "fixturenames", ()) and hasattr(item, "callspec")
    return getattr(item, "callspec").params["resident"] if is_taken else None  # noqa: B009


@pytest.hookimpl(trylast=True)  # when it is known which tests run
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that need a resident cluster, so that each is started once."""
    files = {item.path for item in items if _dispatch(item)}
    items.sort(key=lambda item: item.path not in files)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    result = yield
    if (residents := item.config.stash.get(RESIDENTS, None)) is not None:
        residents.keep_for(None if nextitem is None else nextitem.path)
    return result


@pytest.fixture(scope="session")
def residents(request: pytest.FixtureRequest, pair: Pair) -> Iterator[Residents]:
    found = Residents(request.session.items, pair)
    request.config.stash[RESIDENTS] = found
    yield found
    found.keep_for(None)


@pytest.fixture(scope="module", params=list(DISPATCHES))
def resident(request: pytest.FixtureRequest, residents: Residents) -> LocalCluster:
    """A running cluster of 2 stages that no test may break; with each way to dispatch."""
    return residents.get(request.param)
