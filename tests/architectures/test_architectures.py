"""Every causal architecture of the installed transformers that has a pipeline plan gives the answers of ``generate``, or is
refused by name.

The full tier tries a tenth of them, which ``--tenth`` chooses; ``make architectures`` tries all, and writes
docs/results/architectures.md.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.specs import bare_spec

from architectures.answers import PROMPTS, SAMPLINGS, answers, compare, generated
from architectures.table import DOCUMENT, Row, described, read_table, write_row
from architectures.zoo import LAYERS, architectures, save_config, save_model
from pipedec.core import UserError
from pipedec.engine.local import LocalPipeline
from pipedec.families import TransformersConfig, model_config
from pipedec.model import load_transformers
from pipedec.model.matrices import SMALLEST_PACKED


@pytest.mark.slow
@pytest.mark.numbers
@pytest.mark.parametrize("model_type", architectures())
def test_an_architecture_is_exact_or_refused(model_type: str, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    tenth, rows = pytestconfig.getoption("tenth"), pytestconfig.getoption("architecture_rows")
    if rows is None and architectures().index(model_type) % 10 != tenth:
        pytest.skip("not in this tenth of the architectures")
    save_config(model_type, tmp_path / "config")
    try:
        config = model_config(tmp_path / "config", "transformers")
    except UserError as refusal:
        row = Row(model_type, refused=str(refusal))
    else:
        assert isinstance(config, TransformersConfig)
        save_model(model_type, tmp_path / "target")
        found = compare(tmp_path / "target", tmp_path)
        row = Row(model_type, described(config), found.answers, found.ties)
        assert not found.different, found.different
    if rows is not None:
        write_row(row, Path(rows))


def test_a_head_that_shares_the_embedding_may_be_packed(tmp_path: Path) -> None:
    save_model("gemma", tmp_path, vocab_size=SMALLEST_PACKED // 64)
    expected, _ = generated(load_transformers(tmp_path, torch.float32), PROMPTS[1], SAMPLINGS["greedy"])
    pipeline = LocalPipeline.load(bare_spec(tmp_path, LAYERS, (1, 1), model_impl="transformers"))
    assert answers(pipeline, "pp", [("greedy", 1)]) == [expected]


def test_the_table_has_every_architecture() -> None:
    assert [row.model_type for row in read_table(DOCUMENT)] == list(architectures()), "run `make architectures`"
