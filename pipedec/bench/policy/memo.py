"""What the draft said after contexts of one prompt: a trie of the tokens behind it, and the likeliest children of each context.

Owns the safetensors file. Knows no tree and no model. Shapes: N contexts, F of them asked about, C children at most.
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

PROMPT = -1  # the context of the prompt alone, which no tree holds


@dataclass(frozen=True)
class _Said:
    """The likeliest children of one context, both tensors [C]; ``asked`` is more than C if the vocabulary is smaller."""

    asked: int
    token_ids: Tensor
    log_probs: Tensor


class DraftMemo:
    """Contexts are numbered in the order in which they were met, each after the one that it continues."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, int], int] = {}  # of (context, next token), in order
        self._said: dict[int, _Said] = {}  # by context
        self.has_changed = False

    @classmethod
    def load(cls, path: Path) -> DraftMemo:
        """What ``save`` wrote, or nothing if there is no file.

        Raises:
            UserError: the file is damaged.
        """
        memo = cls()
        if not path.is_file():
            return memo
        try:
            found = load_file(path)
            places = zip(found["parents"].tolist(), found["tokens"].tolist(), strict=True)
            said = zip(found["asked"].tolist(), found["token_ids"], found["log_probs"], strict=True)
            memo._numbers = {place: number for number, place in enumerate(places)}
            memo._said = {context: _Said(*one) for context, one in enumerate(said) if one[0]}
        except (SafetensorError, KeyError, ValueError) as error:
            raise UserError(f"cannot read {path}: {error}; remove it, and its contexts are drafted again") from None
        return memo

    def save(self, path: Path) -> None:
        count, width = len(self._numbers), max(len(said.token_ids) for said in self._said.values())
        parents, tokens = (torch.tensor(column, dtype=torch.int32) for column in zip(*self._numbers, strict=True))
        asked = torch.zeros(count, dtype=torch.int32)  # 0 where the draft was not asked
        token_ids, log_probs = torch.zeros(count, width, dtype=torch.int32), torch.zeros(count, width)
        for context, said in self._said.items():
            asked[context] = said.asked
            token_ids[context, : len(said.token_ids)] = said.token_ids
            log_probs[context, : len(said.log_probs)] = said.log_probs
        tensors = {"parents": parents, "tokens": tokens, "asked": asked, "token_ids": token_ids, "log_probs": log_probs}
        partial = path.with_suffix(".partial")
        save_file(tensors, partial)
        os.replace(partial, path)
        self.has_changed = False

    def continued(self, context: int, token: int) -> int:
        """The context that continues ``context`` with ``token``, met now if never before."""
        return self._numbers.setdefault((context, token), len(self._numbers))

    def knows(self, context: int, children: int) -> bool:
        """Whether so many children of ``context`` are recorded."""
        return context in self._said and self._said[context].asked >= children

    def add(self, contexts: Sequence[int], said: Candidates, children: int) -> None:
        """What the draft said of F contexts when it was asked for ``children``; those that had as many keep what they have."""
        token_ids, log_probs = said.token_ids.to("cpu", torch.int32), said.log_probs.to("cpu", torch.float32)
        for context, ids, chances in zip(contexts, token_ids, log_probs, strict=True):
            if not self.knows(context, children):
                self._said[context] = _Said(children, ids, chances)
        self.has_changed = True

    def said(self, contexts: Sequence[int], children: int) -> tuple[Tensor, Tensor]:
        """Token ids (int64) and log-probabilities of F known contexts, both [F, min(children, vocabulary)]."""
        several = [self._said[context] for context in contexts]
        token_ids = torch.stack([one.token_ids[:children] for one in several])
        return token_ids.long(), torch.stack([one.log_probs[:children] for one in several])
