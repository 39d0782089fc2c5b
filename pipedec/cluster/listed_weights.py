"""The digests of all tensors that the launching machine has of a run's checkpoints, with which those of every host are compared.

They are computed in a thread while the hosts start. Loads no torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from pathlib import Path

from pipedec.checkpoints import (
    COPY_AGAIN,
    CheckpointPart,
    TensorDigests,
    check_trained_for,
    first_difference,
    has_weights,
    part_digests,
)
from pipedec.core import PipedecError, UserError
from pipedec.directories import cache_directory
from pipedec.gguf import located, model_files

LIST_SECONDS = 3600.0
_TURN_SECONDS = 1.0


class ListedWeights:
    """The files of the checkpoints ``models`` on this machine, perhaps none.

    Args:
        models: directories or GGUF files by key.
    """

    def __init__(self, models: Mapping[str, str]) -> None:
        self._models = {key: model for key, model in models.items() if _is_here(model)}
        self._is_over = False
        self._told = (0, 1)
        self._thread = ThreadPoolExecutor(1, "weights")
        self._future: Future[TensorDigests] = self._thread.submit(self._digests)

    def wait(self, turn: Callable[[int, int], None]) -> TensorDigests:
        """The digests by model and name.

        Args:
            turn: called about once a second until they are there, with (tensors digested, tensors in all).

        Raises:
            UserError: a file is damaged or cannot be read, or the BiTA is that of another target.
            PipedecError: it takes too long.
        """
        deadline = time.monotonic() + LIST_SECONDS
        while True:
            try:
                return self._future.result(_TURN_SECONDS)
            except NotYet:
                if time.monotonic() > deadline:
                    places = ", ".join(self._models.values())
                    message = f"this machine has not digested {places} within {LIST_SECONDS:.0f} s"
                    raise PipedecError(f"{message}: launch from one with a faster disk, or with none of it") from None
                turn(*self._told)

    def close(self) -> None:
        """Give up what has not been digested."""
        self._is_over = True
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _digests(self) -> TensorDigests:
        if {"target", "bita"} <= self._models.keys():
            check_trained_for(Path(self._models["bita"]), Path(self._models["target"]))  # the hosts cannot tell from their parts
        parts = [CheckpointPart(key, model) for key, model in self._models.items()]
        return part_digests(parts, cache_directory(), self._progress, whatever_is_here=True)

    def _progress(self, done: int, total: int) -> None:
        self._told = done, total
        if self._is_over:
            raise CancelledError


def proved_one(told: Iterable[tuple[str, TensorDigests]], listed: TensorDigests) -> dict[str, dict[str, str]]:
    """All digests that are known, by model and name.

    Args:
        told: hosts, and the digests that their ranks have reported.
        listed: what this machine has.

    Raises:
        UserError: a host has another tensor than this machine.
    """
    known = {model: dict(tensors) for model, tensors in listed.items()}
    for host, digests in told:
        if difference := first_difference(digests, listed):
            model, tensor = difference
            raise UserError(f"{host} has other weights of the {model} than this machine ({tensor}): {COPY_AGAIN}")
        for model, tensors in digests.items():
            known.setdefault(model, {}).update(tensors)
    return known


def _is_here(model: str) -> bool:
    try:
        return located(model).exists() and has_weights(model_files(model))
    except UserError:
        return False
