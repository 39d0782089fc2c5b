"""Rows say with which priors the default method began."""

from __future__ import annotations

import shutil
from pathlib import Path

from support.tiny_pair import Pair

from pipedec.bench.sweep.pipelines import ModelPair, as_it_is, emulated
from pipedec.config import paper_cluster
from pipedec.decoding.learned import LearnedAcceptance
from pipedec.engine.experience_files import SHIPPED_FILE, write_learned


def test_rows_name_the_source_of_priors(pair: Pair, tmp_path: Path) -> None:
    draft = tmp_path / "draft"
    shutil.copytree(pair.draft, draft)
    models = ModelPair(pair.target, str(draft))

    def of_emulation(priors: bool) -> tuple[str | None, bool]:
        shape = emulated(paper_cluster(), "paper-14", 2, models, priors=priors)
        return shape.cluster.get("priors"), shape.spec.settings.speculation.priors

    assert of_emulation(priors=True)[0] is None, "the draft has no file"
    write_learned(draft / SHIPPED_FILE, LearnedAcceptance(unproposed_share=0.5))
    assert of_emulation(priors=True) == ("shipped", True)
    assert of_emulation(priors=False) == (None, False)
    real = [as_it_is(models.settings(stages=1, priors=priors)).cluster.get("priors") for priors in (True, False)]
    assert real == ["kept", None]
