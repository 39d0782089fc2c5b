"""Prompts to an OpenAI-compatible server, with retries while it is busy.

Owns HTTP, retries and error messages. It does not know what prompts are for.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from http.client import HTTPException

from pipedec.core.errors import PipedecError, UserError

_LONGEST_PAUSE_S = 60.0
_THIS_PROMPT = (400, 413, 422)  # too long, or against the server's rules: another prompt may be answered
_BUSY = (408, 409, 425, 429)


@dataclass(frozen=True)
class ChatEndpoint:
    """A server that answers ``POST {url}/chat/completions``."""

    url: str  # its base, like ``https://api.example.com/v1``
    model: str
    api_key: str | None = None
    timeout_s: float = 120.0
    tries: int = 5  # attempts per prompt. The pause between two doubles, unless the server names one (Retry-After)
    pause_s: float = 1.0
    role: str = "annotator"  # its name in errors

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise UserError(f"the {self.role} {self.url!r} is not an address: give http(s)://HOST/v1")
        if self.tries < 1 or self.timeout_s <= 0:
            raise UserError(f"--tries must be at least 1 and --timeout above 0, or the {self.role} never answers")

    def complete(self, prompt: str) -> str | None:
        """The model's reply at temperature 0; None if the server refuses this prompt or the reply is empty.

        Raises UserError if the address, the key or the model is wrong, or the server is not OpenAI-compatible; PipedecError if it
        was still unreachable or busy at the last try.
        """
        wrong = ""
        for attempt in range(self.tries):
            pause_s = self.pause_s * 2**attempt
            try:
                return self._reply(prompt)
            except urllib.error.HTTPError as error:
                error.close()
                if error.code in _THIS_PROMPT:
                    return None
                wrong = f"{error.code} {error.reason}"
                if error.code not in _BUSY and error.code < 500:
                    raise UserError(f"the {self.role} at {self.url} refuses: {wrong} (check address, model and key)") from None
                asked = error.headers.get("Retry-After", "").strip()
                pause_s = float(asked) if asked.isdecimal() else pause_s
            except (OSError, HTTPException) as error:
                wrong = str(getattr(error, "reason", None) or error) or type(error).__name__
            if attempt + 1 < self.tries:
                time.sleep(min(pause_s, _LONGEST_PAUSE_S))
        raise PipedecError(f"the {self.role} at {self.url} does not answer after {self.tries} tries: {wrong}")

    def _reply(self, prompt: str) -> str | None:
        body = {"model": self.model, "messages": [{"role": "user", "content": prompt}], "temperature": 0}
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self.api_key}"} if self.api_key else {})
        address = f"{self.url.rstrip('/')}/chat/completions"
        request = urllib.request.Request(address, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=self.timeout_s) as response:
            content = response.read()
        try:
            text = json.loads(content)["choices"][0]["message"]["content"]
        except (ValueError, LookupError, TypeError):
            raise UserError(
                f"the server at {self.url} does not answer as an OpenAI-compatible one: give its base, with /v1"
            ) from None
        return text if isinstance(text, str) and text.strip() else None
