"""Rounds of preference training for several scores (PASTA §6.1, §6.3): each starts from the model of the round before.

A score is a quality weight with an efficiency term. Owns where rounds keep their files, and the summary of all of them. In the
first round every score starts from the same model, and so from the same samples.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipedec.checkpoints import fingerprint
from pipedec.core.errors import UserError
from recipes.thread_models.bonbon import BonbonRecipe, Kept, prefer
from recipes.thread_models.chat_endpoint import ChatEndpoint
from recipes.thread_models.report import ThreadsRun

SUMMARY = "summary.json"
_FIGURES = ("win_rate", "quality", "speedup", "parallelism", "forked", "finished", "circles")


@dataclass(frozen=True)
class Rounds:
    """Rounds of ``prefer`` with one or several scores. Raises UserError if a score is given twice, or there are no rounds."""

    files: tuple[Path, ...]
    model: Path
    baseline: Path
    recipes: tuple[BonbonRecipe, ...]  # one for each quality weight and efficiency term; they differ in nothing else
    rounds: int = 1  # of each of them
    endpoint: ChatEndpoint | None = None

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise UserError("--rounds must be at least 1")
        if len(set(map(place_of, self.recipes))) < len(self.recipes):
            raise UserError("--lambda or --efficiency names a score twice")

    @property
    def is_one(self) -> bool:
        """Whether there is only one round with one score; its model is then the run's."""
        return self.rounds == 1 and len(self.recipes) == 1

    def run(self, run: ThreadsRun) -> list[dict[str, Any]]:
        """Train what is missing in ``run.out``, and write the summary of several rounds there; returns the reports.

        The model of a round lies in ``place_of(recipe)/round-r``, that of a single one in ``run.out`` itself.
        """
        reports = [report for recipe in self.recipes for report in self._of_one_score(recipe, run)]
        if not self.is_one:
            (run.out / SUMMARY).write_text(json.dumps(summary(reports), indent=2) + "\n")
        return reports

    def _of_one_score(self, recipe: BonbonRecipe, run: ThreadsRun) -> Iterator[dict[str, Any]]:
        model = self.model
        for number in range(1, self.rounds + 1):
            place = Path() if self.is_one else Path(place_of(recipe), f"round-{number}")
            own = replace(run, out=run.out / place, work=run.work / place)
            report = self._known(own, recipe, model)
            if report is None:
                kept = Kept(run.work / "round-1" if number == 1 and not self.is_one else own.work, run.work)
                report = prefer(self.files, model, self.baseline, recipe, own, self.endpoint, kept)
            yield report | {"round": number}
            model = own.out

    def _known(self, run: ThreadsRun, recipe: BonbonRecipe, model: Path) -> dict[str, Any] | None:
        """The report of a round that an earlier run has finished."""
        path = run.out / "training.json"
        if self.is_one or not path.exists():
            return None
        report: dict[str, Any] = json.loads(path.read_text())
        wanted = {name: value for name, value in recipe.described().items() if name not in ("steps", "beta")}
        started = {"model": fingerprint(model), "baseline": fingerprint(self.baseline)}
        if any(report["recipe"].get(name) != value for name, value in wanted.items()) or not started.items() <= report.items():
            raise UserError(f"{path} is of another run: give another --out, or remove it")
        return report


def place_of(recipe: BonbonRecipe) -> str:
    """The name of a score's directory: ``lambda-λ``, after its efficiency term if that is not the default."""
    weight = f"lambda-{recipe.quality_weight:g}"
    return weight if recipe.efficiency == BonbonRecipe.efficiency else f"{recipe.efficiency}-{weight}"


def scores_of(recipe: BonbonRecipe, weights: Iterable[float], efficiencies: Iterable[str]) -> tuple[BonbonRecipe, ...]:
    """The recipe with every weight and efficiency term. An infinite one has only the first term: it counts quality alone."""
    terms = tuple(efficiencies)
    return tuple(
        replace(recipe, quality_weight=weight, efficiency=term)
        for weight in weights
        for term in (terms[:1] if math.isinf(weight) else terms)
    )


def summary(reports: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A line for each point of the trade-off: the model before (λ None, round 0), then every score's rounds; none if no
    prompts are held out. ``speedup`` is theoretical; qualities are the judge's.
    """
    lines = []
    if reports and reports[0]["before"]:
        lines.append({"lambda": None, "efficiency": None, "round": 0} | _figures(reports[0]["before"]))
    for report in reports:
        if report["held_out"]:
            recipe = report["recipe"]
            score = {"lambda": recipe["quality_weight"], "efficiency": recipe["efficiency"]}
            lines.append(score | {"round": report["round"]} | _figures(report["held_out"]))
    return lines


def _figures(row: dict[str, Any]) -> dict[str, Any]:
    return {name: row[name] for name in _FIGURES}
