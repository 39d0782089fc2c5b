"""Recorded answers of the target and candidates of the draft model, in one directory, and a drafter that replays the candidates.

Owns the files: ``recording.json``, and a ``draft-KEY.safetensors`` per prompt, a trie of contexts with the most probable children
of each. A context is the prompt followed by some tokens. The drafter runs the draft model only for contexts that are not
recorded, and tracks which rows of each request's tree are in its cache.

Shapes: N contexts, F requested contexts or rows, up to C children.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from pipedec.bench.options import DrawnPrompt
from pipedec.bench.record import Row
from pipedec.core.errors import UserError
from pipedec.core.sampling import SamplingParams
from pipedec.decoding import Drafter
from pipedec.kv import KVManager
from pipedec.messages.request import PromptRequest
from pipedec.threads import Sequence as ThreadSequence
from pipedec.tree import Candidates, DraftRows, DraftTree, RowChanges

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
        """Read what ``save`` wrote; empty if there is no file. Raises UserError if the file is damaged."""
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
    """One directory, for one ``pair`` of models (a digest of their weights) and one ``sampling``.

    What it contains is not recorded again. Raises UserError if it contains a recording with other weights or parameters, or a
    file that is no recording.
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
        self._directory.mkdir(parents=True, exist_ok=True)
        answers = [{"prompt_token_ids": asked, "token_ids": answer} for asked, answer in self._answers.items()]
        partial = self._path.with_suffix(".partial")
        partial.write_text(json.dumps({**self._origin, "prompts": answers}) + "\n", encoding="utf-8")
        os.replace(partial, self._path)

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


def _token_ids(values: list[int]) -> _TokenIds:
    """The token ids of a prompt or an answer. Raises ValueError if there are none, or one is no token id."""
    if not values or not all(isinstance(value, int) and value >= 0 for value in values):
        raise ValueError(f"no token ids: {values}")
    return tuple(values)


def _settings(origin: Row) -> Row:
    """All settings as one flat dictionary."""
    return {"schema": origin["schema"], "pair": origin["pair"], **origin["sampling"]}


class RecordedDrafter:
    """The drafter of requests whose answers cannot fork.

    The draft model is loaded when the first forward is needed, and a request is prefilled when its own first forward is. Rows
    whose candidates came from a memo are not in the draft model's cache: the next forward includes those that are ancestors of
    its rows.

    Args:
        memo: returns the memo of a request's prompt. Requests with the same prompt may share one.
        load: returns the draft model, the same object each time.
        max_children: the largest number of children that any method requests; every forward records that number.
        kv: the books of the KV memory of the device whose work is replayed; None if requests share no prefixes there.
    """

    def __init__(
        self, memo: Callable[[int], DraftMemo], load: Callable[[], Drafter], max_children: int, kv: KVManager | None = None
    ) -> None:
        self._memo, self._load, self._max_children, self._kv = memo, load, max_children, kv
        self._requests: dict[int, _RecordedRequest] = {}

    def open_lane(self, number: int, sequence: ThreadSequence, token_ids: Sequence[int], sampling: SamplingParams) -> int:
        """Begin a request; returns how many of ``token_ids``, the prompt and tokens accepted before, need not be computed."""
        request = _RecordedRequest(number, sequence, token_ids, sampling, self._memo(number), self._load, self._max_children)
        self._requests[number] = request
        lease = self._kv.allocate(number, token_ids, len(token_ids)) if self._kv is not None else None
        return 0 if lease is None else lease.cached

    def close_lane(self, number: int) -> None:
        """Forget a request."""
        self._requests.pop(number).close()
        if self._kv is not None and self._kv.slots_of(number):
            self._kv.free(number)

    def expand(self, requested: Sequence[DraftRows], prompts: Mapping[int, Sequence[int]]) -> list[Candidates]:
        """The ``children`` most probable children of each of the requested rows."""
        for number, token_ids in prompts.items():
            self._tell(number, token_ids)
        return [self._requests[entry.number].expand(entry) for entry in requested]

    def num_forwards(self, requested: Sequence[DraftRows]) -> int:
        """One: each waits for the host."""
        return 1

    def follow_tree(self, number: int, thread: int, changes: RowChanges) -> None:
        """Commit and prune like the tree, in the draft model too if it is in use."""
        self._requests[number].advance(thread, changes)
        self._tell(number, changes.committed_ids)

    def _tell(self, number: int, token_ids: Sequence[int]) -> None:
        """Tokens have joined the past of a request, which others may adopt."""
        kv = self._kv
        if kv is not None and kv.slots_of(number):
            if kv.grow(number, kv.tokens_of(number) + len(token_ids)) is None:
                kv.free(number)
            else:
                kv.extend(number, token_ids)

    def threads_changed(self, number: int) -> None:
        """Nothing to do: there is one thread."""

    def forget_prefixes(self) -> None:
        """Forget those of ended requests."""
        if self._kv is not None:
            self._kv.forget_kept()

    def proposed(self, number: int, answer: Sequence[int]) -> list[bool]:
        """For each token of the accepted ``answer``: was it among the children that this request was given? No, if none was."""
        return self._requests[number].proposed(answer) if number in self._requests else [False] * len(answer)


class _RecordedRequest:
    """One request. ``token_ids``: what it begins with; ``load`` and ``max_children`` as in ``RecordedDrafter``."""

    def __init__(
        self,
        number: int,
        sequence: ThreadSequence,
        token_ids: Sequence[int],
        sampling: SamplingParams,
        memo: DraftMemo,
        load: Callable[[], Drafter],
        max_children: int,
    ) -> None:
        self._number, self._sequence, self._sampling = number, sequence, sampling
        self._memo, self._load, self._max_children = memo, load, max_children
        self._draft: Drafter | None = None  # once this request needs it
        self._begun_with = token_ids
        self._accepted: list[int] = []  # tokens after those and before the root
        self._past = PROMPT  # their context
        for token in token_ids[sequence.prompt_length :]:
            self._past = memo.continued(self._past, token)
        self._contexts: list[int | None] = []  # of each row; None until needed
        self._drafted: set[int] = set()  # rows in the draft model's cache
        self._requested: dict[int, int] = {}  # number of children by context

    def expand(self, requested: DraftRows) -> Candidates:
        tree, children = requested.tree, requested.children
        self._contexts += [None] * (tree.num_rows - len(self._contexts))
        contexts = [self._context(tree, row) for row in requested.rows]
        unknown = [row for row, context in zip(requested.rows, contexts, strict=True) if not self._memo.knows(context, children)]
        if unknown and not self._draft_rows(tree, unknown):
            rows = torch.tensor(requested.rows)
            return Candidates(rows, rows.new_zeros(len(rows), 0), torch.zeros(len(rows), 0))
        self._requested.update(dict.fromkeys(contexts, children))
        return Candidates(torch.tensor(requested.rows), *self._memo.children(contexts, children))

    def advance(self, thread: int, changes: RowChanges) -> None:
        for token in changes.committed_ids:
            self._past = self._memo.continued(self._past, token)
        self._accepted += changes.committed_ids
        self._contexts = [self._contexts[row] for row in changes.kept if row < len(self._contexts)]
        self._drafted = {number for number, row in enumerate(changes.kept) if row in self._drafted}
        if self._draft is not None:
            self._draft.follow_tree(self._number, thread, changes)

    def close(self) -> None:
        if self._draft is not None:
            self._draft.close_lane(self._number)

    def proposed(self, answer: Sequence[int]) -> list[bool]:
        is_proposed = [False]
        context = PROMPT
        for before, token in pairwise(answer):
            context = self._memo.continued(context, before)
            children = self._requested.get(context)
            is_proposed.append(children is not None and token in self._memo.children([context], children)[0].flatten().tolist())
        return is_proposed

    def _context(self, tree: DraftTree, row: int) -> int:
        """The context of ``row``; also finds those of its ancestors."""
        new: list[int] = []
        before = self._past
        for above in tree.ancestors_of(row):
            if (known := self._contexts[above]) is not None:
                before = known
                break
            new.append(above)
        for above, token in zip(new[::-1], tree.tokens_of(new[::-1]), strict=True):
            before = self._contexts[above] = self._memo.continued(before, token)
        return before

    def _draft_rows(self, tree: DraftTree, rows: Sequence[int]) -> bool:
        """One forward over ``rows`` and their ancestors that are not in the draft model's cache. False if it has no memory."""
        missing = sorted({above for row in rows for above in tree.ancestors_of(row)} - self._drafted)
        (candidates,) = self._prefilled().expand([DraftRows(self._number, 0, tree, missing, self._max_children)], {})
        if not candidates.token_ids.numel():
            return False
        self._drafted |= set(missing)
        self._memo.add([self._context(tree, row) for row in missing], candidates, self._max_children)
        return True

    def _prefilled(self) -> Drafter:
        """The draft model, with what the request began with and the accepted tokens in its cache."""
        if self._draft is None:
            self._draft = self._load()
            cached = self._draft.open_lane(self._number, self._sequence, self._begun_with, self._sampling)
            if cached < len(self._begun_with):
                self._draft.expand([], {self._number: self._begun_with[cached:]})
            rows = list(range(len(self._accepted)))
            self._draft.follow_tree(self._number, 0, RowChanges(rows, self._accepted, [], len(rows)))
        return self._draft
