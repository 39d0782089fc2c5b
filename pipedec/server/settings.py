"""The settings of the HTTP side."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1 << 20


@dataclass(frozen=True)
class ServerSettings:
    """Names and limits of the HTTP API.

    Attributes:
        served_model_names: names by which clients may ask for the model; responses have the first one.
        api_keys: one of them must come with every request to ``/v1`` and ``/live/feed``; none are needed if there are none.
        allowed_origins, allowed_methods, allowed_headers, allow_credentials: CORS, off without origins.
        max_body_bytes: of a request's body; larger ones are refused with 413.
        body_seconds: in which a body must arrive (408).
        ping_seconds: of silence, after which a stream sends a comment to keep proxies from closing it.
        send_seconds: after which a client that reads nothing of its stream loses it.
        max_prompts: of one request to ``/v1/completions``.
    """

    served_model_names: tuple[str, ...] = ("pipedec",)
    api_keys: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    allowed_methods: tuple[str, ...] = ("*",)
    allowed_headers: tuple[str, ...] = ("*",)
    allow_credentials: bool = False
    max_body_bytes: int = 16 * MIB
    body_seconds: float = 30.0
    ping_seconds: float = 15.0
    send_seconds: float = 60.0
    max_prompts: int = 1024

    @property
    def model_name(self) -> str:
        return self.served_model_names[0]
