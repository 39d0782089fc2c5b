"""What policies replay, in one directory: the target's own answers, and the draft model's candidates for each prompt.

Owns the files: ``recording.json``, and a ``draft-KEY.safetensors`` per prompt.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

from pipedec.bench.policy.memo import DraftMemo
from pipedec.bench.prompts import DrawnPrompt
from pipedec.bench.record import Row
from pipedec.core import UserError
from pipedec.messages import PromptRequest

SCHEMA = "pipedec.recording/1"
_TokenIds = tuple[int, ...]


class Recording:
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
