"""``pipedec distribute``: to every host of a cluster.yaml its part of the checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Annotated, TypeVar

import click
from msgspec import Meta
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from pipedec.cli.show import console
from pipedec.cluster.distribution import Delivery, Missing, Sources
from pipedec.cluster.launched import for_hosts
from pipedec.config import load_cluster
from pipedec.core import PipedecError, UserError
from pipedec.flags import Help, own_options
from pipedec.gguf import is_named
from pipedec.hardware import GIGA
from pipedec.plan.files import checkpoints_of, host_parts
from pipedec.plan.placement import spare_places

_MAX_HOSTS = 4  # at once: they share this machine's disk and network

Result = TypeVar("Result")


@click.command()
@click.argument("file", type=click.Path(path_type=Path), default=Path("cluster.yaml"))
@own_options
def distribute(
    file: Path,
    partition: Annotated[str | None, Help("Partition to prepare (default: the one that the file names).", "NAME")] = None,
    spares: Annotated[Annotated[int, Meta(ge=0)] | None, Help("As for launch (default: all spares: of the file).")] = None,
    source: Annotated[
        Path | None, Help("Folder in which this machine has the checkpoints, under the same names.", "DIR", flag="--from")
    ] = None,
) -> None:
    """Copy to every host what it lacks of the checkpoints, over ssh.

    FILE is a cluster.yaml. A host gets the files that its ranks read, and all of them if it has spares. A copy that was
    interrupted goes on where it stopped; files that are there with the same content are left alone.
    """
    config = for_hosts(load_cluster(file).for_partition(partition))
    models = checkpoints_of(config)
    here = config if source is None else config.for_partition(given={key: _under(source, model) for key, model in models.items()})
    parts, sources = host_parts(here, spare_places(here, count=spares)), Sources(models)
    with console.status("Reading the checkpoints") as status:
        wanted = {
            host: sources.wanted(found, lambda path: status.update(f"Checking {path.name}")) for host, found in parts.items()
        }
    with ThreadPoolExecutor(_MAX_HOSTS) as threads, ExitStack() as stack:
        deliveries = {host: stack.enter_context(Delivery(config, host, files)) for host, files in wanted.items()}
        with console.status("Asking the hosts what they lack"):
            missing = _of_all(threads, {host: delivery.compare for host, delivery in deliveries.items()})
        _send(threads, deliveries, missing)


def _under(folder: Path, model: str) -> str:
    if not (found := folder / Path(model).name).exists() and not is_named(model):
        raise UserError(f"{found} does not exist: --from names a folder that holds {Path(model).name}")
    return model if is_named(model) else str(found.absolute())


def _send(threads: ThreadPoolExecutor, deliveries: Mapping[str, Delivery], missing: Mapping[str, Missing]) -> None:
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:

        def send(host: str, bar: TaskID) -> None:
            found = missing[host]
            if found.files:
                deliveries[host].send(lambda num_bytes: progress.advance(bar, num_bytes))
            sent = (
                f"{found.files} files, {(found.num_bytes - found.bytes_there) / GIGA:.2f} GB"
                if found.files
                else "nothing is missing"
            )
            console.print(f"{host}: {sent}", soft_wrap=True)

        bars = {
            host: progress.add_task(host, total=found.num_bytes, completed=found.bytes_there) for host, found in missing.items()
        }
        _of_all(threads, {host: partial(send, host, bar) for host, bar in bars.items()})


def _of_all(threads: ThreadPoolExecutor, calls: Mapping[str, Callable[[], Result]]) -> dict[str, Result]:
    """The result of each host's call, once all have ended. UserError with the complaints of all that failed."""
    futures = {host: threads.submit(call) for host, call in calls.items()}
    complaints = [str(error) for future in futures.values() if isinstance(error := future.exception(), PipedecError)]
    if complaints:
        raise UserError("; ".join(complaints))
    return {host: future.result() for host, future in futures.items()}
