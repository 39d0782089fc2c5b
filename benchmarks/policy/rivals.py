"""The default policy against the best trees of the field, each of which gets the best of several budgets for every prompt set.

Policies are parsed within ``benchmarks.methods.registered(*OPPONENTS)``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from pandas import DataFrame

from benchmarks.policy.study import PolicyFigures
from pipedec.bench.policy import Policy
from pipedec.bench.record import Row
from pipedec.core.errors import UserError
from pipedec.core.request import DEFAULT_METHOD


@dataclass(frozen=True)
class Rival:
    """A method with all combinations of some limits; ``limits`` are written as in a policy."""

    method: str
    limits: Mapping[str, Sequence[str | int]]

    def policies(self) -> list[Policy]:
        """One policy for each budget."""
        choices = product(*([f"{name}={value}" for value in values] for name, values in self.limits.items()))
        return [Policy.parse(f"{self.method}:{','.join(choice)}" if choice else self.method) for choice in choices]


_SOURCES = {"proposers": ("draft", "draft+ngrams")}
RIVALS = {  # with few rows for stages in which each further row takes time, and with many for others
    "static": Rival("stpp", {"rows": (4, 8, 72), "depth": (4, 8), **_SOURCES}),
    "eagle2": Rival("eagle2", {"rows": (4, 12, 72), "depth": (3, 6, 10), **_SOURCES}),
    "opt-tree": Rival("opt-tree", {"rows": (4, 8, 16, 48, 72, 96), "depth": (12,), **_SOURCES}),
    "sequoia": Rival("sequoia", {"rows": (4, 8, 72), "depth": (4, 8), **_SOURCES}),
    "evict": Rival("evict", {"rows": (60,), "depth": (2, 3, 4, 6), **_SOURCES}),
    "mtp": Rival("mtp", {"depth": range(1, 9)}),
    "flowspec": Rival("flowspec", {"width": (1, 2, 16, 32), "forwards": (1, 3), **_SOURCES}),
    "pipedec": Rival("pipedec", {"width": (2, 4, 16, 32)}),
    "chain": Rival("chain", {}),
}


def find_rivals(names: Sequence[str]) -> dict[str, Rival]:
    """The rivals of these names; ``all`` names all of them. Raises UserError for an unknown name."""
    for name in names:
        if name not in RIVALS and name != "all":
            raise UserError(f"--rivals {name}: choose from all, {', '.join(RIVALS)}")
    return RIVALS if "all" in names else {name: RIVALS[name] for name in names}


def with_rivals(policies: Sequence[Policy], rivals: Mapping[str, Rival]) -> tuple[Policy, ...]:
    """``policies``, the default one, and those of all rivals, equal ones once."""
    found = {(one.method, one.options): one for one in policies}
    for one in (Policy.parse(DEFAULT_METHOD), *(policy for rival in rivals.values() for policy in rival.policies())):
        found.setdefault((one.method, one.options), one)
    return tuple(found.values())


@dataclass(frozen=True)
class RivalFigures:
    """Milliseconds per token by prompt set, times being emulated.

    ``best`` is by rival and prompt set: ms, and the policy with the best budget. ``default`` are those of the default policy.
    ``ratios`` are the best rival's over the default's, above 1 where the default is faster; ``mean`` is their geometric mean.
    """

    best: DataFrame
    default: dict[str, float]
    ratios: dict[str, float]

    @property
    def mean(self) -> float:
        return float(np.exp(np.mean(np.log(list(self.ratios.values())))))

    @property
    def winners(self) -> DataFrame:
        """By prompt set: the rival with the best budget of all, its ms and its policy."""
        by_set = self.best.reset_index("rival").sort_values("ms", kind="stable").groupby("prompt_set", observed=True)
        return by_set.first().loc[list(self.default)]

    @classmethod
    def of(cls, figures: PolicyFigures, policies: Sequence[Policy], rivals: Mapping[str, Rival]) -> RivalFigures:
        """From the figures of ``policies``, which include those of all rivals and the default one."""
        names = {(one.method, one.options): one.name for one in policies}
        times = figures.totals["tpot_ms"]
        rows: list[tuple[str, str, float, str]] = []
        for rival, grid in rivals.items():
            tried = [names[one.method, one.options] for one in grid.policies()]
            for prompt_set, of_set in times.loc[tried].groupby(level="prompt_set", observed=True):
                policy = of_set.index.get_level_values("policy")[int(of_set.argmin())]
                rows.append((rival, str(prompt_set), float(of_set.min()), str(policy)))
        best = DataFrame(rows, columns=["rival", "prompt_set", "ms", "policy"]).set_index(["rival", "prompt_set"])
        own = Policy.parse(DEFAULT_METHOD)
        default = {str(name): float(ms) for name, ms in times.loc[names[own.method, own.options]].items()}
        lowest = best["ms"].groupby(level="prompt_set").min()
        return cls(best, default, {name: float(lowest[name] / ms) for name, ms in default.items()})

    def document(self) -> Row:
        """Everything as JSON."""
        sets = {
            name: {"default_ms": ms, "rival": won["rival"], "policy": won["policy"], "ms": won["ms"], "ratio": self.ratios[name]}
            for (name, ms), won in zip(self.default.items(), self.winners.to_dict("records"), strict=True)
        }
        return {"sets": sets, "mean_ratio": self.mean, "best": self.best.reset_index().to_dict("records")}
