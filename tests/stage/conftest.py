"""Tiny targets for tests of lanes."""

from __future__ import annotations

import pytest
from lane_targets import MODELS, Target, save_target


@pytest.fixture(scope="package", params=MODELS)
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Target:
    return save_target(request.param, tmp_path_factory.mktemp("target"))
