"""Versions of installed packages, which are not imported for that."""

from importlib import metadata


def installed_version(package: str) -> str | None:
    """None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
