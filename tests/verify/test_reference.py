"""The reference for plain answers: the target's greedy tokens."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from support.tiny_pair import Pair

from pipedec.verify.reference import Reference


def test_the_reference_ignores_the_sampling_of_the_generation_config(pair: Pair, tmp_path: Path) -> None:
    target = tmp_path / "target"
    shutil.copytree(pair.target, target)
    config = json.loads((target / "generation_config.json").read_text())
    (target / "generation_config.json").write_text(json.dumps({**config, "repetition_penalty": 50.0}))
    spec = pair.spec(1)
    expected = Reference(spec).generate((1, 9, 30), 24, ignore_eos=True)
    assert len(set(expected)) < len(expected)  # a penalty would show
    assert Reference(spec.replaced(target=target)).generate((1, 9, 30), 24, ignore_eos=True) == expected
