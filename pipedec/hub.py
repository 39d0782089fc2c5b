"""Models by their names on the Hugging Face Hub, in the library's own cache: ``ORG/MODEL``, ``ORG/MODEL:FILE@REVISION``.

The environment variables of huggingface_hub hold. The library begins a file anew if its process was killed, and compares sizes
alone. So files are written here, by its calls, where the next call goes on; only when their digests are right do they appear in
the cache.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import shutil
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING

from pipedec.core.errors import PipedecError, UserError
from pipedec.core.values import shortened

if TYPE_CHECKING:
    from huggingface_hub.hf_api import RepoSibling

Show = Callable[[int, int], None]  # bytes that are here, bytes in all

_NAME = re.compile(r"(?P<repo>[\w-][\w.-]*/[\w-][\w.-]*)(?::(?P<file>[^@:]+))?(?:@(?P<revision>[^@:]+))?")
_COMMIT = re.compile("[0-9a-f]{40}")
_DIGEST = re.compile("[0-9a-f]{40}(?:[0-9a-f]{24})?")  # git's of a blob, or SHA-256
_PART = re.compile(r"-\d{5}-of-\d{5}\.gguf$")
_USUAL_FILE = "Q4_K_M"  # of a repository with several GGUF files, as llama.cpp chooses
_AT_ONCE = 8  # files
_SHOW_SECONDS = 0.5
_HUB_SECONDS = 10.0
_RETRIES = 5  # without a byte in between
_RETRY_SECONDS = 1.0
_SHOWN = 8  # names that an error lists


@dataclass(frozen=True)
class HubName:
    """A repository, of which one GGUF file may be meant, by its name or its quantisation; and a branch, tag or commit."""

    repo: str
    file: str | None = None
    revision: str = "main"

    @classmethod
    def of(cls, model: str | Path) -> HubName | None:
        """The name that this is; None for a path that exists, and for anything else that has not the form of a name."""
        match = _NAME.fullmatch(str(model))
        if match is None or os.path.exists(str(model)):
            return None
        return cls(match["repo"], match["file"], match["revision"] or cls.revision)

    def __str__(self) -> str:
        file = "" if self.file is None else f":{self.file}"
        return f"{self.repo}{file}" + ("" if self.revision == HubName.revision else f"@{self.revision}")

    @property
    def folder(self) -> Path:
        """The repository's in the cache, whether or not it is there."""
        from huggingface_hub import constants
        from huggingface_hub.file_download import repo_folder_name

        return Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=self.repo, repo_type="model"))

    @property
    def commit(self) -> str | None:
        """The commit of the revision, if that is one or the cache knows it."""
        if _COMMIT.fullmatch(self.revision):
            return self.revision
        known = self.folder / "refs" / self.revision
        return (known.read_text().strip() if known.is_file() else "") or None

    def remember(self, revision: str) -> None:
        """Let the cache know that this is the commit of a branch or tag, as huggingface_hub does."""
        if self.revision != revision:
            known = self.folder / "refs" / revision
            with suppress(OSError):  # a cache that cannot be written to has the model already
                known.parent.mkdir(parents=True, exist_ok=True)
                partial = known.with_name(f"{known.name}.{os.getpid()}")
                partial.write_text(self.revision)
                partial.replace(known)

    @property
    def directory(self) -> Path:
        """The directory in the cache for the model's files. Raises UserError if the commit is not known here."""
        if (commit := self.commit) is None:
            raise UserError(f"{self} is not on this host yet: start it where the hub can be reached, or copy {self.folder} here")
        return self.folder / "snapshots" / commit

    def resolved_here(self) -> HubName:
        """With the commit as its revision, and a GGUF file by its whole name, as far as the cache knows them. Raises UserError as
        ``directory`` and ``gguf_file``.
        """
        directory, file = self.directory, self.file
        if not (file or "").endswith(".gguf") and (file is not None or not (directory / "config.json").is_file()):
            file = gguf_file(self, [str(one.relative_to(directory)) for one in directory.rglob("*") if one.is_file()])
        return replace(self, file=file, revision=directory.name)

    @property
    def path(self) -> Path:
        """The checkpoint in the cache: its directory, or the GGUF file. Raises UserError as ``resolved_here``."""
        file = self.resolved_here().file
        return self.directory if file is None else self.directory / file


def gguf_file(name: HubName, files: Collection[str]) -> str | None:
    """The GGUF file that a name means, among the ``files`` of its repository; None if it means a checkpoint of safetensors.

    Raises UserError if there is no such file, or several, or it is one of several parts.
    """
    found = sorted(file for file in files if file.lower().endswith(".gguf") and "mmproj" not in file.lower())
    if name.file is None and (not found or any(file.endswith(".safetensors") for file in files)):
        return None
    wanted = name.file or (found[0] if len(found) == 1 else _USUAL_FILE)
    by_part = re.compile(rf"(^|[-._/]){re.escape(wanted)}([-._/]|$)", re.IGNORECASE)
    alike = [file for file in found if file == wanted] or [file for file in found if by_part.search(file[: -len(".gguf")])]
    if alike and all(_PART.search(file) for file in alike):
        raise UserError(f"{name}: {alike[0]} is one of several parts: join them (llama-gguf-split --merge), and give the file")
    if len(alike) == 1:
        return alike[0]
    offered = ", ".join((alike or found)[:_SHOWN]) or "none"
    raise UserError(f"{name}: {len(alike) or 'no'} GGUF files are called {wanted}: give {name.repo}:FILE, of {offered}")


@dataclass(frozen=True)
class Repository:
    """A repository at a commit, as the hub lists it.

    Attributes:
        name: with the commit as its revision, and a GGUF file by its whole name.
        files: by their paths in the repository.
    """

    name: HubName
    files: Mapping[str, RepoSibling]

    @classmethod
    def find(cls, name: HubName) -> Repository | None:
        """Ask the hub. None if it must not be asked, refuses or does not answer, and something of the model is here. Raises
        UserError if there is no such repository, revision or file, or access to it; PipedecError if there is no answer.
        """
        import httpx2
        from huggingface_hub import HfApi
        from huggingface_hub.errors import (
            HfHubHTTPError,
            HFValidationError,
            OfflineModeIsEnabled,
            RevisionNotFoundError,
        )

        try:
            found = HfApi().model_info(name.repo, revision=name.revision, files_metadata=True, timeout=_HUB_SECONDS)
        except HFValidationError as error:
            raise UserError(f"{name}: {shortened(str(error))}") from None
        except (HfHubHTTPError, httpx2.HTTPError, OfflineModeIsEnabled, ValueError, KeyError) as error:
            is_here = name.commit is not None and name.directory.is_dir()
            if is_here and not isinstance(error, RevisionNotFoundError):
                return None
            raise _explained(name, error) from None
        files = {one.rfilename: one for one in found.siblings or ()}
        named = replace(name, file=gguf_file(name, files), revision=found.sha or name.revision)
        return cls(named, files)

    def transfers(self, files: Collection[str]) -> list[_Transfer]:
        """Those of the files that are not here yet. Raises UserError if the repository lacks one."""
        if lacking := [file for file in files if file not in self.files]:
            raise UserError(f"{self.name}: {self.name.repo} has no {lacking[0]}: give a model with whole weights in safetensors")
        if unsafe := [file for file in files if file.startswith("/") or ".." in file.split("/")]:
            raise UserError(f"{self.name}: the hub lists a file {shortened(unsafe[0])}, which would be outside of the model")
        return [_Transfer(self.name, self.files[file]) for file in files if not (self.name.directory / file).exists()]


def download(wanted: Iterable[tuple[Repository, Collection[str]]], show: Show = lambda done, total: None) -> None:
    """Download those files of each repository that are not here yet, several at once; what was begun goes on where it stopped.

    ``show`` is called twice a second, if this takes so long. Raises UserError if the disk is too small, or a file is not what the
    hub lists; PipedecError if the hub does not send it.
    """
    # By file: draft and target may be one model.
    found = {(one.name, one.file): one for repository, files in wanted for one in repository.transfers(files)}
    transfers = list(found.values())
    if not transfers:
        return
    _check_room(transfers)
    total, stop = sum(one.size for one in transfers), threading.Event()
    show(sum(one.done for one in transfers), total)
    with ThreadPoolExecutor(_AT_ONCE, "download") as threads:
        running = {threads.submit(one.run, stop): one for one in transfers}
        try:
            while True:
                ended, pending = wait(running, _SHOW_SECONDS, FIRST_EXCEPTION)
                if not pending or any(one.exception() for one in ended):
                    break
                show(sum(one.done for one in transfers), total)
        finally:
            stop.set()
            threads.shutdown(cancel_futures=True)
    for one, transfer in running.items():
        error = None if one.cancelled() else one.exception()
        if error is not None and not isinstance(error, _Stopped):
            raise _explained(transfer.name, error) from None
    show(total, total)


def _check_room(transfers: Sequence[_Transfer]) -> None:
    """Raises UserError if the disk has too little room for them. All of them go to one disk."""
    name, needed = transfers[0].name, sum(one.size - one.done for one in transfers)
    try:
        name.folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(name.folder).free
    except OSError as error:
        raise UserError(f"{name.folder}: {error.strerror}: set HF_HOME to a directory of your own") from None
    if needed > free:
        raise _no_room(name, f"needs {needed / 1e9:.1f} GB more, but {free / 1e9:.1f} GB are free")


class _Stopped(Exception):
    """Another file has failed, or the program is to end."""


class _Transfer:
    """One file on its way from the hub into the cache; ``done`` of its ``size`` bytes are here."""

    def __init__(self, name: HubName, file: RepoSibling) -> None:
        self.name, self.file = name, file.rfilename
        digest = file.blob_id or "" if file.lfs is None else file.lfs.sha256
        self._digest = digest if _DIGEST.fullmatch(digest) and file.size is not None else None  # a mirror may list none
        self.size = file.size or 0
        self._blob = name.folder / "blobs" / digest
        self._partial = self._blob.with_name(f"{self._blob.name}.pipedec-incomplete")
        self.done = 0
        if self._digest is not None:
            here = next((one for one in (self._blob, self._partial) if one.exists()), None)
            self.done = 0 if here is None else here.stat().st_size

    def run(self, stop: threading.Event) -> None:
        """Raises UserError if the file is not what the hub lists, ``_Stopped`` after ``stop``, and what the library raises.

        Files above 50 GB come by the library's other protocol alone, which compares parts and begins them anew.
        """
        from huggingface_hub import constants, hf_hub_download

        if self._digest is not None and self.size <= constants.MAX_HTTP_DOWNLOAD_SIZE and not self._blob.exists():
            self._blob.parent.mkdir(parents=True, exist_ok=True)
            # Not to append: where locks have no effect, as on some file systems of clusters, two processes write the same bytes.
            with os.fdopen(os.open(self._partial, os.O_RDWR | os.O_CREAT, 0o666), "r+b", buffering=0) as opened:
                while not self._has_lock(opened.fileno()):  # another process downloads it
                    if stop.wait(_SHOW_SECONDS):
                        raise _Stopped
                if self._blob.exists():
                    self._partial.unlink(missing_ok=True)
                else:
                    self._receive(opened, stop)
        hf_hub_download(self.name.repo, self.file, revision=self.name.revision)  # puts it into the snapshot

    def _has_lock(self, descriptor: int) -> bool:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:  # the file system has no locks
            return True
        return True

    def _receive(self, opened: IO[bytes], stop: threading.Event) -> None:
        import httpx2
        from huggingface_hub.errors import HfHubHTTPError

        self.done = opened.seek(0, os.SEEK_END)
        if self.done > self.size:  # of another life
            self.done = opened.seek(opened.truncate(0))
        failures = 0
        while self.done < self.size:
            before = self.done
            try:
                self._receive_rest(opened, stop)
                if self.done <= before:
                    raise httpx2.RemoteProtocolError("no more bytes came")
            except (httpx2.TransportError, HfHubHTTPError) as error:
                failures = 1 if self.done > before else failures + 1
                if failures > _RETRIES or _is_refused(error):
                    raise
                if stop.wait(failures * _RETRY_SECONDS):
                    raise _Stopped from None
        if self._blob.exists():
            return
        if _digest(self._partial, len(self._blob.name)) != self._digest:
            opened.truncate(0)
            raise UserError(
                f"{self.name}: {self.file} does not have the digest that the hub lists, and was removed: start again, and if "
                "that repeats itself, see what is between this host and the hub (HF_ENDPOINT, a proxy)"
            )
        self._partial.rename(self._blob)

    def _receive_rest(self, opened: IO[bytes], stop: threading.Event) -> None:
        """Append what is not here, as it comes, so that the next call goes on from there however this one ends."""
        import httpx2
        from huggingface_hub import constants, hf_hub_url
        from huggingface_hub.utils._headers import build_hf_headers
        from huggingface_hub.utils._http import get_session, hf_raise_for_status

        url = hf_hub_url(self.name.repo, self.file, revision=self.name.revision)
        headers = build_hf_headers() | {"Accept-Encoding": "identity", "Range": f"bytes={self.done}-"}
        timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
        with get_session().stream("GET", url, headers=headers, timeout=timeout, follow_redirects=True) as response:
            hf_raise_for_status(response)
            if response.status_code == 200:  # from the beginning, though not asked for
                if int(response.headers.get("Content-Length", self.size)) != self.size:
                    raise httpx2.RemoteProtocolError("something else came, perhaps of a proxy")
                self.done = opened.seek(opened.truncate(0))
            for received in response.iter_raw():
                if opened.write(received) != len(received):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                self.done += len(received)
                if stop.is_set():
                    raise _Stopped


def _digest(file: Path, num_digits: int) -> str:
    """The digest of a file, so many hexadecimal digits: SHA-256, or git's of a blob."""
    total = hashlib.sha256() if num_digits == 64 else hashlib.sha1(b"blob %d\0" % file.stat().st_size, usedforsecurity=False)
    with file.open("rb") as opened:
        while block := opened.read(1 << 20):
            total.update(block)
    return total.hexdigest()


def _is_refused(error: Exception) -> bool:
    """Whether a hub that answers has refused the request, for good."""
    from huggingface_hub.errors import HfHubHTTPError

    return isinstance(error, HfHubHTTPError) and error.response.status_code < 500 and error.response.status_code not in (408, 429)


def _explained(name: HubName, error: BaseException) -> PipedecError:
    """An error of one line for one of the library."""
    from huggingface_hub import constants, errors

    address = re.sub(r"//[^/]*@", "//", constants.ENDPOINT)  # it may hold a password
    site = address.split("://")[-1]
    match error:
        case PipedecError():
            return error
        case errors.GatedRepoError():
            return UserError(
                f"{name}: its authors ask you to accept their terms: do that on {address}/{name.repo}, then "
                "`hf auth login`, or set HF_TOKEN"
            )
        case errors.RevisionNotFoundError():
            return UserError(f"{name}: {name.repo} has no revision {name.revision}: give a branch, a tag or a commit")
        case errors.RepositoryNotFoundError():
            return UserError(f"{name}: neither a path here nor a model on {site}: correct it, or set HF_TOKEN if it is private")
        case errors.HfHubHTTPError() if error.response.status_code in (401, 403):
            reason = shortened(error.server_message or f"HTTP status {error.response.status_code}")
            return UserError(
                f"{name}: {site} refuses access ({reason}): correct HF_TOKEN, or set HF_HUB_OFFLINE to use what is here"
            )
        case errors.OfflineModeIsEnabled():
            return UserError(f"{name} is not on this host, and HF_HUB_OFFLINE is set: unset it, or copy {name.folder} here")
        case OSError(errno=errno.ENOSPC):
            return _no_room(name, "the disk is full")
        case OSError(strerror=str(reason)) if not isinstance(error, errors.HfHubHTTPError):
            return UserError(f"{error.filename or name.folder}: {reason}: set HF_HOME to a directory of your own")
    status = f"HTTP status {error.response.status_code}" if isinstance(error, errors.HfHubHTTPError) else shortened(str(error))
    reason = status or type(error).__name__
    return PipedecError(f"{name}: no download from {site} ({reason}): start again to go on where it stopped")


def _no_room(name: HubName, reason: str) -> UserError:
    return UserError(f"{name}: {reason} in {name.folder.parent}: make room, or set HF_HOME to a directory on a larger disk")
