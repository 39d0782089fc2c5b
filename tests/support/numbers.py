"""A pytest plugin that marks the tests that compute with models: ``numbers``, which other instruction sets must not change.

A test does if it takes a fixture that holds models, or if its module names a class, a function or a module of a package that
computes, itself or by way of a helper in ``tests``. A test whose models are used by the program alone must be marked by hand.
Tests on several hosts are not marked: they are about networks.
"""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

TESTS = Path(__file__).resolve().parents[1]
FIXTURES = ("pair", "thread_models")
HOSTS = {"hosts3", "slow_hosts3"}
COMPUTING = (
    "benchmarks.kernels",
    "pipedec.drafting",
    "pipedec.engine.local",
    "pipedec.model",
    "pipedec.sampling",
    "pipedec.stage",
    "pipedec.train",
    "pipedec.verify",
    "recipes",
    "transformers.models",
)
# What is in these packages and only reads files or handles text.
NOT_COMPUTING = (
    "benchmarks.kernels.stopwatch",
    "pipedec.model.bita",
    "pipedec.model.draft_vocabulary",
    "pipedec.model.markov",
    "pipedec.verify.divergence",
    "recipes.reference_models.corpus",
    "recipes.thread_models.annotation",
    "recipes.thread_models.chat_endpoint",
    "recipes.thread_models.pasta_language",
    "recipes.thread_models.records",
    "recipes.thread_models.rows",
    "recipes.thread_models.structure",
    "transformers.models.auto.tokenization_auto",
)
# Saves models with classes of transformers, and computes with none.
WRITER = "support.checkpoints"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        module = getattr(item, "module", None)
        is_on_hosts = not HOSTS.isdisjoint(getattr(item, "fixturenames", ()))
        if module is not None and not is_on_hosts and (_holds_models(item, module) or computes(module)):
            item.add_marker(pytest.mark.numbers)


def _holds_models(item: pytest.Item, module: ModuleType) -> bool:
    """Whether the test takes one of the fixtures, and not its module's own of that name."""
    return any(name in getattr(item, "fixturenames", ()) and not hasattr(module, name) for name in FIXTURES)


@cache
def computes(module: ModuleType) -> bool:
    """Whether a module names something that computes, or something of another module in ``tests`` that does."""
    named = {_origin(value) for value in vars(module).values()} - {module.__name__, WRITER}
    return any(_is_computing(name) for name in named) or any(
        computes(sys.modules[name]) for name in named if name in sys.modules and _is_ours(sys.modules[name])
    )


def _origin(value: object) -> str:
    """The module of a class or a function; a module's own name."""
    return value.__name__ if isinstance(value, ModuleType) else str(getattr(value, "__module__", ""))


def _is_computing(name: str) -> bool:
    return _is_in(name, COMPUTING) and not _is_in(name, NOT_COMPUTING)


def _is_in(name: str, packages: tuple[str, ...]) -> bool:
    return any(f"{name}.".startswith(f"{package}.") for package in packages)


def _is_ours(module: ModuleType) -> bool:
    return TESTS in Path(getattr(module, "__file__", None) or "/").parents
