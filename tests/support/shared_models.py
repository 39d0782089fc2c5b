"""The models that tests of several packages share, each made when a worker first needs it."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from pipedec.verify.reference import Reference
from support.thread_models import ThreadModels
from support.tiny_pair import Pair, make_pair, tiny_tokenizer

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
