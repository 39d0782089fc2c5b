"""Recorded candidates of the draft model for one prompt: a trie of contexts, and the most probable children of each context.

A context is the prompt followed by some tokens. Owns the safetensors file. Knows no tree and no model. Shapes: N contexts, F
requested contexts, up to C children.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from pipedec.core import UserError
from pipedec.tree import Candidates

PROMPT = -1  # the context without further tokens, which is not in the trie


@dataclass(frozen=True)
class _Children:
    """The most probable children of one context, both tensors [C]; ``requested`` exceeds C if the vocabulary is smaller."""

    requested: int
    token_ids: Tensor
    log_probs: Tensor


class DraftMemo:
    """Contexts are numbered in the order of their first use, each after the context that it continues."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, int], int] = {}  # of (context, next token), ascending
        self._children: dict[int, _Children] = {}  # by context
        self.has_changed = False

    @classmethod
    def load(cls, path: Path) -> DraftMemo:
        """Read what ``save`` wrote; empty if there is no file.

        Raises:
            UserError: the file is damaged.
        """
        memo = cls()
        if not path.is_file():
            return memo
        try:
            found = load_file(path)
            contexts = zip(found["parents"].tolist(), found["tokens"].tolist(), strict=True)
            children = zip(found["asked"].tolist(), found["token_ids"], found["log_probs"], strict=True)
            memo._numbers = {context: number for number, context in enumerate(contexts)}
            memo._children = {context: _Children(*one) for context, one in enumerate(children) if one[0]}
        except (SafetensorError, KeyError, TypeError, ValueError) as error:
            raise UserError(f"cannot read {path}: {error}; remove the file, and the draft model will run again") from None
        return memo

    def save(self, path: Path) -> None:
        count, width = len(self._numbers), max(len(one.token_ids) for one in self._children.values())
        parents, tokens = (torch.tensor(column, dtype=torch.int32) for column in zip(*self._numbers, strict=True))
        asked = torch.zeros(count, dtype=torch.int32)  # 0 if the context has no recorded children
        token_ids, log_probs = torch.zeros(count, width, dtype=torch.int32), torch.zeros(count, width)
        for context, one in self._children.items():
            asked[context] = one.requested
            token_ids[context, : len(one.token_ids)] = one.token_ids
            log_probs[context, : len(one.log_probs)] = one.log_probs
        tensors = {"parents": parents, "tokens": tokens, "asked": asked, "token_ids": token_ids, "log_probs": log_probs}
        partial = path.with_suffix(".partial")
        save_file(tensors, partial)
        os.replace(partial, path)
        self.has_changed = False

    def continued(self, context: int, token: int) -> int:
        """The context that continues ``context`` with ``token``; added if it is new."""
        return self._numbers.setdefault((context, token), len(self._numbers))

    def knows(self, context: int, children: int) -> bool:
        """Whether ``children`` children of ``context`` are recorded."""
        return context in self._children and self._children[context].requested >= children

    def add(self, contexts: Sequence[int], candidates: Candidates, children: int) -> None:
        """Record the candidates of F contexts, requested with ``children``. Contexts that have as many keep theirs."""
        token_ids, log_probs = candidates.token_ids.to("cpu", torch.int32), candidates.log_probs.to("cpu", torch.float32)
        for context, *one in zip(contexts, token_ids, log_probs, strict=True):
            if not self.knows(context, children):
                self._children[context] = _Children(children, *one)
        self.has_changed = True

    def children(self, contexts: Sequence[int], children: int) -> tuple[Tensor, Tensor]:
        """Token ids (int64) and log-probabilities of F known contexts, both [F, min(children, vocabulary)]."""
        several = [self._children[context] for context in contexts]
        token_ids = torch.stack([one.token_ids[:children] for one in several])
        return token_ids.long(), torch.stack([one.log_probs[:children] for one in several])
