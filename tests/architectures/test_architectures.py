"""Every causal architecture of the installed transformers that has a pipeline plan gives the answers of ``generate``, or is
refused by name.

The full tier tries a tenth of them, which ``--tenth`` chooses; ``make architectures`` tries all, and writes
docs/results/architectures.md.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from architectures.answers import compare
from architectures.table import DOCUMENT, Row, described, read_table, write_row
from architectures.zoo import architectures, save_config, save_model
from pipedec.core import UserError
from pipedec.families import TransformersConfig, model_config


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


def test_the_table_has_every_architecture() -> None:
    assert [row.model_type for row in read_table(DOCUMENT)] == list(architectures()), "run `make architectures`"
