"""Verification on the last stage: the target's token after each row, how far every decode thread accepts them, and the tokens
that mask rows predict (BiTA) for the positions after the last accepted one.

``TokenChooser`` knows logits, trees, and what sampling parameters, threads and structured outputs allow. ``Verifier`` knows
trees and the chosen tokens, ``Forecasts`` logits and trees. None knows a model or a cache. Shapes: R rows, N rows of the forest,
M masks, K tokens per mask, V vocabulary.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

import torch
from torch import Tensor

from pipedec.core.sampling import SamplingParams
from pipedec.core.verdict import MAX_SURPRISAL, SURPRISAL_UNIT
from pipedec.device import to_device
from pipedec.grammar.masks import mask_logits
from pipedec.sampling import Sampler, TokenPredictor, greedy
from pipedec.threads import Sequence, State
from pipedec.tree import Forest, ThreadChanges

Path = tuple[int, list[int]]  # thread, and its tokens that are not accepted yet
Forecast = tuple[tuple[int, ...], ...]  # see ``Accepted.forecast``
Prediction = tuple[tuple[int, ...], tuple[int, ...]]  # what a mask predicts: tokens, best first, and their surprisals


class TokenChooser:
    """Chooses tokens by the sampling parameters, for the forest of ``sequence``. Every thread has its own sampler and noise.
    Raises UserError if ``logit_bias`` names a token that is not in the vocabulary.
    """

    def __init__(self, sequence: Sequence, sampling: SamplingParams, vocab_size: int, device: torch.device | str) -> None:
        self._sequence, self._sampling, self._vocab_size, self._device = sequence, sampling, vocab_size, device
        self._banned: dict[frozenset[int], Tensor] = {}  # the sets so far, int64 [any number]
        self._prompt: list[Tensor] = []  # in chunks
        self._samplers: dict[int, Sampler] = {}  # by thread; empty if decoding is greedy
        if not sampling.is_plainly_greedy:
            self._start(0)
        self._predictor = TokenPredictor.of(sampling, vocab_size, device)  # chooses the tokens that masks predict

    def add_prompt(self, token_ids: Tensor) -> None:
        """Add a chunk of the prompt: int64 [any number]."""
        if self._sampling.has_penalties:
            self._prompt.append(token_ids)
            self._samplers[0].add_prompt(token_ids)

    def first(self, logits_1V: Tensor) -> Tensor:
        """The token after the prompt and the answer's earlier tokens, int64 [1], from the logits of the last of these."""
        if not self._sequence.is_free:
            logits_1V = self._possible(logits_1V, [(0, [])])
        if not self._samplers:
            return greedy(logits_1V)
        position = torch.tensor([self._sequence.main.next_position])
        last_token = self._tensor(self._sequence.main.token_ids[-1:])  # not counted yet, like the root of a tree
        return self._samplers[0].choose(logits_1V, position, torch.ones_like(last_token, dtype=torch.bool)[None], last_token)

    def choose(self, logits_RV: Tensor, forest: Forest, rows: slice) -> Tensor:
        """The token after each of ``rows``, none of which is a mask: int64 [R]."""
        if not self._sequence.is_free:
            paths: list[Path] = [(0, [])] * len(logits_RV)
            for number, of_step, of_tree in forest.by_thread(rows):
                for index, row in zip(of_step.tolist(), of_tree.tolist(), strict=True):
                    paths[index] = number, forest.trees[number].path(row)
            logits_RV = self._possible(logits_RV, paths)
        if not self._samplers:
            return greedy(logits_RV)
        chosen = torch.zeros(len(logits_RV), dtype=torch.int64, device=self._device)
        for number, of_step, of_tree in forest.by_thread(rows):
            tree = forest.trees[number]
            positions, mask_RN = torch.tensor(tree.next_positions_of(of_tree.tolist())), tree.tree_mask[of_tree]
            token_ids = tree.token_ids.clamp(min=0)
            own, *on_device = (to_device(part, self._device) for part in (of_step, mask_RN, token_ids))
            chosen[own] = self._samplers[number].choose(logits_RV[own], positions, *on_device)
        return chosen

    def _possible(self, logits_RV: Tensor, paths: list[Path]) -> Tensor:
        """A copy of the logits in which those of tokens that may not follow a row's path are −inf."""
        grammar = self._sequence.grammar
        if grammar is not None:
            return mask_logits(logits_RV, [grammar.allowed(path) for _, path in paths])
        rows_by_ban: dict[frozenset[int], list[int]] = defaultdict(list)
        for row, (number, path) in enumerate(paths):
            rows_by_ban[self._sequence.banned(number, path)].append(row)
        logits_RV = logits_RV.clone()
        for banned, rows in rows_by_ban.items():
            tokens = self._banned_tokens(banned)
            if 0 < len(tokens) < self._vocab_size:  # as in ``mask_logits``, something remains
                of_rows = to_device(torch.tensor(rows), logits_RV.device)
                logits_RV[of_rows[:, None], tokens] = -torch.inf
        return logits_RV

    def _banned_tokens(self, banned: frozenset[int]) -> Tensor:
        if banned not in self._banned:
            self._banned[banned] = self._tensor([token for token in banned if token < self._vocab_size])
        return self._banned[banned]

    def predicted(self, logits_MV: Tensor, positions_M: Tensor, threads_M: Tensor | None = None) -> Tensor:
        """The predictions of mask rows as logits of the tokens that will be chosen, [M, V] (see ``TokenPredictor``).

        Args:
            positions_M: int64, position ids of the predicted tokens, on the host.
            threads_M: int64, the thread of each mask; None if all are in the main thread.
        """
        if self._predictor is None:
            return logits_MV
        if threads_M is None:
            return self._predictor.log_probs(logits_MV, positions_M.tolist(), self._sequence.main.noise_stream)
        predicted_MV = torch.zeros_like(logits_MV)
        for number in threads_M.unique().tolist():
            of_thread = (threads_M == number).nonzero()[:, 0]
            own, stream = to_device(of_thread, self._device), self._sequence.threads[number].noise_stream
            predicted_MV[own] = self._predictor.log_probs(logits_MV[own], positions_M[of_thread].tolist(), stream)
        return predicted_MV

    def replayed(self, changes: ThreadChanges) -> None:
        """Call this after the forest has replayed a verdict with these changes."""
        if not self._samplers:
            return
        if self._sampling.has_penalties:
            for number, tokens in changes.accepted.items():
                token_ids = self._sequence.threads[number].token_ids
                self._samplers[number].add_accepted(self._tensor(token_ids[-1 - len(tokens) : -1]))
        for start in changes.starts:
            self._start(start.thread)

    def _start(self, number: int) -> None:
        """Create a thread's sampler. For penalties, it counts all tokens visible to the thread except those in its tree."""
        thread = self._sequence.threads[number]
        sampler = self._samplers[number] = Sampler(self._sampling, self._vocab_size, self._device, thread.noise_stream)
        for chunk in self._prompt:
            sampler.add_prompt(chunk)
        seen = (*thread.context(), (number, max(thread.num_tokens - 1, 0)))
        visible = [token for other, count in seen for token in self._sequence.threads[other].token_ids[:count]]
        sampler.add_accepted(self._tensor(visible))

    def _tensor(self, token_ids: list[int]) -> Tensor:
        return to_device(torch.tensor(token_ids, dtype=torch.int64), self._device)


class Walk(NamedTuple):
    """Rows of one thread, each the child of the one before, and the target's tokens after them, which are accepted."""

    thread: int
    rows: list[int]  # numbers in the forest
    tokens: tuple[int, ...]


class Verifier:
    """Accepts the target's tokens in every decode thread as far as there are rows (PipeDec §3.3.4).

    Further rows may arrive between a verdict and its replay, so it has a sequence of its own with all accepted tokens, which is
    ahead of the forest's.
    """

    def __init__(self, sequence: Sequence) -> None:
        self.sequence = sequence
        self._ahead: dict[int, list[int]] = defaultdict(list)  # by thread: accepted tokens not replayed yet
        self._stopped: set[int] = set()  # threads whose last such token joins or ends: they continue after its replay

    def record_accepted(self, number: int, token: int) -> None:
        """Accept the next token of a thread."""
        if self.sequence.ends_walk(number, token):
            self._stopped.add(number)
        self.sequence.accept_token(number, token)
        self._ahead[number].append(token)

    def verify(self, forest: Forest, successors: list[int]) -> list[Walk]:
        """Walk the tree of every thread from its last accepted token, until one joins or ends the thread or has no row yet.

        ``successors``: the target's token after each row of the forest. Returns the walks of the threads that accept any token.
        """
        walks = []
        for number, tree in forest.trees.items():
            row = 0 if tree.num_rows and number not in self._stopped else None
            for token in self._ahead[number]:
                row = None if row is None else tree.child(row, token)
            thread = self.sequence.threads[number]
            if row is None or thread.state is not State.RUNNING:
                continue
            own, rows, tokens = forest.rows_of(number), list[int](), list[int]()
            while row is not None and thread.state is State.RUNNING:
                rows.append(own[row])
                tokens.append(successors[rows[-1]])
                self.record_accepted(number, tokens[-1])
                row = None if number in self._stopped else tree.child(row, tokens[-1])
            walks.append(Walk(number, rows, tuple(tokens)))
        return walks

    def replayed(self, changes: ThreadChanges) -> None:
        """Call this after the forest has replayed a verdict with these changes. Verdicts are replayed in order."""
        for number, tokens in changes.accepted.items():
            del self._ahead[number][: len(tokens)]
            if not self._ahead[number]:
                self._stopped.discard(number)


class Forecasts:
    """The predictions of the mask rows in the forest, ranked as ``chooser`` will choose.

    ``first`` and ``best`` compute them on the device of the logits: int64 [M, 2, K], tokens, best first, and their
    surprisals (see ``Accepted``). Their values, read from there, are passed back in one list.
    """

    def __init__(self, chooser: TokenChooser, tokens_per_mask: int) -> None:
        self._chooser = chooser
        self._tokens_per_mask = tokens_per_mask
        self._predictions: list[Prediction | None] = []  # by row [N]; None for rows that are no masks

    def first(self, logits_MV: Tensor, position: int) -> Tensor:
        """The predictions of the masks after the prompt, the first of which predicts the token at ``position``."""
        return self._best(logits_MV, torch.arange(position, position + len(logits_MV)))

    def best(self, logits_MV: Tensor, forest: Forest) -> Tensor:
        """The predictions of the masks, which are the newest rows of the forest."""
        masks = slice(forest.num_rows - len(logits_MV), forest.num_rows)
        threads = None if forest.threads is None else forest.threads[masks]
        return self._best(logits_MV, forest.positions_of(masks) + 1, threads)

    def add(self, num_tokens: int, best: list[int]) -> None:
        """Add the newest rows of the forest: ``num_tokens`` others, then masks with these predictions, one after the other."""
        self._predictions += [*[None] * num_tokens, *self._read(best)]

    def forecast(self, best: list[int]) -> tuple[Forecast, Forecast]:
        """The forecast of masks with these predictions, one after the other, and its surprisals."""
        return _columns(self._read(best))

    def _read(self, best: list[int]) -> list[Prediction]:
        size = self._tokens_per_mask
        lines = [tuple(best[first : first + size]) for first in range(0, len(best), size)]
        return list(zip(lines[::2], lines[1::2], strict=True))

    def keep(self, rows: list[int]) -> None:
        """Drop all rows except ``rows``."""
        self._predictions = [self._predictions[row] for row in rows]

    def after(self, forest: Forest, verified_rows: list[int]) -> tuple[Forecast, Forecast]:
        """The forecast, with its surprisals, of the masks below the last row that has any.

        If that row has ``num_later`` verified rows below it, its first ``num_later`` masks predict tokens that are accepted
        already, and are skipped.

        Args:
            verified_rows: rows of one thread whose successors were accepted, in order.
        """
        for num_later, row in enumerate(reversed(verified_rows)):
            masks: list[int] = []
            child = forest.child(row, -1)
            while child is not None:
                masks.append(child)
                child = forest.child(child, -1 - len(masks))
            if masks:
                return _columns([found for mask in masks[num_later:] if (found := self._predictions[mask])])
        return (), ()

    def _best(self, logits_MV: Tensor, positions_M: Tensor, threads_M: Tensor | None = None) -> Tensor:
        scores_MV = self._chooser.predicted(logits_MV, positions_M, threads_M)
        scores_MK, tokens_MK = scores_MV.topk(self._tokens_per_mask, dim=1)
        surprisals_MK = ((scores_MV.logsumexp(1, keepdim=True) - scores_MK) / SURPRISAL_UNIT).nan_to_num(MAX_SURPRISAL)
        return torch.stack((tokens_MK, surprisals_MK.clamp(0, MAX_SURPRISAL).round().long()), 1)


def _columns(predictions: list[Prediction]) -> tuple[Forecast, Forecast]:
    tokens, surprisals = zip(*predictions, strict=True) if predictions else ((), ())
    return tuple(tokens), tuple(surprisals)
