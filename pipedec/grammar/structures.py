"""Translation of a user's structure for llguidance, checks of it, and the tokens of a checkpoint as its parsers need them."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import lru_cache, reduce
from itertools import takewhile
from operator import getitem
from typing import TYPE_CHECKING, Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from llguidance.gbnf_to_lark import gbnf_to_lark
from msgspec.structs import replace

from pipedec.core.errors import UserError
from pipedec.core.sampling import StructuredOutputs
from pipedec.grammar.gbnf import is_gbnf, plain_gbnf
from pipedec.grammar.grammar import Bitmask, Grammar
from pipedec.grammar.thought import MarkedText, ThinkingGrammar, Thought
from pipedec.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

_MAX_KEPT = 16  # structures
_MAX_CHECKS = 200  # changed schemas that are tried to find the place of a mistake
_PLACE_SECONDS = 0.5  # processor time for that
_MAX_MESSAGE = 300  # characters
TOO_DEEP = "it is nested too deeply"
_LIMITS = LLParserLimits(max_items_in_row=10_000, verbose_errors=False)  # for objects with a thousand optional properties
_FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown")
_NO_LIMIT: tuple[Any, ...] = ({}, True, {"type": "string"})  # schemas for names of properties that allow all names
_SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_VALUES = ("enum", "const", "default", "examples", "example")
# Blanks as Python's ``json.dumps`` writes them: they are forced, and no model loops in them.
_JSON_OPTIONS: JsonCompileOptions = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def check(structure: StructuredOutputs, tokens: LLTokenizer | None = None) -> None:
    """Check a structure without a model. ``tokens`` has the special tokens that a grammar may name; None accepts all names.

    Raises UserError, one line with the place of the mistake, if the structure is invalid or not supported.
    """
    if structure.kind == "thought":
        return
    message = _mistake(source(structure), tokens)
    if message and structure.json is not None:
        schema = _schema(structure)
        message += f" (at {_place(schema, message, lambda changed: _mistake(_schema_source(changed), tokens))})"
    if message:
        raise UserError(f"structured_outputs.{structure.kind}: {message}")


def _mistake(text: str, tokens: LLTokenizer | None) -> str:
    """llguidance's complaint in one line; empty if there is none."""
    is_wrong, messages = LLMatcher.validate_grammar_with_warnings(text, tokens, limits=_LIMITS)
    return one_line(messages[0]) if is_wrong else ""


def source(structure: StructuredOutputs) -> str:
    """The structure as llguidance reads it. Raises UserError for what it cannot read."""
    if structure.json is not None:
        return _schema_source(_schema(structure))
    if structure.regex is not None:
        return LLMatcher.grammar_from_regex(structure.regex)
    if structure.choice is not None:
        texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in structure.choice)
        return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {texts}")  # one terminal: there may be thousands
    if structure.grammar is not None:
        lark = structure.grammar
        try:
            lark = gbnf_to_lark(plain_gbnf(lark)) if is_gbnf(lark) else lark
        except Exception as error:
            raise UserError(f"structured_outputs.grammar: {one_line(str(error))}") from None
        return LLMatcher.grammar_from_lark(lark)
    return _schema_source({"type": "object"})


def _schema(structure: StructuredOutputs) -> dict[str, Any]:
    """The JSON schema as an object: llguidance refuses a schema that is just ``true`` or ``false``."""
    assert isinstance(structure.json, str)
    schema = json.loads(structure.json)
    try:
        return {"allOf": [schema]} if isinstance(schema, bool) else without_annotations(schema)
    except RecursionError:
        raise UserError(f"structured_outputs.json: {TOO_DEEP}") from None


def _schema_source(schema: dict[str, Any]) -> str:
    try:
        return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=_JSON_OPTIONS)
    except (ValueError, RecursionError) as error:  # it is nested too deeply
        raise UserError(f"structured_outputs.json: {one_line(str(error))}") from None


def without_annotations(schema: Any) -> Any:
    """The schema without what JSON Schema calls annotations and llguidance refuses: formats that it does not know, and keywords
    with values that limit nothing.
    """
    if isinstance(schema, list):
        return [without_annotations(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {}
    for key, value in schema.items():
        limits_nothing = (
            (key == "format" and isinstance(value, str) and value not in _FORMATS)
            or (key == "uniqueItems" and value is False)
            or (key == "propertyNames" and value in _NO_LIMIT)
        )
        if key in _SCHEMAS_BY_NAME and isinstance(value, dict):
            kept[key] = {name: without_annotations(part) for name, part in value.items()}
        elif not limits_nothing:
            kept[key] = value if key in _VALUES else without_annotations(value)
    return kept


def _place(schema: Any, message: str, mistake_of: Callable[[Any], str]) -> str:
    """JSON pointer to the innermost part of a schema without which this mistake would not be found."""
    found: tuple[str | int, ...] = ()
    left, until = iter(range(_MAX_CHECKS)), time.process_time() + _PLACE_SECONDS
    parts = _parts(schema, found)
    while (part := next(parts, None)) is not None and next(left, None) is not None and time.process_time() < until:
        changed = deepcopy(schema)
        reduce(getitem, part[:-1], changed)[part[-1]] = {}  # which allows everything
        if mistake_of(changed) != message:
            found, parts = part, _parts(schema, part)
    return "/".join(["#", *(str(key).replace("~", "~0").replace("/", "~1") for key in found)])


def _parts(schema: Any, at: tuple[str | int, ...]) -> Iterator[tuple[str | int, ...]]:
    """Places of the objects directly below one, or in lists directly below it."""
    value = reduce(getitem, at, schema)
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        if isinstance(inner, dict):
            yield (*at, key)
        elif isinstance(inner, list):
            yield from _parts(schema, (*at, key))


def one_line(message: str) -> str:
    """The parser's first lines, up to its quotation of the source."""
    lines = [line.strip() for line in re.sub(r"^at \d+\(\d+\): (?=invalid regex)", "", message).splitlines()]
    before = list(takewhile(lambda line: not re.match(r"\d+ \||<(non-verbose|state)|stack backtrace", line), lines))
    return " ".join(line for line in before if line.strip("^ "))[:_MAX_MESSAGE]


class Vocabulary:
    """A tokenizer's tokens. Tokens that the model or the tokenizer lacks are never allowed.

    ``end_token_ids`` are the model's; without any the tokenizer's, which is enough to check structures. ``vocab_size`` is the
    number of the model's tokens, if it is known. Raises UserError if structured outputs are not possible with this tokenizer, or
    there is no end token.
    """

    def __init__(self, tokenizer: Tokenizer, end_token_ids: tuple[int, ...] = (), vocab_size: int | None = None) -> None:
        where = f"structured_outputs are not possible with the model in {tokenizer.directory}"
        own = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
        self._end_token_ids = end_token_ids or own
        if not self._end_token_ids:
            raise UserError(f"{where}: it names no end token")
        try:
            plain = LLTokenizer(tokenizer.to_json(), eos_token=list(self._end_token_ids), slices=[])
        except ValueError as error:
            raise UserError(f"{where}: its tokenizer cannot be used: {one_line(str(error))}") from None
        self._plain = _PlainText(tokenizer, plain, vocab_size)
        self._marks = {
            name: token for name, token in tokenizer.added_tokens.items() if name.strip() and token not in self._plain.lacking
        }
        self._tokens = LLTokenizer(TokenizerWrapper(self._plain), eos_token=list(self._end_token_ids))
        self._marked_text = self._new_marked_text()
        self._started = lru_cache(maxsize=_MAX_KEPT)(self._start)
        self.thought = lru_cache(maxsize=_MAX_KEPT)(lambda form: Thought(form, self._marked_text))

    def check(self, structure: StructuredOutputs) -> None:
        """Raises UserError as ``structures.check``; also if a grammar names a special token that is not in the vocabulary, or if
        nothing can match, because everything contains itself; or if a mark of the thought has an end token.
        """
        for name in () if structure.thought is None else ("begin", "end", "before"):
            if not set(self._end_token_ids).isdisjoint(self._marked_text.chain(getattr(structure.thought, name))):
                raise UserError(f"structured_outputs.thought.{name}: this mark has an end token of the model, which ends answers")
        try:
            matcher = self.matcher(structure)
        except UserError:
            check(structure, self._tokens)  # which knows the place
            raise
        matcher.try_consume_tokens(matcher.compute_ff_tokens())
        is_over = set(Bitmask(matcher.compute_bitmask())) <= set(self._end_token_ids)
        if matcher.is_error() or (is_over and not matcher.is_accepting()):
            reason = f": {one_line(matcher.get_error())}" if matcher.is_error() else ""
            raise UserError(f"structured_outputs.{structure.kind}: no text is possible{reason}")

    def matcher(self, structure: StructuredOutputs) -> LLMatcher:
        """At the structure's start. Raises UserError as ``check``, but for the place."""
        return self._started(self._after_thought(structure)).deep_copy()

    def grammar(self, structure: StructuredOutputs) -> Grammar:
        """The grammar of a new answer. Its ``allowed`` and ``forced`` raise UserError as ``matcher``."""
        return new_grammar(structure, lambda: self, self._end_token_ids)

    def _after_thought(self, structure: StructuredOutputs) -> StructuredOutputs:
        """The structure alone; of free text, a grammar."""
        if structure.thought is None or structure.kind != "thought":
            return replace(structure, thought=None)
        marks = {self._marks[name] for name in structure.thought.marks if name in self._marks}
        special = sorted(marks.intersection(self._plain.special_token_ids).difference(self._end_token_ids))
        more = f" (<[{','.join(map(str, special))}]> TEXT)*" if special else ""
        return StructuredOutputs(grammar=f"start: TEXT{more}\nTEXT: /(?s:.*)/")

    def _new_marked_text(self) -> MarkedText:
        excluded = {*self._plain.special_token_ids, *self._plain.lacking, *self._end_token_ids}
        texts = {token: text for token, text in enumerate(self._plain.tokens) if text and token not in excluded}

        def encode(text: str) -> list[int]:
            token_ids = self._tokens.tokenize_str(text)
            is_exact = b"".join(texts.get(token, b"") for token in token_ids) == text.encode()
            return token_ids if is_exact else self._tokens.greedy_tokenize(text)

        return MarkedText(texts, self._marks, encode)

    def _start(self, structure: StructuredOutputs) -> LLMatcher:
        matcher = LLMatcher(self._tokens, source(structure), log_level=0, limits=_LIMITS)
        if matcher.is_error():
            raise UserError(f"structured_outputs.{structure.kind}: {one_line(matcher.get_error())}")
        return matcher


def new_grammar(structure: StructuredOutputs, vocabulary: Callable[[], Vocabulary], end_token_ids: tuple[int, ...]) -> Grammar:
    """The grammar of a new answer, which takes the vocabulary when it is first asked."""
    thought = structure.thought

    def new_matcher() -> LLMatcher:
        return vocabulary().matcher(structure)

    if thought is None:
        return Grammar(new_matcher, end_token_ids)
    return ThinkingGrammar(lambda: vocabulary().thought(thought), new_matcher, end_token_ids)


class _PlainText:
    """The tokenizer that cuts forced text for llguidance: no text is read as a token that stands for no text, such as one that
    is special, or looks like it. These are ``own``'s special tokens, which grammars may name.
    """

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, own: LLTokenizer, vocab_size: int | None) -> None:
        self.eos_token_id = own.eos_token
        self.special_token_ids = [token for token in range(own.vocab_size) if own.is_special_token(token)]
        self.tokens = [own.decode_bytes([token]) for token in range(own.vocab_size)]
        self.lacking = range(own.vocab_size if vocab_size is None else vocab_size, own.vocab_size)
        self._encode = tokenizer.encoder_without(frozenset((*self.special_token_ids, *self.lacking)))

    def __call__(self, text: str) -> list[int]:
        return self._encode(text)
