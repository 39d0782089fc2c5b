"""Forced tokens: where a structure allows only one token, its row is as certain as the row above it.

So it enters in the same step as that row, without being drafted; several such rows in a line are a *chain*. A path is the tokens
below the root. Knows structures and trees; knows no draft model.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import torch

from pipedec.grammar import Grammar
from pipedec.tree import Candidates, PredictionTree

MAX_FORCED = 32  # rows of a chain


def chain_below(grammar: Grammar | None, path: Sequence[int] = ()) -> tuple[int, ...]:
    """The tokens forced after ``path``, at most ``MAX_FORCED``."""
    return () if grammar is None else grammar.forced(path, MAX_FORCED)


def plant(tree: PredictionTree, token: int, grammar: Grammar | None) -> slice:
    """Plant a root and the chain below it; returns their rows."""
    root = tree.plant(token)
    rows = [(forced, row, 0.0) for row, forced in enumerate(chain_below(grammar), start=root.start)]
    return slice(root.start, _appended(tree, rows).stop)


def grow(tree: PredictionTree, candidates: Candidates, width: int, grammar: Grammar | None) -> slice:
    """Add a layer of at most ``width`` rows, the most probable ones (PipeDec §3.3.3); returns them.

    Tokens with log-probability −∞, which a structure forbids, are left out. Each candidate comes with its chain, but all chains
    together take at most half of the rows.
    """
    if grammar is None:
        return tree.grow(candidates, width)
    rows: list[tuple[int, int, float]] = []
    left = width // 2
    cumulative = candidates.log_probs + tree.cumulative_log_probs[candidates.rows, None]
    best = cumulative.flatten().sort(descending=True, stable=True)
    chosen = best.indices[:width]
    parents = candidates.rows.to(chosen.device)[chosen // candidates.token_ids.shape[1]]
    columns = candidates.token_ids.flatten()[chosen], parents, candidates.log_probs.flatten()[chosen], best.values[:width]
    for token_id, parent_row, log_prob, path_log_prob in torch.stack([column.double() for column in columns]).T.tolist():
        token, parent, room = int(token_id), int(parent_row), width - len(rows)
        if not room or path_log_prob == -inf:
            break
        chain = chain_below(grammar, [*tree.path(parent), token])[: min(left, room - 1)]
        left -= len(chain)
        rows.append((token, parent, log_prob))
        rows += [(forced, row, 0.0) for row, forced in enumerate(chain, start=tree.num_rows + len(rows) - 1)]
    return _appended(tree, rows)


def of_leaves(tree: PredictionTree, candidates: Candidates) -> Candidates:
    """The candidates, without those below rows that already have a child, which is a forced token."""
    is_leaf = torch.isin(candidates.rows, tree.ids_of(slice(0, tree.num_rows))[1], invert=True)
    return Candidates(candidates.rows[is_leaf], candidates.token_ids[is_leaf], candidates.log_probs[is_leaf])


def _appended(tree: PredictionTree, rows: Sequence[tuple[int, int, float]]) -> slice:
    """Add rows, given as token, parent and log-probability; returns them."""
    if not rows:
        return slice(tree.num_rows, tree.num_rows)
    token_ids, parents, log_probs = (torch.tensor(column) for column in zip(*rows, strict=True))
    return tree.append(token_ids, parents, log_probs)
