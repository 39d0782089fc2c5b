"""The table of decoding methods: their names, needs, options and implementations.

The command line, messages, benchmarks and rank 0 all read it. A new method is one entry here and one file in ``decoding``.
Nothing here loads torch, because clients use this module, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar, cast, get_args

from msgspec import Meta
from msgspec.structs import asdict

from pipedec.core.errors import BadValue, UserError
from pipedec.core.limits import KNEE_ROWS, MAX_FORWARDS
from pipedec.core.request import DEFAULT_METHOD, MethodOptions, TokenizedRequest
from pipedec.core.values import field_hints, range_of, shortened, value_of

MAX_ROWS = 512  # rows of a request that enter at a timestep
MAX_DRAFTED_ROWS = 2048  # rows of a request that are drafted at a timestep
MAX_CHOICES = 32_768  # children of all rows that a request drafts at a timestep
MAX_CHILDREN = 128
MAX_DEPTH = 64
Proposer = Literal["draft", "ngrams"]
Shape = Literal["likeliest", "efficient", "straightforward", "full"]
PROPOSERS: tuple[Proposer, ...] = get_args(Proposer)
SHAPES: tuple[Shape, ...] = get_args(Shape)
Options = TypeVar("Options", bound=MethodOptions)


@dataclass(frozen=True)
class Option:
    """How an option is shown, as an annotation of its field.

    Attributes:
        help: without a full stop.
        default: the default in words, if the value alone is unclear.
    """

    help: str
    default: str | None = None


Rows = Annotated[int, Meta(ge=1, le=MAX_ROWS)]
Children = Annotated[int, Meta(ge=1, le=MAX_CHILDREN)]
Depth = Annotated[int, Meta(ge=1, le=MAX_DEPTH)]
Forwards = Annotated[int, Meta(ge=1, le=MAX_FORWARDS)]
Proposers = Annotated[tuple[Proposer, ...], Meta(min_length=1), Option("Draft sources")]


class PlainOptions(MethodOptions, frozen=True):
    """``pp`` has no options."""


class LayerTreeOptions(MethodOptions, frozen=True):
    """The limits of trees that grow by whole layers, with the paper's values (PipeDec §4.3.1)."""

    width: Annotated[Rows, Option("Maximum rows per tree layer, w")] = 32
    children: Annotated[Children, Option("Maximum children per row, c")] = 16


class PipeDecOptions(LayerTreeOptions, frozen=True):
    """``pipedec``: one layer of the tree enters at every timestep."""


class StaticTreeOptions(LayerTreeOptions, frozen=True):
    """``stpp``: a whole tree enters in one timestep. With ``rows`` only its most probable rows, of layers that may be as wide."""

    depth: Annotated[Depth, Option("Tree layers below the root")] = 4
    rows: Annotated[Rows | None, Option("Maximum tree size; keeps the most probable rows", "whole layers")] = None
    proposers: Proposers = ("draft",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if "draft" not in self.proposers:
            raise BadValue("proposers: a static tree needs the draft model: name draft, too")
        most = MAX_ROWS if self.rows is None else MAX_DRAFTED_ROWS  # without a limit of rows, all that are drafted enter
        if self.depth * self.layer_rows > most:
            raise BadValue(f"depth: {self.depth} layers of {self.layer_rows} rows are drafted at once: together at most {most}")
        if self.choices > MAX_CHOICES:
            raise BadValue(f"children: the rows that are drafted at once have {self.choices} children: at most {MAX_CHOICES}")

    @property
    def layer_rows(self) -> int:
        """Maximum rows of a layer that is drafted."""
        return self.rows or self.width

    @property
    def choices(self) -> int:
        """Maximum children of all rows that are drafted."""
        return self.depth * self.layer_rows * self.children


class BestFirstOptions(MethodOptions, frozen=True):
    """``pipedec-bestfirst``: options that are None are tuned while it decodes."""

    width: Annotated[Rows | None, Option("Maximum rows per timestep, w", "auto-tuned")] = None
    children: Annotated[Children | None, Option("Maximum children per row, c", "auto-tuned")] = None
    forwards: Annotated[Forwards | None, Option("Draft forwards per timestep", "auto-tuned")] = None
    proposers: Proposers = PROPOSERS


class BitaOptions(MethodOptions, frozen=True):
    """``bita``: the tree of candidates that the mask rows propose (BiTA §3.2, Table 4; ``likeliest`` is ours)."""

    shape: Annotated[Shape, Option("Shape of the candidate tree")] = "likeliest"
    depth: Annotated[Depth | None, Option("Mask rows per group, at most those trained", "all")] = None
    children: Annotated[Children | None, Option("Candidates per mask row", "16, 5 or 2 by shape")] = None
    rows: Annotated[Rows, Option("Maximum size of a likeliest tree, mask rows included")] = KNEE_ROWS


def shown_option(hint: Any) -> Option:
    """How the option with this annotated type is shown."""
    return next(note for note in hint.__metadata__ if isinstance(note, Option))


def option_limits() -> str:
    """The ranges of all methods' options, in one line."""
    limits = {
        entry.name: ", ".join(
            f"{name} {limits}" for name, hint in field_hints(entry.options).items() if (limits := range_of(hint))
        )
        for entry in METHODS.values()
    }
    return "; ".join(f"{method}: {listed}" for method, listed in limits.items() if listed)


@dataclass(frozen=True)
class MethodEntry:
    """One row of the table.

    Attributes:
        help: one sentence.
        implementation: ``module:class`` of a ``decoding.method.Method``, imported when it is first used.
        draft: whether it uses a draft model.
        needs_bita: whether the target must have a trained BiTA.
    """

    name: str
    help: str
    options: type[MethodOptions]
    implementation: str
    draft: Literal["none", "optional", "required"] = "none"
    needs_bita: bool = False

    @property
    def option_names(self) -> tuple[str, ...]:
        return self.options.__struct_fields__

    def missing(self, has_draft: bool, has_bita: bool) -> str | None:
        """Why the method cannot run on a pipeline, and what to do; None if it can."""
        if self.draft == "required" and not has_draft:
            return f"method {self.name} needs a draft model: give --draft DIR, or use --method {DEFAULT_METHOD}"
        if self.needs_bita and not has_bita:
            return f"method {self.name} needs what pipedec train bita has learned for this target: give --bita DIR"
        return None

    def check_needs(self, has_draft: bool, has_bita: bool) -> None:
        """Raises UserError if the pipeline lacks what the method needs."""
        reason = self.missing(has_draft, has_bita)
        if reason is not None:
            raise UserError(reason)


METHODS = {
    entry.name: entry
    for entry in (
        MethodEntry(
            "pp", "Pipeline parallelism without speculation.", PlainOptions, "pipedec.decoding.plain:Plain"
        ),
        MethodEntry(
            "stpp", "One static tree per pass of the pipeline.", StaticTreeOptions,
            "pipedec.decoding.static_tree:StaticTree", draft="required",
        ),
        MethodEntry(
            "pipedec", "PipeDec: one layer of a dynamic tree per timestep.", PipeDecOptions,
            "pipedec.decoding.pipedec:PipeDec", draft="required",
        ),
        MethodEntry(
            DEFAULT_METHOD, "The most probable rows of any depth per timestep.", BestFirstOptions,
            "pipedec.decoding.best_first:BestFirst", draft="optional",
        ),
        MethodEntry(
            "bita", "BiTA: the target drafts for itself with trained mask rows.", BitaOptions,
            "pipedec.decoding.bita:Bita", needs_bita=True,
        ),
    )
}  # fmt: skip
METHOD_NAMES = tuple(METHODS)


def find_method(name: str) -> MethodEntry:
    """The table's entry. Raises UserError for an unknown name."""
    if name not in METHODS:
        raise UserError(f"unknown method {shortened(name)!r}: choose one of {', '.join(METHODS)}")
    return METHODS[name]


def possible_methods(has_draft: bool, has_bita: bool) -> list[str]:
    """The names of the methods that a pipeline can run."""
    return [entry.name for entry in METHODS.values() if entry.missing(has_draft, has_bita) is None]


def make_options(name: str, given: Mapping[str, Any] | None = None, tree: LayerTreeOptions | None = None) -> MethodOptions:
    """The options of one request to method ``name``; what is not ``given`` takes its default.

    Args:
        tree: a cluster's own defaults for methods whose trees grow by layers.

    Raises:
        UserError: an unknown method, an option that it does not take, or a value that is not allowed.
    """
    entry, values = find_method(name), dict(given or {})
    for key in values:
        if key not in entry.option_names:
            takers = [other.name for other in METHODS.values() if key in other.option_names]
            hint = f"it is an option of {', '.join(takers)}" if takers else f"it takes {', '.join(entry.option_names) or 'none'}"
            raise UserError(f"method {name} has no option {shortened(key)!r}: {hint}")
    defaults = asdict(tree) if tree is not None and issubclass(entry.options, LayerTreeOptions) else {}
    return cast(MethodOptions, value_of(entry.options, {**defaults, **values}))


def options_of(request: TokenizedRequest, kind: type[Options]) -> Options:
    """The request's options, which are of this ``kind``, or its defaults."""
    if request.options is None:
        return kind()
    assert isinstance(request.options, kind), f"{request.method} takes {kind.__name__}, not {request.options}"
    return request.options
