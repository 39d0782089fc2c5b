"""The trees of a sweep: which limits each method tries, and a row's field about them.

Knows nothing of pipelines, prompts and results.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from pipedec.bench.record import Row, plain
from pipedec.core import PROPOSERS, Request, TreeParams, UserError
from pipedec.decoding import DEFAULT_METHOD, Experience, create_method
from pipedec.decoding.bita import DEFAULT_ROWS
from pipedec.messages import PromptRequest

BITA = "bita"
_BITA_LIMITS = ("shape", "depth", "children", "rows")


@dataclass(frozen=True)
class TreeGrid:
    """Limits of trees, all combinations; an empty limit is left to the method.

    Attributes:
        widths: rows per timestep; of all methods but ``bita``.
        children: of a row; for ``bita``, candidates of a mask.
        forwards, proposers: see ``TreeParams``.
        shapes, depths: of ``bita`` alone: shapes of the tree (of SHAPES), numbers of masks used.
        rows: of ``bita``'s ``likeliest`` tree alone.

    Raises:
        UserError: a number below 1, or an unknown name.
    """

    widths: tuple[int, ...] = ()
    children: tuple[int, ...] = ()
    forwards: int | None = None
    proposers: tuple[str, ...] = PROPOSERS
    shapes: tuple[str, ...] = (TreeParams().shape,)
    depths: tuple[int, ...] = ()
    rows: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        numbers = {"--widths": self.widths, "--children": self.children, "--depths": self.depths, "--rows": self.rows}
        for flag, values in numbers.items():
            if any(value < 1 for value in values):
                raise UserError(f"{flag} must be at least 1")
        TreeParams(forwards=self.forwards, proposers=self.proposers)
        for shape in self.shapes:
            TreeParams(shape=shape)

    def drafted(self) -> list[TreeParams]:
        """The limits to try with each method that drafts."""
        return [
            TreeParams(width, children, forwards=self.forwards, proposers=self.proposers)
            for width in self.widths or (None,)
            for children in self.children or (None,)
        ]

    def of_bita(self, trained_masks: int) -> list[TreeParams]:
        """The trees to try with a BiTA that has ``trained_masks`` masks: all limits set that the shape uses, equal trees once.

        Raises:
            UserError: there is no BiTA, a depth exceeds its masks, or a tree is too large.
        """
        requested = [
            TreeParams(children=children, depth=depth, rows=rows, shape=shape)
            for shape in self.shapes
            for depth in self.depths or (None,)
            for children in self.children or (None,)
            for rows in (self.rows or (DEFAULT_ROWS,) if shape == "likeliest" else (None,))
        ]
        return list(dict.fromkeys(_with_masks(tree, trained_masks) for tree in requested))


def _with_masks(tree: TreeParams, trained_masks: int) -> TreeParams:
    """``tree`` with the numbers of masks and candidates that ``bita`` would use."""
    request = Request(0, (), method=BITA, tree=tree)
    masks = create_method(request, None, Experience(passage=1), trained_masks=trained_masks).masks
    return replace(tree, depth=masks.count, children=masks.named)


@dataclass(frozen=True)
class Cell:
    """One way to decode: the row's method (``label``), and the method and tree of the request."""

    label: str
    method: str
    tree: TreeParams | None

    @property
    def limits(self) -> Row | None:
        """A row's field ``tree``: the limits that the method has."""
        if self.tree is None:
            return None
        if self.method == BITA:
            return {name: getattr(self.tree, name) for name in _BITA_LIMITS}
        if self.method != DEFAULT_METHOD:
            return plain(self.tree.with_defaults())
        return {name: value for name, value in plain(self.tree).items() if name != "shape"}

    def request(self, prompt: PromptRequest, trace: bool) -> PromptRequest:
        return replace(prompt, method=self.method, tree=self.tree or TreeParams(), trace=trace)
