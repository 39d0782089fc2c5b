"""What policies replay, in one directory: the target's own answers, and the draft model's candidates for each prompt.

Owns the files: ``recording.json``, and a ``draft-KEY.safetensors`` per prompt, a trie of contexts with the most probable children
of each. A context is the prompt followed by some tokens. Knows no tree and no model.

Shapes: N contexts, F requested contexts, up to C children.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from pipedec.bench.prompts import DrawnPrompt
from pipedec.bench.record import Row
from pipedec.core import UserError
from pipedec.messages import PromptRequest
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


SCHEMA = "pipedec.recording/1"
_TokenIds = tuple[int, ...]


class AnswerRecording:
    """One directory. What it contains is not recorded again.

    Args:
        pair: digest of both models' weights.
        sampling: sampling parameters of all answers.

    Raises:
        UserError: the directory contains a recording with other weights or parameters, or a file that is no recording.
    """

    def __init__(self, directory: Path, pair: str, sampling: Row) -> None:
        if directory.exists() and not directory.is_dir():
            raise UserError(f"--recording {directory}: not a directory; give another")
        self._directory = directory
        self._path = directory / "recording.json"
        self._origin = {"schema": SCHEMA, "pair": pair, "sampling": sampling}
        self._answers = self._read()

    def answer(self, prompt: DrawnPrompt, generate: Callable[[PromptRequest], _TokenIds]) -> _TokenIds:
        """The answer to ``prompt``, from ``generate`` if it is not recorded yet."""
        if not self.knows(prompt):
            self.add(prompt, generate(prompt.request))
        return self.known(prompt)

    def add(self, prompt: DrawnPrompt, token_ids: _TokenIds) -> None:
        """Keep the answer to ``prompt``."""
        self._answers[prompt.token_ids] = token_ids
        self._write()

    def known(self, prompt: DrawnPrompt) -> _TokenIds:
        """The recorded answer to ``prompt``. Raises KeyError if there is none."""
        return self._answers[prompt.token_ids]

    def knows(self, prompt: DrawnPrompt) -> bool:
        """Whether the answer to ``prompt`` is recorded."""
        return prompt.token_ids in self._answers

    def memo(self, prompt: DrawnPrompt) -> DraftMemo:
        """The recorded candidates for ``prompt``."""
        return DraftMemo.load(self._draft_path(prompt))

    def keep(self, prompt: DrawnPrompt, memo: DraftMemo) -> None:
        """Save ``memo`` if candidates were added."""
        if memo.has_changed:
            memo.save(self._draft_path(prompt))

    def _draft_path(self, prompt: DrawnPrompt) -> Path:
        key = hashlib.sha256(json.dumps(prompt.token_ids).encode()).hexdigest()[:16]
        return self._directory / f"draft-{key}.safetensors"

    def _read(self) -> dict[_TokenIds, _TokenIds]:
        if not self._path.is_file():
            return {}
        try:
            document = json.loads(self._path.read_text(encoding="utf-8"))
            found = _settings({name: document[name] for name in self._origin})
            answers = {_token_ids(one["prompt_token_ids"]): _token_ids(one["token_ids"]) for one in document["prompts"]}
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{self._path} is no recording: give --recording another directory") from None
        for name, wanted in _settings(self._origin).items():
            if found.get(name) != wanted:
                difference = f"{self._path} was recorded with another {name} ({found.get(name)}, not {wanted})"
                raise UserError(f"{difference}: give --recording another directory")
        return answers

    def _write(self) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        answers = [{"prompt_token_ids": prompt, "token_ids": token_ids} for prompt, token_ids in self._answers.items()]
        partial = self._path.with_suffix(".partial")
        partial.write_text(json.dumps({**self._origin, "prompts": answers}) + "\n", encoding="utf-8")
        os.replace(partial, self._path)


def _token_ids(values: list[int]) -> _TokenIds:
    """The token ids of a prompt or an answer. Raises ValueError if there are none, or one is no token id."""
    if not values or not all(isinstance(value, int) and value >= 0 for value in values):
        raise ValueError(f"no token ids: {values}")
    return tuple(values)


def _settings(origin: Row) -> Row:
    """All settings as one flat dictionary."""
    return {"schema": origin["schema"], "pair": origin["pair"], **origin["sampling"]}
