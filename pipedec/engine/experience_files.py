"""The files of rank 0's experience: it begins with them, and writes them for the next process.

Chances of acceptance come from earlier runs of the same models, else from the training of the draft (``acceptance.json`` beside
its weights), else they are the built-in ones. Costs come from earlier runs of the same plan on the same device. An emulated
pipeline begins with the draft's file alone and keeps nothing, so that a benchmark does not depend on what ran here before.

A file only makes answers faster at first, so one that cannot be read or written, or is of another version, is ignored. Of several
clusters that write a file, the last one wins.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch

from pipedec.checkpoints import config_digest, fingerprint
from pipedec.config.environment import processor_name, usable_cpus
from pipedec.core.errors import UserError
from pipedec.core.request import DEFAULT_METHOD
from pipedec.decoding import Experience
from pipedec.decoding.learned import NOTHING_LEARNED, LearnedAcceptance, LearnedCosts
from pipedec.directories import cache_directory
from pipedec.engine.build import weights_on
from pipedec.plan.spec import PipelineSpec

SHIPPED_FILE = "acceptance.json"  # beside the weights of a draft
KEEP_SECONDS = 60.0  # at most between two writings of what a running process has learned
MAX_FILES = 128  # of earlier runs; the least recently used ones are deleted
_MAX_BYTES = 1 << 20
_Learned = TypeVar("_Learned", LearnedAcceptance, LearnedCosts)
logger = logging.getLogger(__name__)


def shipped_acceptance(draft: Path | None) -> LearnedAcceptance:
    """The file beside a draft, from its training; ``NOTHING_LEARNED`` without one."""
    found = None if draft is None else _read(draft / SHIPPED_FILE, LearnedAcceptance)
    return found or NOTHING_LEARNED


def initial_experience(spec: PipelineSpec, device: torch.device) -> Experience:
    """The experience with which a pipeline on this machine begins; it is not kept."""
    return KeptExperience(spec, device).experience


class KeptExperience:
    """The experience of one pipeline, and its files. ``experience`` is empty if the settings want no priors.

    Args:
        device: rank 0's.
        digests: of the weights by model, where ranks have compared them; else they are recognized by a part of their weights.
    """

    def __init__(self, spec: PipelineSpec, device: torch.device, digests: Mapping[str, str] = {}) -> None:
        self._acceptance_file: Path | None = None
        self._costs_file: Path | None = None
        acceptance, costs = NOTHING_LEARNED, None
        if spec.settings.speculation.priors:
            acceptance = shipped_acceptance(spec.draft)
            if spec.emulation is None:
                self._acceptance_file, self._costs_file = _files(spec, device, digests)
                acceptance = _read(self._acceptance_file, LearnedAcceptance) or acceptance
                costs = _read(self._costs_file, LearnedCosts)
                for file in (self._acceptance_file, self._costs_file):
                    with suppress(OSError):
                        os.utime(file)  # it counts as used
        self.experience = Experience(spec.settings.passage, acceptance, costs, spec.expected_ms)
        self._kept = time.monotonic()

    def keep(self, at_once: bool = False) -> None:
        """Write what was learned, unless that was done less than a minute ago."""
        if self._acceptance_file is None or self._costs_file is None:
            return
        if not at_once and time.monotonic() < self._kept + KEEP_SECONDS:
            return
        self._kept = time.monotonic()
        try:
            write_learned(self._acceptance_file, self.experience.acceptance)
            write_learned(self._costs_file, self.experience.controller.costs)
            with suppress(FileNotFoundError):  # another process drops some, too
                _drop_oldest(self._costs_file.parent)
        except OSError as error:
            logger.warning("cannot keep what was learned in %s: %s", self._costs_file.parent, error.strerror)
            self._acceptance_file = self._costs_file = None  # one warning is enough


def write_learned(path: Path, learned: LearnedAcceptance | LearnedCosts, mode: int = 0o600) -> None:
    """Replace a file as a whole; by default other users cannot read it. Raises OSError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    try:
        with open(descriptor, "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(learned), indent=1) + b"\n")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _read(path: Path, kind: type[_Learned]) -> _Learned | None:
    """The contents of a file; None if there is none, or it is not as expected."""
    try:
        with path.open("rb") as file:
            return msgspec.json.decode(file.read(_MAX_BYTES), type=kind)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, msgspec.DecodeError, RecursionError) as error:
        logger.warning("ignores what was learned before: %s: %s", path, error)
        return None


def _drop_oldest(directory: Path) -> None:
    newest_first = sorted(directory.glob("*.json"), key=lambda path: path.stat().st_mtime, reverse=True)
    for old in newest_first[MAX_FILES:]:
        old.unlink(missing_ok=True)


def _files(spec: PipelineSpec, device: torch.device, digests: Mapping[str, str]) -> tuple[Path, Path]:
    """The files of acceptance, by models and number formats, and of costs, by device and plan."""
    cluster, cut = spec.settings.cluster, spec.settings.cut
    models = {name: digests.get(name) or _identity(path) for name, path in spec.models.items() if path and name != "bita"}
    formats = str(spec.weights), str(weights_on(spec, 0, device)[0])
    is_gpu = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if is_gpu else f"{processor_name()} × {usable_cpus()}"
    others = [str(place.device) for place in spec.places or ()] or spec.num_gpus
    plan = [spec.layers, cut.num_groups, cut.device, cluster.transport, cluster.dispatch, spec.duplex, torch.get_num_threads()]
    directory = cache_directory() / "learned"
    acceptance, costs = [DEFAULT_METHOD, models, formats], [models, formats, name, others, plan]
    return directory / f"acceptance-{_digest(acceptance)}.json", directory / f"costs-{_digest(costs)}.json"


def _identity(model: Path) -> str:
    """Names the weights of a model; its configuration if rank 0's host does not have all of them."""
    try:
        return fingerprint(model)
    except UserError:
        return config_digest(model)


def _digest(described: Any) -> str:
    return hashlib.sha256(json.dumps(described).encode()).hexdigest()[:32]
