"""The dialects of PASTA's §6.2: four ways in which the main thread knows where the tokens after a child are."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from pipedec.threads import Dialect, load_dialect

FIXED_TOKENS = 60  # slightly more than the median block of our training data, as the paper's 40 is
_MOST = 200  # the largest length that is one token


@dataclass(frozen=True)
class Way:
    """A row of Figure 5, middle.

    Attributes:
        model: the way whose model answers; that of ``Oracle-10x`` and ``Oracle-1x`` predicts.
        unit: tokens are stated in multiples of it; None if a promise states none.
        true_unit: positions follow from true lengths, rounded up to a multiple of it; None for predicted ones.
    """

    model: str
    unit: int | None = None
    true_unit: int | None = None

    @property
    def dialect(self) -> Dialect:
        """PASTA's with this way to state lengths. A promise has as many tokens in each of them."""
        pasta = load_dialect("pasta")
        if self.unit is None:
            end = '"/>'
            return replace(
                pasta, opener_form=' topic="{topic}' + end, opener_tokens=(' topic="', end), length_pattern=None,
                default_length=FIXED_TOKENS,
            )  # fmt: skip
        ends = (f'" tokens="{tokens}"/>' for tokens in range(self.unit, _MOST + 1, self.unit))
        return replace(pasta, length_unit=self.unit, opener_tokens=(' topic="', *ends))

    def write(self, directory: Path, name: str) -> Path:
        """Write the dialect's file."""
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f"{name}.json"
        path.write_text(self.dialect.to_json() + "\n", encoding="utf-8")
        return path


WAYS = {
    "Fixed": Way("Fixed"),
    "Pred-1x": Way("Pred-1x", unit=1),
    "Pred-10x": Way("Pred-10x", unit=10),
    "Oracle": Way("Oracle", true_unit=1),
    "Oracle-1x": Way("Pred-1x", unit=1, true_unit=1),
    "Oracle-10x": Way("Pred-10x", unit=10, true_unit=10),
}
