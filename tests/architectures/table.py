"""The table of architectures in docs/results/architectures.md: ``python -m architectures.table ROWS`` writes it."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import transformers

from architectures.answers import METHODS, PROMPTS, SAMPLINGS, STAGES
from architectures.zoo import architectures
from pipedec.families import Layer, LayerShape, RecurrentShape, TransformersConfig
from pipedec.families.transformers import UNSUPPORTED

DOCUMENT = Path(__file__).parents[2] / "docs" / "results" / "architectures.md"


@dataclass(frozen=True)
class Row:
    """One architecture: how many answers were equal to those of ``generate`` and how many were left out, or why it is refused."""

    model_type: str
    attention: str = ""
    answers: int = 0
    ties: int = 0
    refused: str = ""

    def __str__(self) -> str:
        if self.refused:
            reason = self.refused.removesuffix(UNSUPPORTED).partition(f"model_type {self.model_type!r} ")[2]
            return f"| {self.model_type} | refused: {reason} | |"
        ties = f", {self.ties} left out" if self.ties else ""
        return f"| {self.model_type} | {self.attention} | {self.answers} equal{ties} |"


def described(config: TransformersConfig) -> str:
    """The attention of its layers, and what else they have."""
    parts = dict.fromkeys(part for layer in config.layers for part in _parts(layer))
    if len({layer.cached for layer in config.layers if isinstance(layer, LayerShape)}) > 1:
        parts["caches of several shapes"] = None
    if any(config.experts):
        parts["experts"] = None
    return ", ".join(parts) or "plain"


def _parts(layer: Layer) -> Iterable[str]:
    if isinstance(layer, RecurrentShape):
        yield "recurrent (Kimi delta attention)" if layer.num_decays > 1 else "recurrent (gated delta rule)"
        return
    if layer.reach is not None:
        yield "chunks" if layer.reach.is_chunk else "windows"
    if layer.softcap is not None:
        yield "soft caps"
    if layer.latents is not None:
        yield "latents (MLA)"
    elif layer.key_dim != layer.value_dim:
        yield "keys wider than values"


def write_row(row: Row, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{row.model_type}.json").write_text(json.dumps(asdict(row)), encoding="utf-8")


def read_table(document: Path) -> list[Row]:
    """The architectures in the document; of the rows only what the fast tier compares."""
    _, _, rows = document.read_text(encoding="utf-8").partition("|---|---|---|\n")
    return [Row(found[1]) for found in re.finditer(r"^\| ([a-z0-9_]+) \|", rows, re.MULTILINE)]


def main(folder: str) -> None:
    rows = [Row(**json.loads((Path(folder) / f"{name}.json").read_text(encoding="utf-8"))) for name in architectures()]
    works = sum(not row.refused for row in rows)
    each = len(STAGES) * len(METHODS) * len(SAMPLINGS) * len(PROMPTS) * 2
    stages = f"{', '.join(map(str, STAGES[:-1]))} and {STAGES[-1]} stages"
    text = f"""# Architectures

Made by `make architectures` with transformers {transformers.__version__}; not edited by hand.

Every causal architecture of transformers with a pipeline plan was tried as a tiny random model in float32, with
`--model-impl transformers`: {each} answers each, by {" and ".join(METHODS)}, on {stages}, greedy and
drawn, alone and in company, compared with those of `generate`. Answers in which two tokens,
or two experts of a row, were nearly as good as each other are left out. What an architecture may have besides, such as per-layer
inputs in Gemma 4, is switched off if it would be refused.
{works} architectures give the same answers; {len(rows) - works} are refused before anything is loaded.

| model_type | attention, or why it is refused | answers |
|---|---|---|
"""
    DOCUMENT.write_text(text + "".join(f"{row}\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
