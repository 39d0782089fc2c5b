"""The trees of a sweep: which limits each method tries, and a row's field about them.

Knows nothing of pipelines, prompts and results.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from msgspec.structs import asdict, replace

from pipedec.bench.options import Positive
from pipedec.bench.record import Row, plain
from pipedec.core import DEFAULT_METHOD, MethodOptions, Request
from pipedec.decoding import Batch
from pipedec.flags import Help, check_fields
from pipedec.messages import PromptRequest
from pipedec.methods import PROPOSERS, SHAPES, BestFirstOptions, BitaOptions, applicable_options
from pipedec.threads import Sequence

BITA = "bita"
# Rows also have these limits, which their methods ignore: they are part of a row's key.
_UNUSED_LIMITS: dict[str, Row] = {"pipedec": {"depth": 4, "rows": None}, DEFAULT_METHOD: {"depth": None, "rows": None}}


@dataclass(frozen=True)
class TreeGrid:
    """Limits of trees, all combinations; an empty limit is left to the method.

    Raises:
        UserError: a number below 1, or an unknown name.
    """

    widths: Annotated[
        tuple[Positive, ...], Help("Rows per timestep, like 16,32 (default: adapted by pipedec-bestfirst, 32 for others).")
    ] = ()
    children: Annotated[
        tuple[Positive, ...], Help("Children per row (default: adapted by pipedec-bestfirst, 1–16 for bita, else 16).")
    ] = ()
    forwards: Annotated[int | None, Help("pipedec-bestfirst: draft forwards per timestep (default: what fits).")] = None
    proposers: Annotated[tuple[str, ...], Help("pipedec-bestfirst: draft sources.")] = PROPOSERS
    shapes: Annotated[tuple[str, ...], Help(f"bita: shapes of the tree: {','.join(SHAPES)}.")] = (BitaOptions().shape,)
    depths: Annotated[tuple[Positive, ...], Help("bita: numbers of masks used, like 1,2,3 (default: all trained masks).")] = ()
    rows: Annotated[tuple[Positive, ...], Help("bita: rows of the likeliest tree, like 32,64 (default: 64).")] = ()

    def __post_init__(self) -> None:
        check_fields(self)
        BestFirstOptions(forwards=self.forwards, proposers=self.proposers)
        for shape in self.shapes:
            BitaOptions(shape=shape)

    def drafted(self, method: str) -> list[MethodOptions]:
        """The limits to try with a method that drafts: those of the grid that it has."""
        shared = {"forwards": self.forwards, "proposers": self.proposers}
        return [
            applicable_options(method, {"width": width, "children": children, **shared})
            for width in self.widths or (None,)
            for children in self.children or (None,)
        ]

    def of_bita(self, trained_masks: int) -> list[BitaOptions]:
        """The trees to try with a BiTA that has ``trained_masks`` masks: all limits set that the shape uses, equal trees once.

        Raises:
            UserError: there is no BiTA, a depth exceeds its masks, or a tree is too large.
        """
        requested = [
            BitaOptions(shape, depth, children, rows)
            for shape in self.shapes
            for depth in self.depths or (None,)
            for children in self.children or (None,)
            for rows in (self.rows if shape == "likeliest" and self.rows else (BitaOptions().rows,))
        ]
        return list(dict.fromkeys(_with_masks(tree, trained_masks) for tree in requested))


def _with_masks(tree: BitaOptions, trained_masks: int) -> BitaOptions:
    """``tree`` with the numbers of masks and candidates that ``bita`` would use."""
    request = Request(0, (0,), method=BITA, options=tree)
    sequence = Sequence(1, (), 1)
    batch = Batch(passage=1, trained_masks=trained_masks)
    batch.open(request, lambda: sequence)
    masks = batch.requests[request.number].masks
    return replace(tree, depth=masks.count, children=masks.named)


@dataclass(frozen=True)
class Cell:
    """One way to decode: the row's method (``label``), and the method and tree of the request."""

    label: str
    method: str
    tree: MethodOptions | None

    @property
    def limits(self) -> Row | None:
        """A row's field ``tree``: the limits that the method has."""
        if self.tree is None:
            return None
        limits: Row = plain(self.tree)
        if isinstance(self.tree, BitaOptions) and self.tree.shape != "likeliest":
            limits["rows"] = None  # a limit of the shape ``likeliest`` alone
        return _UNUSED_LIMITS.get(self.method, {}) | limits

    def request(self, prompt: PromptRequest, trace: bool) -> PromptRequest:
        return replace(prompt, method=self.method, options=asdict(self.tree) if self.tree else {}, trace=trace)
