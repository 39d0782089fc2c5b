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
        unit: lengths are stated in multiples of it; None if a promise states none.
        knows: whether positions follow from true lengths instead of stated or fixed ones.
    """

    unit: int | None = None
    knows: bool = False

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

    def write(self, path: Path) -> Path:
        """Write the dialect's file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.dialect.to_json() + "\n", encoding="utf-8")
        return path


WAYS = {
    "fixed": Way(),
    "pred-1x": Way(unit=1),
    "pred-10x": Way(unit=10),
    "oracle": Way(knows=True),
}
