"""Where Redis is: from a flag, the environment or a file."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from typing import Annotated
from urllib.parse import quote, unquote, urlsplit

from msgspec import Meta

from pipedec.core.errors import BadValue, UserError

_THIS_MACHINE = (None, "localhost", "127.0.0.1", "::1")  # as hosts of a URL; None for a Unix socket


@dataclass(frozen=True)
class RedisConfig:
    """Where Redis is, or is to be started. The password is kept apart from the URL and never shown.

    Attributes:
        url: ``redis://host:port/database``, ``rediss://…`` (TLS) or ``unix:///path``, without a password; None if none is known.
        password: PIPEDEC_REDIS_PASSWORD takes precedence.
        host, port: instead of ``url``, where ``pipedec launch`` starts a server; a free port if none is given.
    """

    url: Annotated[str, Meta(min_length=1)] | None = None
    password: str | None = field(default=None, repr=False)
    tls: bool = False
    host: str | None = None
    port: Annotated[int, Meta(ge=1, le=65535)] | None = None

    def __post_init__(self) -> None:
        if self.url is None:
            if self.tls:
                raise BadValue("tls: a server that pipedec launch starts has no TLS: give the url of one that has")
            return
        if self.host is not None or self.port is not None:
            raise BadValue("url: give url (a server that runs already) or host and port (one to start), not both")
        try:
            parts = urlsplit(self.url)
            host, password, _ = parts.hostname, parts.password, parts.port
            (host or "").encode("idna")  # what connecting does with it
        except ValueError:
            raise BadValue("url: not a Redis address: write redis://host:6379/0") from None
        if parts.scheme not in ("redis", "rediss", "unix") or not (parts.path if parts.scheme == "unix" else host):
            raise BadValue("url: must look like redis://host:6379/0, rediss://host:6379/0 or unix:///path")
        if "password=" in parts.query:
            raise BadValue("url: must not carry the password in its query: use PIPEDEC_REDIS_PASSWORD")
        if self.tls and parts.scheme == "unix":
            raise BadValue("tls: a Unix socket has no TLS: remove tls, or use a rediss:// address")
        user_and_password, at, address = parts.netloc.rpartition("@")
        user = user_and_password.partition(":")[0]
        scheme = "rediss" if self.tls else parts.scheme
        path = parts.path + ("?" + parts.query) * bool(parts.query)
        object.__setattr__(self, "url", f"{scheme}://{user}{at * bool(user)}{address}{path}")
        object.__setattr__(self, "password", unquote(password) if password else self.password or None)
        object.__setattr__(self, "tls", scheme == "rediss")

    @property
    def is_here(self) -> bool:
        """Whether the URL names this machine, so that it is another server on each host."""
        return self.url is not None and urlsplit(self.url).hostname in _THIS_MACHINE

    @property
    def connection_url(self) -> str | None:
        """The URL with the password in it: for connecting, never for showing. None if there is none."""
        if self.password is None or self.url is None:
            return self.url
        scheme, _, rest = self.url.partition("://")
        user, _, address = rest.rpartition("@")
        return f"{scheme}://{user}:{quote(self.password, safe='')}@{address}"


def redis_config(url: str | None = None, base: RedisConfig | None = None) -> RedisConfig:
    """The Redis to use: ``url`` (a flag), else PIPEDEC_REDIS_URL, else ``base`` (a file).

    A password in the chosen URL is used; then PIPEDEC_REDIS_PASSWORD, then the one of ``base``. UserError for a bad URL.
    """
    base = base or RedisConfig()
    chosen = url or os.environ.get("PIPEDEC_REDIS_URL")
    password = os.environ.get("PIPEDEC_REDIS_PASSWORD") or base.password
    if not chosen:
        return replace(base, password=password)
    try:
        return RedisConfig(chosen, password)
    except UserError as error:
        source = "--redis" if url else "PIPEDEC_REDIS_URL"
        raise UserError(f"{source}: {str(error).removeprefix('url: ')}") from None
