"""The trees of a sweep: which limits every method tries, and what a row says of them.

Knows the methods' limits. Knows nothing of pipelines, prompts and results.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

from pipedec.bench.record import Row, plain
from pipedec.core import DEFAULT_METHOD, MethodOptions, Request, UserError
from pipedec.decoding import Experience, create_method
from pipedec.messages import PromptRequest
from pipedec.methods import PROPOSERS, BestFirstOptions, BitaOptions, applicable_options

BITA = "bita"
# Rows have always had these limits, too, and are recognised by all of them.
_UNUSED_LIMITS: dict[str, Row] = {"pipedec": {"depth": 4, "rows": None}, DEFAULT_METHOD: {"depth": None, "rows": None}}


@dataclass(frozen=True)
class TreeGrid:
    """Limits of trees, all combinations; what is empty is left to each method.

    Attributes:
        widths: rows per timestep, of all methods but ``bita``.
        children: of a row; of ``bita``, tokens that a mask names.
        forwards, proposers: of ``pipedec-bestfirst`` alone.
        shapes, depths: of ``bita`` alone: trees of candidates (of SHAPES), and how many masks are used.
        rows: of the likeliest tree of ``bita`` alone.

    Raises:
        UserError: a number below 1, or a name that is not known.
    """

    widths: tuple[int, ...] = ()
    children: tuple[int, ...] = ()
    forwards: int | None = None
    proposers: tuple[str, ...] = PROPOSERS
    shapes: tuple[str, ...] = (BitaOptions().shape,)
    depths: tuple[int, ...] = ()
    rows: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        numbers = {"--widths": self.widths, "--children": self.children, "--depths": self.depths, "--rows": self.rows}
        for flag, values in numbers.items():
            if any(value < 1 for value in values):
                raise UserError(f"{flag} must be at least 1")
        BestFirstOptions(forwards=self.forwards, proposers=self.proposers)
        for shape in self.shapes:
            BitaOptions(shape=shape)

    def drafted(self, method: str) -> list[MethodOptions]:
        """The limits to try with a method that drafts: those of the grid that it takes."""
        shared = {"forwards": self.forwards, "proposers": self.proposers}
        return [
            applicable_options(method, {"width": width, "children": children, **shared})
            for width in self.widths or (None,)
            for children in self.children or (None,)
        ]

    def of_bita(self, trained_masks: int) -> list[BitaOptions]:
        """The trees of a BiTA of so many masks, all limits set that the shape heeds, equal trees once.

        Raises:
            UserError: there is no BiTA, it has fewer masks than a depth, or a tree is too large.
        """
        wishes = [
            BitaOptions(shape, depth, children, rows)
            for shape in self.shapes
            for depth in self.depths or (None,)
            for children in self.children or (None,)
            for rows in (self.rows if shape == "likeliest" and self.rows else (BitaOptions().rows,))
        ]
        return list(dict.fromkeys(_with_masks(wish, trained_masks) for wish in wishes))


def _with_masks(wish: BitaOptions, trained_masks: int) -> BitaOptions:
    """``wish`` with as many masks and candidates as ``bita`` would take."""
    asked = Request(0, (), method=BITA, options=wish)
    masks = create_method(asked, None, Experience(passage=1), trained_masks=trained_masks).masks
    return replace(wish, depth=masks.count, children=masks.named)


@dataclass(frozen=True)
class Cell:
    """One way to decode: a row's method, and what the pipeline is asked for."""

    label: str
    method: str
    tree: MethodOptions | None

    @property
    def limits(self) -> Row | None:
        """What a row says of the tree: those limits that the method has."""
        if self.tree is None:
            return None
        limits: Row = plain(self.tree)
        if isinstance(self.tree, BitaOptions) and self.tree.shape != "likeliest":
            limits["rows"] = None  # no limit of this shape
        return _UNUSED_LIMITS.get(self.method, {}) | limits

    def request(self, prompt: PromptRequest, trace: bool) -> PromptRequest:
        return replace(prompt, method=self.method, options=asdict(self.tree) if self.tree else {}, trace=trace)
