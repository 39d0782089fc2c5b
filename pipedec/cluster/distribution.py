"""Copies checkpoint files from this machine to the hosts of a cluster.yaml by rsync, over the ssh of ``pipedec launch``.

A file appears under its name when it is whole: rsync writes a temporary one, which the next call continues. Loads no torch.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pipedec.checkpoints import CheckpointPart
from pipedec.cluster.node_link import is_local, ssh_command, ssh_failure
from pipedec.config import ServerConfig
from pipedec.core.errors import UserError
from pipedec.gguf import is_gguf, is_named

PARTIAL = ".pipedec-partial"  # the directory for incomplete files, beside the whole ones
# Follows links, as in the cache of huggingface_hub; keeps times, by which the next call recognizes files that are there.
OPTIONS = (
    "--copy-links", "--times", "--mkpath", "--protect-args", f"--partial-dir={PARTIAL}", "--from0", "--files-from=-",
    "--info=progress2", "--out-format=%i %l",
)  # fmt: skip
_SENT = re.compile(r"[<>]f\S* (\d+)")  # a file and its size
_PROGRESS = re.compile(r"[\d.,]+\w?\s+\d+%")
_NO_ANSWER = ("(0 bytes received so far)", "safe_write failed")  # so that it was ssh, or the host's shell, that failed
_NO_RSYNC = "install rsync there, or copy by hand what `pipedec plan --files` lists"


@dataclass(frozen=True)
class Folder:
    """Files by their paths in the directory ``source`` on this machine, wanted in ``target`` on a host."""

    source: Path
    target: Path
    files: tuple[str, ...]


def folders(parts: Iterable[CheckpointPart], models: Mapping[str, str]) -> list[Folder]:
    """The files of these parts of checkpoints, whose paths on the hosts are ``models``, by key. Models that are installed with a
    package are left out. Raises UserError if a checkpoint is not here at all, or damaged.
    """
    found = []
    for part in parts:
        if not is_named(place := models[part.key]):
            source, target = Path(part.model), Path(place)
            if is_gguf(source):
                source, target = source.parent, target.parent
            files = (*part.describing_files(), *part.files())
            found.append(Folder(source, target, tuple(str(file.relative_to(source)) for file in files)))
    return found


def send(server: ServerConfig, folder: Folder, checksum: bool, show: Callable[[str], None] = lambda line: None) -> list[int]:
    """Copy what ``server`` lacks of ``folder``. Returns the sizes of the files that it lacked, in bytes.

    Args:
        checksum: whether to compare the content of all files; else those of equal size and time count as equal.
        show: receives lines about the progress of what takes long.

    Raises UserError if a file is not here, when the others have been copied, or if one cannot be copied.
    """
    here = [file for file in folder.files if (folder.source / file).is_file()]
    is_same = is_local(server) and folder.source.absolute() == folder.target
    sizes = [] if is_same or not here else _rsync(server, folder, here, checksum, show)
    if lost := [file for file in folder.files if file not in here]:
        place = folder.source / lost[0]
        raise UserError(f"{server.host} needs {place}, which this machine lacks: download it, or give --from DIR")
    return sizes


def _rsync(
    server: ServerConfig, folder: Folder, files: Sequence[str], checksum: bool, show: Callable[[str], None]
) -> list[int]:  # fmt: skip
    command = ["rsync", *OPTIONS, *(["--checksum"] if checksum else [])]
    target = f"{folder.target}/"
    if not is_local(server):  # ssh gets the destination itself: rsync does not know all forms, and calls the host "there"
        command += ["--rsh", shlex.join(["sh", "-c", f'shift; exec {shlex.join(ssh_command(server))} "$@"', "sh"])]
        target = f"there:{target}"
    sizes, complaints = [], []
    try:
        process = subprocess.Popen(
            [*command, f"{folder.source}/", target],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        )  # fmt: skip
    except OSError:
        raise UserError(f"this machine has no rsync: {_NO_RSYNC.replace('there', 'here and on all hosts')}") from None
    with process:
        assert process.stdin is not None and process.stdout is not None
        try:
            with suppress(BrokenPipeError):  # it has ended
                process.stdin.write("".join(f"{file}\0" for file in files))
                process.stdin.close()
            for line in process.stdout:
                if sent := _SENT.fullmatch(line.strip()):
                    sizes.append(int(sent[1]))
                elif _PROGRESS.match(line.strip()):
                    show(line.strip())
                elif line.strip():
                    complaints.append(line.strip())
            status = process.wait()
        finally:
            process.terminate()
    if status:
        raise UserError(_complaint(server, complaints))
    return sizes


def _complaint(server: ServerConfig, printed: Sequence[str]) -> str:
    """Why rsync has failed, and what to do, by the lines that it, ssh and the host's shell have printed."""
    own = [line.removeprefix("rsync: ") for line in printed if line.startswith("rsync")]
    other = next((line for line in printed if not line.startswith("rsync")), "")
    if "rsync" in other and "found" in other:  # "command not found", as every shell puts it in its way
        return f"{server.host} has no rsync: {_NO_RSYNC}"
    if any(sign in line for line in own for sign in _NO_ANSWER) and not is_local(server):
        reason, mend = ssh_failure(server, other)
        return f"{server.host}: {reason}: {mend}"
    return f"{server.host}: rsync: {own[0] if own else other}: mend that, and call pipedec distribute again"
