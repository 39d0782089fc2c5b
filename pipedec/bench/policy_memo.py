"""What the draft said after contexts of one prompt: a trie of the tokens behind it, and the likeliest children of each context.

Owns the tensors and their safetensors file. Knows no tree and no model. Shapes: N contexts, C children at most.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from pipedec.core import UserError
from pipedec.tree import Candidates

PROMPT = -1  # the context of the prompt alone, which no tree holds
_FIRST_CAPACITY = 256


class DraftMemo:
    """Contexts are numbered in the order in which they were met, each after the one that it continues."""

    def __init__(self) -> None:
        self._parents: list[int] = []
        self._tokens: list[int] = []
        self._numbers: dict[tuple[int, int], int] = {}  # of (context, next token)
        self._asked = torch.zeros(0, dtype=torch.int32)  # [N], children asked for; 0 where the draft was not asked
        self._token_ids = torch.zeros(0, 0, dtype=torch.int32)  # [N, C], the likeliest first
        self._log_probs = torch.zeros(0, 0)  # [N, C]
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
            memo._parents, memo._tokens = found["parents"].tolist(), found["tokens"].tolist()
            memo._asked, memo._token_ids, memo._log_probs = found["asked"], found["token_ids"], found["log_probs"]
        except (SafetensorError, KeyError, OSError) as error:
            raise UserError(f"cannot read {path}: {error}; remove it, and its contexts are drafted again") from None
        memo._numbers = {place: number for number, place in enumerate(zip(memo._parents, memo._tokens, strict=True))}
        return memo

    def save(self, path: Path) -> None:
        count = len(self._parents)
        tensors = {
            "parents": torch.tensor(self._parents, dtype=torch.int32),
            "tokens": torch.tensor(self._tokens, dtype=torch.int32),
            "asked": self._asked[:count].contiguous(),
            "token_ids": self._token_ids[:count].contiguous(),
            "log_probs": self._log_probs[:count].contiguous(),
        }
        partial = path.with_suffix(".partial")
        save_file(tensors, partial)
        os.replace(partial, path)
        self.has_changed = False

    def find(self, context: int, token: int) -> int | None:
        """The context that continues ``context`` with ``token``, if it was ever met."""
        return self._numbers.get((context, token))

    def continued(self, context: int, token: int) -> int:
        """The same, met now if never before."""
        number = self._numbers.setdefault((context, token), len(self._parents))
        if number == len(self._parents):
            self._parents.append(context)
            self._tokens.append(token)
            self._reserve(number + 1, self._token_ids.shape[1])
        return number

    def knows(self, contexts: Tensor, children: int) -> Tensor:
        """bool [F]: whether so many children are recorded of each of ``contexts`` (int64 [F])."""
        return self._asked[contexts] >= children

    def add(self, contexts: Tensor, said: Candidates, children: int) -> None:
        """What the draft said when it was asked for ``children``; contexts that had as many keep what they have."""
        is_new = ~self.knows(contexts, children)
        new, width = contexts[is_new], said.token_ids.shape[1]
        self._reserve(len(self._parents), width)
        self._asked[new] = children
        self._token_ids[new, :width] = said.token_ids[is_new].to("cpu", torch.int32)
        self._log_probs[new, :width] = said.log_probs[is_new].to("cpu", torch.float32)
        self.has_changed = True

    def said(self, contexts: Tensor, children: int) -> tuple[Tensor, Tensor]:
        """Token ids (int64) and log-probabilities of known contexts, both [F, min(children, vocabulary)]."""
        return self._token_ids[contexts, :children].long(), self._log_probs[contexts, :children]

    def _reserve(self, contexts: int, width: int) -> None:
        capacity, columns = self._token_ids.shape
        if contexts <= capacity and width <= columns:
            return
        more = max(0, max(2 * capacity, _FIRST_CAPACITY) - capacity) if contexts > capacity else 0
        margins = (0, max(0, width - columns), 0, more)
        self._token_ids = torch.nn.functional.pad(self._token_ids, margins)
        self._log_probs = torch.nn.functional.pad(self._log_probs, margins)
        self._asked = torch.nn.functional.pad(self._asked, (0, more))
