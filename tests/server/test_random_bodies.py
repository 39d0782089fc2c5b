"""Random bodies for every route that takes one, many at a time, beside streams that must not notice: most ask for what can be.

Other ones than usual: ``pytest tests/server/test_random_bodies.py --hypothesis-profile=random --hypothesis-seed=7``.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from functools import reduce
from typing import Any, NamedTuple

import httpx2
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.http_server import CHAT, COMPLETIONS, Site, chunks, cluster_served, status, text_of
from support.tiny_pair import make_pair, tiny_tokenizer
from support.tool_templates import HERMES_TEMPLATE

from pipedec.cluster.local import LocalCluster
from pipedec.core.values import choices as choices_of
from pipedec.core.values import field_hints, range_of
from pipedec.methods import METHODS, PROPOSERS
from pipedec.server.anthropic.protocol import MessagesBody
from pipedec.server.ollama.protocol import OllamaChatBody, OllamaGenerateBody
from pipedec.server.protocol import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from pipedec.threads import DIALECTS, load_dialect

pytestmark = pytest.mark.slow

AT_ONCE, IN_A_ROW = 8, 50
SECONDS = 150.0  # in which a request is answered on a busy machine
TOKENIZE, DETOKENIZE, MESSAGES = "/tokenize", "/detokenize", "/v1/messages"
API_CHAT, GENERATE = "/api/chat", "/api/generate"  # Ollama's
CONTROL_TOKENS = [token for name in ("apar", "parallel") for token in load_dialect(name).control_tokens]
CONTROL_IDS = range(300, 300 + len(CONTROL_TOKENS))
SIZES = {"padded": (320, 304), "beyond": (301, 320)}  # embeddings of target and draft, where the tokenizer has 308 tokens
Fields = st.SearchStrategy[dict[str, Any]]


def given_all(**values: st.SearchStrategy[Any]) -> Fields:
    return st.fixed_dictionaries(values)


def alone(**values: st.SearchStrategy[Any]) -> dict[str, Fields]:
    """Fields that may be given without others."""
    return {name: given_all(**{name: value}) for name, value in values.items()}


@st.composite
def methods(draw: st.DrawFn) -> dict[str, Any]:
    """A method with some of its options, small and large ones."""
    entry = METHODS[draw(st.sampled_from(list(METHODS)))]
    hints, options = field_hints(entry.options), {}
    for name in draw(st.lists(st.sampled_from(list(hints)), max_size=2, unique=True)) if hints else ():
        if name == "proposers":
            options[name] = draw(st.lists(st.sampled_from(PROPOSERS), min_size=1, max_size=2))
        elif words := range_of(hints[name]):
            most = int(words.removeprefix("1 to "))
            options[name] = draw(st.integers(1, min(8, most)) | st.integers(1, most))
        else:
            options[name] = draw(st.sampled_from(choices_of(hints[name])))
    return {"method": entry.name, "method_options": options}


flags = st.booleans()
tokens = st.integers(0, 299) | st.integers(0, 325)
ids = st.lists(tokens, min_size=1, max_size=12)
PIECES = ["</s>", "<|user|>", "[Fork]", "<Path>", " the ", "{", '"', "\n", "é"]
TEXTS = ["The pipeline is kept full", "Natalia sold 12 clips in April", "e", " ", "a" * 300, "東京 \U0001f680", "\0"]
pieces = st.lists(st.sampled_from(PIECES), min_size=1, max_size=4).map("".join)
texts = st.sampled_from(TEXTS) | pieces | st.text(min_size=1, max_size=20)

schemas = st.recursive(
    st.sampled_from([
        {}, {"type": "integer", "minimum": -3, "maximum": 99}, {"enum": ["red", "grün", None]}, {"const": {"a": [1]}},
        {"type": "string", "maxLength": 4}, {"type": "string", "pattern": "^[a-c]+$"}, {"type": "string", "format": "date"},
        {"type": ["null", "boolean"]}, {"type": "number", "multipleOf": 0.01}, {"$ref": "#"}, {"$ref": "http://127.0.0.1:1/"},
        {"enum": []}, {"not": {}},
        {"type": "integer", "minimum": 2, "maximum": 1}, {"type": "array", "minItems": 3, "maxItems": 2},
        {"type": "string", "pattern": "(a*)*b{1,999}"}, {"type": "string", "pattern": "(?=a)b"},
        {"type": "string", "allOf": [{"pattern": ".*a.{9}b.*"}, {"pattern": ".*c.{9}d.*"}]},
    ]),
    lambda inner: st.one_of(
        st.dictionaries(st.sampled_from(["a", "é", 'q"', ""]), inner, max_size=3).map(
            lambda of: {"type": "object", "properties": of, "required": list(of)[:2], "additionalProperties": False}
        ),
        st.builds(lambda of, most: {"type": "array", "items": of, "maxItems": most}, inner, st.integers(0, 3)),
        st.builds(lambda kind, of: {kind: of}, st.sampled_from(["anyOf", "oneOf", "allOf"]), st.lists(inner, min_size=1)),
    ),
    max_leaves=3,
)  # fmt: skip
patterns = st.sampled_from([
    "[a-z ]{8}", "a|b", ".*", "\\d+", "(a+)+$", "[^\\n]{0,200}", "\\p{L}{3}", "(?i)yes|no", "東+", "<\\|user\\|>", "^a$",
    "", "(", "a{0}", ".{5000}", "[]", "(.*a.{12}b){3}", "\\b",
])  # fmt: skip
grammars = st.sampled_from([
    'start: "a" | "b" start', 'start: /[a-z]{1,5}/ ("," /[0-9]/)*', 'root ::= "a" [0-9]+', 'root ::= root "a" | "b"',
    'start: "a"~1..9', 'start: (("a"?)*)*', 'start: %json {"type": "integer"}', "start: <|user|>", "start: <[300]>",
    "start: <[2]>", "start: start", "start: x", "", "%%%", 'start: "\\ud800"',
])  # fmt: skip
choices = st.lists(texts | st.just(""), max_size=4)
response_formats = st.one_of(
    given_all(type=st.sampled_from(["text", "json_object", "json", "json_schema"])),
    given_all(type=st.just("json_object"), schema=schemas),
    given_all(type=st.just("json"), value=schemas),
    given_all(type=st.just("json_schema"), json_schema=given_all(name=st.just("a"), schema=schemas)),
)
structured = st.one_of(
    given_all(json=schemas | schemas.map(json.dumps)), given_all(regex=patterns), given_all(grammar=grammars),
    given_all(choice=choices), given_all(json_object=flags),
)  # fmt: skip
structures = st.one_of(
    given_all(response_format=response_formats), given_all(structured_outputs=structured), given_all(guided_json=schemas),
    given_all(guided_regex=patterns), given_all(guided_choice=choices), given_all(guided_grammar=grammars),
    given_all(json_schema=schemas), given_all(regex=patterns), given_all(grammar=grammars), given_all(ebnf=grammars),
)  # fmt: skip
functions = given_all(name=st.sampled_from(["f", "g-1"]), parameters=schemas) | given_all(
    name=st.just("h"), description=texts, strict=flags
)
tools = st.lists(given_all(type=st.just("function"), function=functions), min_size=1, max_size=2)
tool_choices = st.sampled_from(["none", "auto", "required", {"type": "function", "function": {"name": "f"}}])

FREE = given_all(ignore_eos=flags) | given_all(ignore_eos=st.just(True), min_tokens=st.integers(0, 5))
THREADED = given_all(threads=st.sampled_from(DIALECTS)) | given_all(
    threads=st.sampled_from(["apar", "parallel"]),
    logit_bias=st.dictionaries(st.sampled_from(CONTROL_IDS).map(str), st.sampled_from([20, 100]), min_size=1, max_size=8),
)
CALLING = given_all(tools=tools, tool_choice=tool_choices, parallel_tool_calls=flags)
FORMS = {COMPLETIONS: [structures, FREE, THREADED], CHAT: [structures, FREE, THREADED, CALLING]}  # one excludes the others
GENERATION = alone(
    model=st.just("tiny"), max_completion_tokens=st.integers(1, 16), n=st.integers(1, 3), user=texts,
    temperature=st.sampled_from([0, 0.7, 1, 2, 1e-9, 1e300]), top_p=st.floats(0, 1, exclude_min=True), top_k=st.integers(-1, 400),
    min_p=st.floats(0, 1), seed=st.integers(-(2**63), 2**64 - 1), priority=st.integers(-2, 2),
    stop=texts | st.lists(texts, max_size=3), stop_token_ids=st.lists(tokens, max_size=5),
    presence_penalty=st.floats(-2, 2), frequency_penalty=st.floats(-2, 2),
    repetition_penalty=st.floats(0.5, 2) | st.floats(0, 1e300, exclude_min=True), repeat_penalty=st.floats(0.5, 2),
    n_predict=st.integers(-2, 16), truncate_prompt_tokens=st.integers(-1, 50), return_token_ids=flags, skip_special_tokens=flags,
    include_stop_str_in_output=flags,
    logit_bias=st.dictionaries(tokens.map(str), st.floats(-100, 100), max_size=4),
) | {
    "method": methods(),
    "stream": given_all(stream=flags) | given_all(
        stream=st.just(True),
        stream_options=st.fixed_dictionaries({}, optional={"include_usage": flags, "continuous_usage_stats": flags}),
    ),
}  # fmt: skip
CONVERSATION = alone(
    add_generation_prompt=flags,
    chat_template_kwargs=st.dictionaries(st.sampled_from(["bos_token", "thinking"]), texts | flags | st.none(), max_size=2),
)
THINKING: list[Any] = [{"type": "adaptive"}, {"type": "disabled"}, {"type": "enabled", "budget_tokens": 3}]
OPTIONAL = {
    COMPLETIONS: GENERATION | alone(
        echo=flags, logprobs=st.integers(0, 20), add_special_tokens=flags, prompt_logprobs=st.integers(0, 20)
    ) | {
        "n": st.integers(1, 3).map(lambda count: {"n": count, "best_of": count}),
        "tokens": given_all(echo=st.just(True), logprobs=st.integers(0, 20), return_tokens_as_token_ids=flags),
    },
    CHAT: GENERATION | CONVERSATION | alone(
        reasoning_effort=st.sampled_from(["low", "high"]), echo=flags, continue_final_message=flags, include_reasoning=flags,
        add_special_tokens=flags, documents=st.lists(given_all(text=texts), max_size=2),
    ) | {
        "logprobs": given_all(logprobs=st.just(True), top_logprobs=st.integers(0, 20), return_tokens_as_token_ids=flags),
    },
    TOKENIZE: CONVERSATION | alone(tools=tools, add_special_tokens=flags, return_token_strs=flags),
    DETOKENIZE: alone(model=st.just("tiny")),
    MESSAGES: {name: GENERATION[name] for name in ("temperature", "top_p", "top_k", "priority", "method")} | alone(
        stream=flags, system=texts, stop_sequences=st.lists(texts, max_size=3), thinking=st.sampled_from(THINKING),
        output_config=st.sampled_from([{"effort": "low"}, {"format": {"type": "json_schema", "schema": {"type": "integer"}}}]),
        tools=st.lists(given_all(name=st.sampled_from(["f", "g-1"]), input_schema=schemas), min_size=1, max_size=2),
        tool_choice=st.sampled_from([{"type": "any"}, {"type": "auto"}, {"type": "tool", "name": "f"}]),
    ),
}  # fmt: skip
options = st.fixed_dictionaries(
    {"num_predict": st.integers(1, 16)},
    optional={
        "temperature": st.sampled_from([0, 0.7, 1e-9]), "top_k": st.integers(-1, 400), "top_p": st.floats(0, 1, exclude_min=True),
        "min_p": st.floats(0, 1), "seed": st.integers(-1, 2**64 - 1), "stop": st.lists(texts, max_size=3),
        "repeat_penalty": st.floats(0.5, 2), "presence_penalty": st.floats(-2, 2), "frequency_penalty": st.floats(-2, 2),
        "num_ctx": st.integers(), "mirostat": st.integers(0, 2),
    },
)  # fmt: skip
OLLAMA = alone(
    model=st.sampled_from(["tiny", "tiny:latest"]), stream=flags, think=flags | st.sampled_from(["low", "high"]), options=options,
    format=st.sampled_from(["", "json"]) | schemas, keep_alive=st.sampled_from([0, -1, "5m"]), system=texts, raw=flags,
) | {"logprobs": given_all(logprobs=flags, top_logprobs=st.integers(0, 20))}  # fmt: skip
OPTIONAL |= {API_CHAT: OLLAMA | alone(tools=tools), GENERATE: OLLAMA}
calls = given_all(
    id=texts,
    function=given_all(name=st.sampled_from(["f", "größe"]), arguments=st.sampled_from(['{"a": 1}', "{", "", {"a": "b"}, "[]"])),
)
messages = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["user", "assistant", "system", "tool", "x"]),
            "content": texts | st.lists(given_all(type=st.just("text"), text=texts), max_size=3),
        },
        optional={"name": texts, "tool_calls": st.lists(calls, max_size=2), "tool_call_id": texts, "extra": texts},
    ),
    min_size=1,
    max_size=3,
)
blocks = st.one_of(
    given_all(type=st.just("text"), text=texts), given_all(type=st.just("thinking"), thinking=texts),
    given_all(type=st.just("tool_use"), id=texts, name=texts, input=st.sampled_from([{}, {"a": [1]}])),
    given_all(type=st.just("tool_result"), tool_use_id=texts, content=texts | st.lists(given_all(type=texts, text=texts))),
)  # fmt: skip
turns = st.lists(
    given_all(role=st.sampled_from(["user", "assistant", "system"]), content=texts | st.lists(blocks, max_size=3)),
    min_size=1, max_size=3,
)  # fmt: skip
NEEDED = {
    COMPLETIONS: given_all(
        prompt=texts | ids | st.lists(texts, min_size=1, max_size=2) | st.lists(ids, min_size=1, max_size=2),
        max_tokens=st.integers(1, 16),
    ),
    CHAT: given_all(messages=messages, max_tokens=st.integers(1, 16)),
    MESSAGES: given_all(model=st.just("tiny"), messages=turns, max_tokens=st.integers(1, 16)),
    TOKENIZE: given_all(prompt=texts) | given_all(messages=messages),
    DETOKENIZE: given_all(tokens=ids),
    API_CHAT: given_all(messages=messages, options=options),
    GENERATE: given_all(prompt=texts, options=options),
}
BODIES = {
    COMPLETIONS: CompletionBody, CHAT: ChatBody, TOKENIZE: TokenizeBody, DETOKENIZE: DetokenizeBody, MESSAGES: MessagesBody,
    API_CHAT: OllamaChatBody, GENERATE: OllamaGenerateBody,
}  # fmt: skip
UNKNOWN = ["x", "suffix", "lora", "\ud800", "messages", "prompt", "tools", "documents", "images"]
NESTED: list[Any] = reduce(lambda inner, _: [inner], range(300), [])
JUNK: list[Any] = [
    None, True, 0, -1, 1.5, 2**31, 2**63, 2**70, -(2**70), 10**4000, 1e308, 5e-324, float("nan"), float("inf"), "", "x", "1",
    "x" * 9999, "\ud800", "\udfff\0", [], {}, [None], [[]], [7] * 9999, ["a"] * 9999, NESTED, {"a": NESTED}, {"": ""},
    {"type": "x"}, {"9" * 50: 1}, [{"role": "user"}],
]  # fmt: skip


class Sent(NamedTuple):
    path: str
    body: bytes
    leaves_after: float | None = None  # seconds; None if the client stays


BESIDE = [
    Sent(COMPLETIONS, json.dumps({"max_tokens": 150, "ignore_eos": True, "stream": True, **more}).encode())
    for more in ({"prompt": TEXTS[0], "temperature": 0}, {"prompt": TEXTS[1], "temperature": 1, "seed": 5})
]


@st.composite
def requests(draw: st.DrawFn) -> Sent:
    rare = [MESSAGES] * 4 + [API_CHAT, GENERATE] * 2 + [TOKENIZE, DETOKENIZE]
    path = draw(st.sampled_from([COMPLETIONS, CHAT] * 9 + rare))
    body = draw(NEEDED[path])
    for name in draw(st.lists(st.sampled_from(list(OPTIONAL[path])), min_size=1, max_size=8, unique=True)):
        body = body | draw(OPTIONAL[path][name])
    if path in FORMS and draw(flags):
        body = body | draw(draw(st.sampled_from(FORMS[path])))
    if draw(st.integers(0, 7)) == 7:
        names = st.lists(st.sampled_from([*BODIES[path].model_fields, *UNKNOWN]), min_size=1, max_size=2)
        body = body | {name: draw(st.sampled_from(JUNK)) for name in draw(names)}
    content = json.dumps(body).encode()
    if draw(st.integers(0, 39)) == 39:
        content = draw(st.sampled_from([content[:-1], content[1:], content * 2, b"\xff" + content, b"[" * 9999, b"", b"null"]))
    return Sent(path, content, draw(st.sampled_from([None] * 16 + [0.0, 0.05, 0.2])))


@pytest.fixture(scope="module", params=SIZES)
def random_site(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Target and draft have different numbers of embeddings, and the tokenizer has tokens that only one of them knows."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(CONTROL_TOKENS)
    tokenizer.chat_template = HERMES_TEMPLATE
    pair = make_pair(tmp_path_factory.mktemp(request.param), tokenizer, *SIZES[request.param])
    with LocalCluster(pair.spec()) as cluster, cluster_served(cluster, pair) as site:
        yield site


def documents_of(text: str) -> list[dict[str, Any]]:
    """The body of a response, or the data of its events."""
    if text.startswith("event:"):
        return [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: ")]
    return chunks(text) if text.startswith(("data:", ":")) else [json.loads(text, parse_constant=pytest.fail)]


def wrong(sent: Sent, code: int, text: str) -> str | None:
    """What no response may be, with the body that did it; None if it is as it should be."""
    codes = [code]
    if code == 200 and sent.path in (API_CHAT, GENERATE):
        codes += [400 for line in text.splitlines() if "error" in json.loads(line, parse_constant=pytest.fail)]
    elif code == 200:
        errors = [document["error"] for document in documents_of(text) if "error" in document]
        codes += [error.get("code", 500 if error["type"] == "api_error" else 400) for error in errors]
    fits = all(one in (200, 503) or 400 <= one < 500 for one in codes)
    return None if fits else f"{code} {text[-500:]}\nfor {sent.path} {sent.body[:5000]!r}"


async def answers(site: Site, batch: list[Sent]) -> list[tuple[int, str]]:
    """Status and text of each response, first of those of ``BESIDE``; 499 for a client that has left."""
    room = asyncio.Semaphore(AT_ONCE)

    async def answer(sent: Sent) -> tuple[int, str]:
        try:
            async with asyncio.timeout(SECONDS if sent.leaves_after is None else sent.leaves_after):
                response = await client.post(sent.path, content=sent.body, headers={"content-type": "application/json"})
                return response.status_code, response.text
        except TimeoutError:
            return 504 if sent.leaves_after is None else 499, "no answer in time"

    async def in_turn(sent: Sent) -> tuple[int, str]:
        async with room:
            return await answer(sent)

    async with httpx2.AsyncClient(base_url=site.client.base_url, headers=site.client.headers, timeout=SECONDS) as client:
        return await asyncio.gather(*map(answer, BESIDE), *map(in_turn, batch))


@pytest.mark.in_turn(4)
@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.failure_case("H43")
def test_no_random_body_hurts_the_cluster_or_a_stream_beside_it(random_site: Site, half: int) -> None:
    sent: list[Sent] = []

    @settings(examples(2000), phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(requests())
    def draw(request: Sent) -> None:
        sent.append(request)

    draw()
    sent = sent[half::2]
    alone = asyncio.run(answers(random_site, []))
    assert all(text_of(chunks(text)) for _, text in alone)
    counted: Counter[int] = Counter()
    for batch in (sent[start : start + IN_A_ROW] for start in range(0, len(sent), IN_A_ROW)):
        answered = asyncio.run(answers(random_site, batch))
        beside, answered = answered[: len(BESIDE)], answered[len(BESIDE) :]
        assert not [found for one, got in zip(batch, answered, strict=True) if (found := wrong(one, *got))]
        after = status(random_site)
        assert (after.epoch, after.num_recoveries, after.is_recovering) == (0, 0, False), batch
        assert [text_of(chunks(text)) for _, text in beside] == [text_of(chunks(text)) for _, text in alone], batch
        counted.update(code for code, _ in answered)
    assert counted[200] > counted.total() / 3, f"else most of them test nothing: {counted}"
