"""Sampling parameters of a request, and the form of its answer."""

from __future__ import annotations

import json
import secrets
from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta
from msgspec.structs import force_setattr, replace

from pipedec.core.errors import BadValue, UserError
from pipedec.core.records import LARGEST, Record
from pipedec.core.values import check_fields

if TYPE_CHECKING:
    from collections.abc import Collection


MAX_LOGPROBS = 20
STRUCTURES = ("json", "regex", "choice", "grammar", "json_object")  # fields of ``StructuredOutputs`` that name a structure
LOWEST_LOGPROB = -9999.0  # JSON has no infinity
Share = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Logprobs = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None
Text = Annotated[str, Meta(min_length=1)]
Mark = Annotated[str, Meta(min_length=1, max_length=256)]
_GENERATED_SEED_BITS = 53  # integers that every JSON parser represents exactly


def check_sets_of_tokens(vocab_size: int, **given: Collection[int] | None) -> None:
    """Raises UserError as ``check_token_ids`` by name, and if there are more tokens than ``vocab_size``."""
    for name, token_ids in given.items():
        if token_ids and len(token_ids) > vocab_size:
            raise UserError(f"{name} must have at most {vocab_size} tokens, as many as the vocabulary, not {len(token_ids)}")
        check_token_ids(name, token_ids or (), vocab_size)


def check_token_ids(name: str, token_ids: Collection[int], vocab_size: int) -> None:
    """Raises UserError, whose message begins with ``name``, if a model of ``vocab_size`` embeddings lacks a token."""
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        token = next(token for token in token_ids if not 0 <= token < vocab_size)
        raise UserError(
            f"{name} names token {str(token)[:100]}, but the vocabulary has {vocab_size} tokens: leave it out, ids are from 0 to "
            f"{vocab_size - 1}"
        )


class ThoughtForm(Record, frozen=True):
    """The form of the thought with which an answer begins: any text but ``end``, between two marks.

    Where the vocabulary has a token for a mark or a part of it, special or not, that token is generated; other parts are text.

    Attributes:
        begin: the mark that opens the thought, such as ``<think>``.
        end: the mark that ends it, such as ``</think>``. None of its tokens is an end token of the model. If it has both text and
            tokens, its first token ends the thought.
        is_open: the prompt has opened the thought already.
        is_optional: the answer may go without a thought, unless ``is_open``: the structure stands at its beginning then.
        max_tokens: budget. After so many tokens of thought the end mark is forced, at 0 at once. None for no limit.
        before: text between the thought and the structure. If it is empty, there may be up to two newlines.
        marks: special tokens that the free text after a thought may contain, such as marks of tool calls. Names that are no
            special tokens are text.

    Raises:
        UserError: a value is out of its range.
    """

    begin: Mark
    end: Mark
    is_open: bool = False
    is_optional: bool = True
    max_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    before: Annotated[str, Meta(max_length=256)] = ""
    marks: Annotated[tuple[Mark, ...], Meta(max_length=64)] = ()

    def __post_init__(self) -> None:
        check_fields(self, "structured_outputs.thought")
        force_setattr(self, "marks", tuple(self.marks))


class StructuredOutputs(Record, frozen=True):
    """The required form of an answer, with vLLM's names. Exactly one structure is given; none if there is a thought with a
    budget, which free text follows then.

    Attributes:
        json: a JSON Schema, as text or as a value. It is kept as text.
        regex: a regular expression that the whole answer matches.
        choice: the answer is one of these texts.
        grammar: a context-free grammar, in Lark's syntax as llguidance reads it, or GBNF.
        json_object: the answer is a JSON object with any content. Never False.
        thought: the answer may or must think first, and the structure follows.

    Raises:
        UserError: none or more than one is given, or the value is empty, of another type or not JSON.
    """

    json: str | dict[str, Any] | bool | None = None
    regex: Text | None = None
    choice: Annotated[tuple[str, ...], Meta(min_length=1)] | None = None
    grammar: Text | None = None
    json_object: bool | None = None
    thought: ThoughtForm | None = None

    def __post_init__(self) -> None:
        check_fields(self, "structured_outputs")
        force_setattr(self, "json_object", self.json_object or None)
        given = [name for name in STRUCTURES if getattr(self, name) is not None]
        if not given and self.thought is not None and self.thought.max_tokens is not None:
            return
        if len(given) != 1:
            raise UserError(f"structured_outputs must have one of {', '.join(STRUCTURES)}, not {' and '.join(given) or 'none'}")
        name, value = given[0], getattr(self, given[0])
        if name == "json":
            force_setattr(self, name, _schema_text(value))
        elif name == "choice":
            force_setattr(self, name, tuple(value))

    @property
    def kind(self) -> str:
        """The name of the structure that is given, or ``thought`` without one."""
        return next((name for name in STRUCTURES if getattr(self, name) is not None), "thought")


def _schema_text(schema: Any) -> str:
    try:
        text = schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False)
        if isinstance(json.loads(text), dict | bool):
            return text
    except (ValueError, TypeError, RecursionError) as error:
        raise UserError(f"structured_outputs.json must be a JSON Schema: {str(error)[:200]}") from None
    raise UserError("structured_outputs.json must be a JSON Schema: an object, true or false")


class SamplingParams(Record, frozen=True):
    """Sampling parameters of a request, with vLLM's names, meanings and ranges. The default is greedy decoding.

    They apply in this order: logit bias, penalties, temperature, min_p, top_k, top_p. The last three also keep tokens that are
    exactly as probable as the least probable token they keep.

    Attributes:
        temperature: controls randomness. 0 is greedy: the most probable token, in a tie the one with the lowest id.
        top_k: number of most probable tokens to sample from. 0 or −1 considers all tokens.
        top_p: cumulative probability of the most probable tokens to sample from, in (0, 1]. 1 considers all tokens.
        min_p: minimum probability of a token, relative to the most probable one, in [0, 1]. 0 disables it.
        seed: random seed. The same seed gives the same tokens with every method; None or -1 takes a random one, which is
            reported.
        max_tokens: maximum number of tokens to generate.
        min_tokens: before so many tokens of the answer, neither an end token nor one of ``stop_token_ids`` can be chosen in its
            main thread, and stop strings stop nothing. Not with ``structured_outputs``.
        stop: string or strings that stop the generation. The text ends before them.
        stop_token_ids: tokens that stop the generation, besides the model's end tokens. The text ends before them.
        repetition_penalty: values above 1 penalize tokens of the prompt and the generated text: positive logits are divided
            by it, negative ones multiplied.
        presence_penalty: subtracted from the logits of tokens that the generated text contains, in [−2, 2].
        frequency_penalty: subtracted as often as the generated text contains the token, in [−2, 2].
        logit_bias: by token id, a value in [−100, 100] that is added to its logit.
        logprobs: number of most probable tokens whose log probabilities are returned per output token, besides the chosen
            one. They are taken before bias, penalties and temperature. None returns none.
        include_stop_str_in_output: the text ends with the stop string that stopped it, or with the text of the end or stop token.
        ignore_eos: continue after the model's end tokens.
        skip_special_tokens: special tokens are no text. Otherwise all are, except control tokens of decode threads.
        shown_special_tokens: ids of special tokens that are text although the others are skipped.
        prompt_logprobs: as ``logprobs``, for the tokens of the prompt. None returns none.
        prompt_hidden_states: return the hidden states of the prompt's tokens after the final norm (``Reply.hidden_states``).
        structured_outputs: the required form of the answer; not with ``ignore_eos``. Tokens that it forbids are excluded
            before everything else. None for any text.

    Raises:
        UserError: a value is out of its range.
    """

    temperature: Annotated[float, Meta(ge=0, le=LARGEST)] = 0.0
    top_k: Annotated[int, Meta(ge=-1)] = 0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    min_p: Share = 0.0
    seed: int | None = None
    max_tokens: Annotated[int, Meta(ge=1)] = 128
    stop: Text | tuple[Text, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    repetition_penalty: Annotated[float, Meta(gt=0, le=LARGEST)] = 1.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    logit_bias: dict[Annotated[int, Meta(ge=0)], Annotated[float, Meta(ge=-100, le=100)]] | None = None
    logprobs: Logprobs = None
    ignore_eos: bool = False
    prompt_logprobs: Logprobs = None
    structured_outputs: StructuredOutputs | None = None
    min_tokens: Annotated[int, Meta(ge=0)] = 0
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    shown_special_tokens: tuple[int, ...] = ()
    prompt_hidden_states: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        force_setattr(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        force_setattr(self, "stop_token_ids", tuple(self.stop_token_ids))
        force_setattr(self, "shown_special_tokens", tuple(self.shown_special_tokens))
        if self.seed == -1:  # as in vLLM and llama.cpp
            force_setattr(self, "seed", None)
        if not 0 <= (self.seed or 0) < 2**64:
            raise BadValue(f"seed: must be at least 0 and below 2**64, not {str(self.seed)[:100]}")
        if self.structured_outputs is not None and self.ignore_eos:
            raise UserError("structured_outputs end with the model's end token: leave out ignore_eos")
        if self.structured_outputs is not None and self.min_tokens:
            raise UserError("min_tokens is not possible with structured_outputs, which end where they are complete: leave it out")
        if self.min_tokens > self.max_tokens:
            raise BadValue(f"min_tokens: must be at most max_tokens, {self.max_tokens}, not {str(self.min_tokens)[:100]}")

    def __hash__(self) -> int:
        return hash((self.temperature, self.seed, self.max_tokens))  # a bias is a mapping

    @property
    def is_stochastic(self) -> bool:
        return self.temperature > 0

    def seeded(self) -> SamplingParams:
        """The parameters, with a random seed if one is needed and none is given."""
        if self.seed is not None or not self.is_stochastic:
            return self
        return replace(self, seed=secrets.randbits(_GENERATED_SEED_BITS))

    @property
    def computes_prompt(self) -> bool:
        """Whether every token of the prompt must be computed, also where another request has cached it."""
        return self.prompt_logprobs is not None or self.prompt_hidden_states

    @property
    def has_penalties(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)

    @property
    def is_plainly_greedy(self) -> bool:
        """Whether decoding takes the most probable token of the unchanged logits."""
        return not (self.is_stochastic or self.has_penalties or self.logit_bias)
