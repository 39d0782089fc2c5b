"""Models that learn threads at toy size, for every test of their training."""

from __future__ import annotations

import pytest
import torch
from support.tiny_pair import Pair

from recipes.thread_models.rows import RowWriter
from recipes.thread_models.tuning import Student

DIALECTS = ["apar", "pasta"]


@pytest.fixture
def student(pair: Pair) -> Student:
    """Two layers; the tokenizer has been given the control tokens."""
    return Student.load(pair.draft, DIALECTS, torch.device("cpu"), seed=1)


@pytest.fixture
def writer(student: Student) -> RowWriter:
    return RowWriter(student.tokenizer, DIALECTS, student.tokenizer.eos_token_id)
