"""A cluster on this machine that belongs to one object; prompts and messages in the forms of the Python API."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import asdict

from pipedec.cluster.local import LocalCluster, resolve_apart
from pipedec.config import Settings
from pipedec.config.settings import keyword_arguments
from pipedec.core import DEFAULT_METHOD, MethodOptions, SamplingParams, UserError
from pipedec.messages import PromptRequest
from pipedec.methods import find_method, make_options
from pipedec.text.prompt import load_tokenizer
from pipedec.text.tokenizer import Tokenizer
from pipedec.threads import load_dialect

Prompt = str | Sequence[int] | Mapping[str, Any]  # text, token ids, or {"prompt": text} or {"prompt_token_ids": ids}
ChatMessage = Mapping[str, str]


class Resident:
    """Starts a cluster in its constructor; ``_cluster.stop`` ends it.

    Args:
        target, draft: checkpoint directories; the shipped pair by default, ``draft="none"`` for a pipeline without one.
        method: as ``--method``.
        settings: any other setting of ``pipedec.config.settings`` by name, like ``stages=4`` or ``kv_cache_memory="4GiB"``: the
            options of ``pipedec generate --help``, with underscores.

    Raises:
        UserError: there is no such setting, or the settings do not fit together or do not fit the checkpoints.
        PipedecError: a rank could not start.
    """

    def __init__(
        self, target: str | Path | None = None, draft: str | Path | None = None, *, method: str | None = None, **settings: Any
    ) -> None:
        self._method = method
        self._tokenizer: Tokenizer | None = None
        self._cluster = LocalCluster(resolve_apart(Settings.of(target=target, draft=draft, **settings)))
        self._cluster.start()

    def _request(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None,
        raw_prompt: bool,
        options: MethodOptions | Mapping[str, Any] | None,
        threads: str | Path | None,
        priority: int,
    ) -> PromptRequest:
        """See ``LLM.generate``. Raises UserError if the method has no such option, or a prompt is neither."""
        dialect = None if threads is None else load_dialect(threads).to_json()
        given = named_options(self._method or DEFAULT_METHOD, options)
        return PromptRequest(
            _plain(prompt), raw_prompt, self._method, sampling or SamplingParams(), given, threads=dialect, priority=priority
        )

    def _rendered(self, messages: Sequence[ChatMessage], threads: str | Path | None) -> tuple[int, ...]:
        """The token ids of a conversation. Raises UserError if the target has no chat template, or it refuses the messages."""
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(Path(self._cluster.spec.target))
        if not self._tokenizer.has_chat_template:
            raise UserError("the target has no chat template: use generate with a prompt")
        named: dict[str, Any] = {} if threads is None else {"threads": load_dialect(threads).name}
        return tuple(self._tokenizer.apply_chat_template(list(messages), **named))


def _signature() -> inspect.Signature:
    """The signature of ``Resident``, with every setting by name."""
    own = [one for one in inspect.signature(Resident.__init__).parameters.values() if one.kind is not one.VAR_KEYWORD]
    others = [one for one in keyword_arguments() if one.name not in ("target", "draft")]
    return inspect.Signature([*own, *others])


Resident.__init__.__signature__ = _signature()  # type: ignore[attr-defined]


def named_options(method: str, options: MethodOptions | Mapping[str, Any] | None) -> Mapping[str, Any]:
    """A method's options by name, as in a request. Raises UserError if they are another method's."""
    expected = find_method(method).options
    if isinstance(options, MethodOptions) and type(options) is not expected:
        raise UserError(f"method {method} takes {expected.__name__}, not {type(options).__name__}")
    given = asdict(options) if isinstance(options, MethodOptions) else dict(options or {})
    make_options(method, given)
    return given


def prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt, or several, as a list. A list of integers is one prompt."""
    given: Any = prompts
    is_single = isinstance(given, str | Mapping) or (bool(given) and all(isinstance(token, int) for token in given))
    return [given] if is_single else list(given)


def _plain(prompt: Prompt) -> str | tuple[int, ...]:
    """Text or token ids. Raises UserError if it is neither."""
    given = prompt.get("prompt_token_ids", prompt.get("prompt")) if isinstance(prompt, Mapping) else prompt
    if isinstance(given, str):
        return given
    if isinstance(given, Sequence) and all(isinstance(token, int) for token in given):
        return tuple(given)
    raise UserError('a prompt is neither text nor token ids: give a string, a list of integers or {"prompt_token_ids": [...]}')
