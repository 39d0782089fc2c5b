"""From a conversation to its answers, for every API of chats: prompt, tools, thoughts, structure; and an answer's parts as they
come: text, thoughts and calls.

Knows OpenAI's body of a chat, into which the other APIs translate theirs; no shape of a response.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.requests import Request

from pipedec.core.completion import Completion
from pipedec.core.sampling import ThoughtForm
from pipedec.server.answers import AnswerPart, Generations, finish_reason, text_of
from pipedec.server.delivery import ResponseHead, Usage, answers_of, unless_gone
from pipedec.server.errors import bad_request
from pipedec.server.front import Front, ServedRun
from pipedec.server.prompts import READERS, Prompt, num_kept, object_of, rendered
from pipedec.server.protocol import ChatBody, TokenizeBody
from pipedec.server.sampling import asked_of
from pipedec.server.structures import ToolUse, after_thoughts, structure_of, tool_use_of
from pipedec.text.parsers.parser import CallPart, Part, ReasoningParser, Thought
from pipedec.text.parsers.reader import AnswerReader
from pipedec.text.tokenizer import Tokenizer

THINKING = ("enable_thinking", "thinking")  # variables of chat templates that switch thoughts on and off
_OWN_VARIABLES = ("messages", "add_generation_prompt", "tokenize", "tools", "continue_final_message")


def texts_of(parts: Sequence[Part]) -> tuple[str, str]:
    """The text for the user, and the thoughts, of parts of an answer."""
    text = "".join(part for part in parts if isinstance(part, str))
    return text, "".join(part.text for part in parts if isinstance(part, Thought))


class MessageReader:
    """Divides one answer into its parts, piece by piece or as a whole.

    Args:
        reader: None for an answer that is nothing but text.
        is_single: leave out calls after the first.
        shows_thoughts: else they are left out.
    """

    def __init__(self, reader: AnswerReader | None, is_single: bool = False, shows_thoughts: bool = True) -> None:
        self._reader = reader
        self._is_single = is_single
        self._shows_thoughts = shows_thoughts

    def read(self, part: AnswerPart) -> list[Part]:
        """The next parts that are final."""
        return self._read(part.text, part.completion is not None)

    def read_all(self, completion: Completion) -> list[Part]:
        """The parts of a whole answer."""
        return self._read(text_of(completion), True)

    def finish_reason(self, completion: Completion | None) -> str | None:
        """OpenAI's; None while the answer goes on."""
        if completion is None:
            return None
        reason = finish_reason(completion)
        return "tool_calls" if reason == "stop" and self._reader is not None and self._reader.num_calls else reason

    def _read(self, text: str, is_last: bool) -> list[Part]:
        if self._reader is None:
            return [text] if text else []
        parts = self._reader.add(text) + (self._reader.finish() if is_last else [])
        return [part for part in parts if self._is_shown(part)]

    def _is_shown(self, part: Part) -> bool:
        if isinstance(part, CallPart):
            return part.index == 0 or not self._is_single
        return self._shows_thoughts or not isinstance(part, Thought)


@dataclass(frozen=True)
class Chat:
    """A conversation whose answers are not yet submitted."""

    prompt: Prompt
    answers: Generations
    usage: Usage
    readers: Sequence[MessageReader]  # one of each answer


def arguments_of(text: str) -> dict[str, Any]:
    """The arguments of a call. If they are no JSON object, one with their text: the tool refuses it."""
    found = object_of(text)
    return {"arguments": text} if found is None else found


async def read_messages(
    request: Request, body: ChatBody | TokenizeBody, served: ServedRun, variables: Mapping[str, Any], kept: int | None = None
) -> Prompt:
    """The conversation as the model reads it, with variables of the chat template besides those of the body. ``kept``: as of
    ``num_kept``.

    Raises ApiError as ``rendered``, or if the answer is to go on with the last message and to begin a new one.
    """
    last, given = body.messages[-1] if body.messages else None, body.chat_template_kwargs or {}
    continues = bool(body.continue_final_message or (last is not None and (last.prefix or last.partial)))
    if continues and body.add_generation_prompt:
        raise bad_request("continue_final_message goes without add_generation_prompt", "continue_final_message")
    if wrong := [name for name in given if name in _OWN_VARIABLES]:
        raise bad_request(f"chat_template_kwargs must not have {wrong[0]}", "chat_template_kwargs")
    begins_answer = not continues and body.add_generation_prompt is not False
    ending = {"add_generation_prompt": begins_answer, "continue_final_message": continues}
    variables = {**variables, **given, **ending}
    reading = partial(rendered, body.messages or (), served, variables, bool(body.add_special_tokens), kept)
    return await unless_gone(request, READERS.run(reading))


async def prompt_of(front: Front, request: Request, body: ChatBody, use: ToolUse | None) -> Prompt:
    """The conversation with its tools as the model reads it. Raises ApiError as ``read_messages``."""
    served, effort = front.require(), body.reasoning_effort
    variables: dict[str, Any] = {} if effort is None else dict.fromkeys(THINKING, effort != "none")
    own = {"threads": body.threads, "reasoning_effort": effort, "documents": body.documents}
    variables |= {name: value for name, value in own.items() if value not in (None, "none")}
    variables |= {} if use is None else {"tools": use.shown}
    return await read_messages(request, body, served, variables, num_kept(body, served))


async def chat_of(
    front: Front, request: Request, body: ChatBody, head: ResponseHead, is_streamed: bool, most_tokens: int | None = None
) -> Chat:
    """A conversation with its answers. Raises ApiError for one that cannot be answered as it asks.

    ``most_tokens``: of an answer, where the body has no ``max_tokens``; fewer if the context has no room for them.
    """
    served, use, logprobs = front.require(), tool_use_of(body, front), body.top_logprobs or 0
    if logprobs and not body.logprobs:
        raise bad_request("top_logprobs needs logprobs: true", "top_logprobs")
    structure = structure_of(body)
    if structure is not None and use is not None:
        raise bad_request(f"{structure.field} goes without tools, or with tool_choice none", structure.field)
    structure = structure if use is None else use.structure
    prompt = await prompt_of(front, request, body, use)
    reasoning, tools = front.reasoning, None if use is None else use.form
    seen = _special_ids([*(reasoning.special if reasoning else ()), *(tools.special if tools else ())], served.tokenizer)
    thought = _thought_form(body, reasoning, use, prompt.rendered)
    if thought is not None:
        structure = after_thoughts(structure, thought)
    checked = asked_of(
        body, served, logprobs if body.logprobs else None, most_tokens or served.defaults.max_tokens, structure=structure,
        shown=seen,
    )  # fmt: skip
    asked = await unless_gone(request, checked)
    answers = answers_of(front, request, head, [prompt], asked, is_streamed)
    usage = Usage(answers, asked.n)
    if reasoning is not None:
        usage.thought_begin, usage.thought_end = map(served.tokenizer.token_id, (reasoning.begin, reasoning.end))
        usage.begins_in_thought = thought is not None and thought.is_open
    return Chat(prompt, answers, usage, [_reader(body, reasoning, use, prompt) for _ in range(asked.n)])


def _reader(body: ChatBody, reasoning: ReasoningParser | None, use: ToolUse | None, prompt: Prompt) -> MessageReader:
    if reasoning is None and use is None:
        return MessageReader(None)
    schemas: Mapping[str, Any] = {} if use is None else use.schemas
    reader = AnswerReader(reasoning, None if use is None else use.form, schemas, prompt.rendered)
    return MessageReader(reader, use is not None and use.is_single, body.include_reasoning is not False)


def _special_ids(names: Sequence[str], tokenizer: Tokenizer) -> tuple[int, ...]:
    """The tokens of these names that are no text by themselves."""
    found = (tokenizer.token_id(name) for name in dict.fromkeys(names))
    return tuple(token for token in found if token in tokenizer.all_special_ids)


def _thought_form(body: ChatBody, reasoning: ReasoningParser | None, use: ToolUse | None, prompt: str) -> ThoughtForm | None:
    """The form of the thought with which an answer may begin; None where there is none, or none that is known here."""
    budget = body.thinking_token_budget
    if reasoning is None and budget is not None:
        raise bad_request("how this model thinks is not known here: leave thinking_token_budget out", "thinking_token_budget")
    if reasoning is None or reasoning.is_closed(prompt):
        return None
    return ThoughtForm(
        reasoning.begin, reasoning.end, reasoning.is_open(prompt), is_optional=not reasoning.before_text, max_tokens=budget,
        before=reasoning.before_text if use is None else "", marks=() if use is None else use.form.special,
    )  # fmt: skip
