"""The static tree of a real draft against all paths that there are, one forward of transformers each."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from support.checkpoints import save_tiny_llama
from support.drafters import Alone, begun
from transformers import PreTrainedModel

from pipedec.core import Request, Step, Verdict
from pipedec.drafting import DraftModel
from pipedec.methods import StaticTreeOptions
from pipedec.model import StageModel

PROMPT = (1, 9, 30, 4, 51)
CHILDREN, DEPTH = 4, 3
TokenPath = tuple[int, ...]


class Draft:
    """The same draft twice: ours and transformers'."""

    def __init__(self, directory: Path) -> None:
        self._theirs: PreTrainedModel = save_tiny_llama(directory, layers=2, dtype=torch.float64)
        self.ours = StageModel.load(directory, range(2), torch.float64, "cpu")
        self.children = cache(self._children)

    def _children(self, path: TokenPath) -> dict[int, float]:
        """The likeliest tokens after the prompt and ``path``, with their log-probabilities."""
        with torch.inference_mode():
            top = self._theirs(torch.tensor([[*PROMPT, *path]])).logits[0, -1].log_softmax(-1).topk(CHILDREN)
        return dict(zip(top.indices.tolist(), top.values.tolist(), strict=True))

    def all_paths(self, root: TokenPath) -> dict[TokenPath, float]:
        """Every path of up to ``DEPTH`` rows below a root, itself not among them, with its log-probability."""
        found: dict[TokenPath, float] = {}
        layer = {root: 0.0}
        for _ in range(DEPTH):
            layer = {
                (*path, token): score + log_prob
                for path, score in layer.items()
                for token, log_prob in self.children(path).items()
            }
            found |= layer
        return found


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Draft:
    return Draft(tmp_path_factory.mktemp("draft"))


def static_tree(draft: Draft, rows: int | None, width: int = 1) -> Alone:
    limits = StaticTreeOptions(width, CHILDREN, DEPTH, rows)
    return begun(Request(0, PROMPT, method="stpp", options=limits), DraftModel(draft.ours))


def drafted(method: Alone, prefix: TokenPath) -> list[TokenPath]:
    """The paths of the tree that enters, behind ``prefix``; the root's comes first."""
    method.draft()
    step = method.propose()
    assert isinstance(step, Step)
    paths: list[TokenPath] = []
    for token, parent in zip(step.token_ids.tolist(), step.parents.tolist(), strict=True):
        paths.append((*(paths[parent] if parent >= 0 else prefix), token))
    assert len(set(paths)) == len(paths)
    return paths


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 13, 30, 70, 84, 100])
def test_kept_rows_are_the_likeliest_of_all(draft: Draft, rows: int) -> None:
    """In each of three rounds, the answer going on below a leaf, at a token of no row, and right behind the root."""
    method = static_tree(draft, rows)
    accepted: TokenPath = ()
    verdict = (7,)
    for depth in (DEPTH, 1, 0):
        method.apply(Verdict.of(*verdict))
        root = (*accepted, verdict[-1])
        scores = draft.all_paths(root)
        paths = drafted(method, accepted)
        assert paths[0] == root
        assert set(paths[1:]) == set(sorted(scores, key=scores.__getitem__, reverse=True)[:rows])
        accepted = max((path for path in paths if len(path) <= len(root) + depth), key=len)
        outside = next(token for token in range(64) if (*accepted, token) not in paths)
        verdict = (*accepted[len(root) :], outside)


@pytest.mark.parametrize("width", [1, 3, 64])
def test_without_a_limit_every_layer_is_as_wide_as_allowed(draft: Draft, width: int) -> None:
    method = static_tree(draft, None, width)
    method.apply(Verdict.of(7))
    layer = {(7,): 0.0}
    wanted = [*layer]
    for _ in range(DEPTH):
        found = {(*path, token): score + more for path, score in layer.items() for token, more in draft.children(path).items()}
        layer = {path: found[path] for path in sorted(found, key=found.__getitem__, reverse=True)[:width]}
        wanted += layer
    assert sorted(drafted(method, ())) == sorted(wanted)
