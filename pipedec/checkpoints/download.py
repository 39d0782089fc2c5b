"""Downloads of models that are named on the Hugging Face Hub: what describes them, and the parts that a host reads."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from pipedec.checkpoints.parts import CheckpointPart, described_by
from pipedec.config.settings import Models
from pipedec.core.errors import PipedecError, UserError
from pipedec.families import QUANTIZATION_FILES
from pipedec.hub import HubName, Repository, Show, download

if TYPE_CHECKING:
    from rich.console import Console

_SIZES = ("config.json", "generation_config.json", *QUANTIZATION_FILES)


def pinned(models: Models, sizes_only: bool = False, show: Show | None = None) -> dict[str, str]:
    """The models that are named on the hub, by key (``target``, ``draft``, ``bita``), each with its commit, and with its GGUF
    file if it has one. What describes them is downloaded, or, with ``sizes_only``, no more than a plan reads. ``show`` as of
    ``fetch``, for GGUF files, which describe themselves.

    Raises UserError if there is no such model or revision, or it is not here and the hub must not be asked, or for the sizes of a
    GGUF file that is not here; PipedecError if the hub does not answer.
    """
    found = {}
    for key in ("target", "draft", "bita"):
        if (model := getattr(models, key)) is not None and (name := HubName.of(model)) is not None:
            found[key] = str(_pinned(name, sizes_only, show))
    return found


def downloaded(model: Path) -> Path:
    """The pinned name of a model on the hub, once all of it is here; anything else as it is. Raises as ``pinned``, ``fetch``."""
    found = pinned(Models(target=str(model)))
    if not found:
        return model
    fetch([CheckpointPart("target", found["target"], is_whole=True)])
    return Path(found["target"])


def fetch(parts: Iterable[CheckpointPart], show: Show | None = None) -> None:
    """Download the files of these parts that are not here, of the models on the hub, whose names are ``pinned``.

    The bytes that are here and in all are shown on standard error; ``show`` receives them, too. Raises UserError as ``pinned``,
    if the disk is too small, or if a file is not what the hub lists; PipedecError if the hub does not send it.
    """
    wanted = []
    for part in parts:
        if (name := HubName.of(part.model)) is None or not (lacking := part.missing()):
            continue
        if (repository := Repository.find(name)) is None:
            raise PipedecError(f"{name}: {lacking[0].name} is not here, and the hub does not answer or must not be asked")
        wanted.append((repository, [str(file.relative_to(name.directory)) for file in lacking]))
    _download_shown(wanted, show)


def _download_shown(wanted: Sequence[tuple[Repository, Collection[str]]], show: Show | None = None) -> None:
    if not any(repository.transfers(files) for repository, files in wanted):
        return
    with _bar(", ".join(dict.fromkeys(repository.name.repo for repository, _ in wanted)), show) as bar:
        download(wanted, bar)


def _pinned(name: HubName, sizes_only: bool, show: Show | None) -> HubName:
    if (repository := Repository.find(name)) is None:
        return name.resolved_here()
    files = described_by(repository.files)
    if (file := repository.name.file) is not None:
        if sizes_only and not repository.name.path.exists():
            raise UserError(f"{name}: only the file itself knows its sizes: plan the model that it was made from, or download it")
        _download_shown([(repository, [file])], show)
        files = []
    elif "config.json" not in repository.files:
        raise UserError(f"{name}: {name.repo} has neither a config.json nor a GGUF file: give a language model's repository")
    elif sizes_only:
        files = [file for file in files if file in _SIZES]
    download([(repository, files)])
    repository.name.remember(name.revision)
    return repository.name


@contextmanager
def _bar(title: str, show_also: Show | None) -> Iterator[Show]:
    """A bar over a download that takes long; without a terminal, a line at its beginning and one at its end."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    console = Console(stderr=True, highlight=False)
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(f"Downloading {title}", total=None, visible=False)
        lines = _lines(console, title) if not console.is_terminal else lambda done, total: None

        def show(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total, visible=True)
            lines(done, total)
            if show_also is not None:
                show_also(done, total)

        yield show


def _lines(console: Console, title: str) -> Callable[[int, int], None]:
    from rich.filesize import decimal

    begun = False

    def show(done: int, total: int) -> None:
        nonlocal begun
        if not begun:
            begun = True
            console.print(f"Downloading {decimal(total - done)} of {title}", soft_wrap=True)
        elif done == total:
            console.print(f"Downloaded {title}", soft_wrap=True)

    return show
