"""Schedulers on one real Redis server."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.whole_scheduler import FreshRun, redis_client, redis_server  # noqa: F401

from pipedec.topology import Topology


@pytest.fixture
def make_scheduler(redis_client: object) -> Callable[[Topology], FreshRun]:  # noqa: F811
    return lambda topology: FreshRun(topology, lease_ms=50)
