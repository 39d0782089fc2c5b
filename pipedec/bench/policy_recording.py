"""What simulated policies replay, in one directory: the target's own answers to the prompts of a sweep, and what the draft said.

Owns the files: ``recording.json``, and a ``draft-KEY.safetensors`` for every prompt. How an answer is got, the caller knows.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from pipedec.bench.policy_memo import DraftMemo
from pipedec.bench.record import Row
from pipedec.core import SamplingParams, UserError
from pipedec.engine.messages import PromptRequest
from pipedec.engine.prompt import Prompter
from pipedec.engine.prompt_set import PromptSet

SCHEMA = "pipedec.recording/1"


@dataclass(frozen=True)
class DrawnPrompt:
    """One prompt of a set; ``index`` is its number in the set's file."""

    prompt_set: str
    index: int
    prompt_token_ids: tuple[int, ...]
    request: PromptRequest


@dataclass(frozen=True)
class RecordedAnswer:
    """What the target says to one prompt."""

    prompt_set: str
    index: int
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Origin:
    """What all answers of a recording have in common: the digest of the pair's weights, and how they were sampled."""

    pair: str
    sampling: Row

    @classmethod
    def create(cls, pair: str, sampling: SamplingParams) -> Origin:
        return cls(pair, json.loads(json.dumps(asdict(sampling))))


def draw(prompter: Prompter, prompt_set: PromptSet, samples: int, seed: int, asked: PromptRequest) -> Iterator[DrawnPrompt]:
    """The prompts that a sweep draws: the first ``samples``, in the order of the seed, that fit into the target's context.

    Args:
        asked: how to ask; its own prompt does not matter.

    Raises:
        UserError: none fits.
    """
    found = 0
    for index in prompt_set.shuffled(seed):
        request = PromptRequest(prompt_set.prompts[index], asked.raw, asked.method, asked.sampling)
        try:
            token_ids = prompter.token_ids(request.prompt, request.raw, request.sampling.max_tokens)
        except UserError:
            continue
        yield DrawnPrompt(prompt_set.name, index, token_ids, request)
        found += 1
        if found == samples:
            return
    if not found:
        raise UserError(f"no prompt of {prompt_set.name} fits into the target's context: use shorter ones")


class Recording:
    """One directory. What is there is not recorded again.

    Raises:
        UserError: the directory holds a recording of another origin, or something that is none.
    """

    def __init__(self, directory: Path, origin: Origin) -> None:
        if directory.exists() and not directory.is_dir():
            raise UserError(f"--recording {directory}: it is no directory")
        self._directory = directory
        self._path = directory / "recording.json"
        self._origin = origin
        self._answers = {_place(answer): answer for answer in self._read()}

    def answer(self, prompt: DrawnPrompt, ask: Callable[[PromptRequest], tuple[int, ...]]) -> RecordedAnswer:
        """The answer to ``prompt``, from ``ask`` if it is not recorded yet."""
        known = self._answers.get(_place(prompt))
        if known is None:
            token_ids = ask(prompt.request)
            known = RecordedAnswer(prompt.prompt_set, prompt.index, prompt.prompt_token_ids, token_ids)
            self._answers[_place(prompt)] = known
            self._write()
        return known

    def memo(self, answer: RecordedAnswer) -> DraftMemo:
        """What the draft has said below the prompt of ``answer`` so far."""
        return DraftMemo.load(self._draft_path(answer))

    def keep(self, answer: RecordedAnswer, memo: DraftMemo) -> None:
        """Write down what ``memo`` has learned since it was read."""
        if memo.has_changed:
            memo.save(self._draft_path(answer))

    def _draft_path(self, answer: RecordedAnswer) -> Path:
        key = hashlib.sha256(json.dumps(answer.prompt_token_ids).encode()).hexdigest()[:16]
        return self._directory / f"draft-{key}.safetensors"

    def _read(self) -> list[RecordedAnswer]:
        if not self._path.is_file():
            return []
        try:
            document = json.loads(self._path.read_text(encoding="utf-8"))
            schema, pair, sampling = document["schema"], document["pair"], document["sampling"]
            answers = [_answer(raw) for raw in document["prompts"]]
        except (OSError, ValueError, KeyError, TypeError):
            raise UserError(f"{self._path} is no recording: give --recording another directory") from None
        if schema != SCHEMA:
            raise UserError(f"{self._path}: schema {schema}, not {SCHEMA}; give --recording another directory")
        for what, found, wanted in (("pair", pair, self._origin.pair), ("sampling", sampling, self._origin.sampling)):
            if found != wanted:
                told = f"{self._path} was recorded with another {what} ({_difference(found, wanted)})"
                raise UserError(f"{told}: give --recording another directory")
        return answers

    def _write(self) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        document = {"schema": SCHEMA, **asdict(self._origin), "prompts": [asdict(answer) for answer in self._answers.values()]}
        partial = self._path.with_suffix(".partial")
        partial.write_text(json.dumps(document) + "\n", encoding="utf-8")
        os.replace(partial, self._path)


def _place(of: DrawnPrompt | RecordedAnswer) -> tuple[str, int, tuple[int, ...]]:
    return of.prompt_set, of.index, of.prompt_token_ids


def _answer(raw: Row) -> RecordedAnswer:
    return RecordedAnswer(raw["prompt_set"], raw["index"], tuple(raw["prompt_token_ids"]), tuple(raw["token_ids"]))


def _difference(found: Row | str, wanted: Row | str) -> str:
    """The first setting that differs, in words."""
    if isinstance(found, str) or isinstance(wanted, str):
        return f"{found}, not {wanted}"
    name = next(name for name in {**found, **wanted} if found.get(name) != wanted.get(name))
    return f"{name} {found.get(name)}, not {wanted.get(name)}"
