"""APAR's rules, PASTA's rules and language, and a language model behind HTTP that annotates well, badly or not at all."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipedec.core.errors import PipedecError, UserError
from recipes.thread_models.annotation import ModelAnnotator, PastaRules, Rejected, annotation_prompt
from recipes.thread_models.chat_endpoint import ChatEndpoint
from recipes.thread_models.pasta_language import Malformed, parse, topic_of, written
from recipes.thread_models.structure import Fork, JoinPoint, Piece, ambiguity, paragraph_tree, plain_text, sentences

LIST = """Here is some advice:

1. Establish a routine: Go to bed at the same time.
2. **Manage stress:** Consider breathing
   exercises and walks.

   They help.

3. Mind `caffeine`: It stays for hours: six or more.

If it persists, ask a doctor."""
PARAGRAPHS = """Sleep matters. It repairs the body, e.g. muscles, and the mind.

So it is.

Light delays it. Screens are the worst of all!  """


def test_contents_of_an_ordered_list_are_forked() -> None:
    found = paragraph_tree(LIST)
    assert found is not None and found.rule == "list"
    assert found.pieces == (
        "Here is some advice:\n\n1. Establish a routine:",
        Fork(" Go to bed at the same time."),
        "\n2. **Manage stress:**",
        Fork(" Consider breathing\n   exercises and walks.\n\n   They help."),
        "\n\n3. Mind `caffeine`:",
        Fork(" It stays for hours: six or more."),
        "\n\nIf it persists, ask a doctor.",
    )


def test_paragraphs_are_forked_after_their_first_sentence() -> None:
    found = paragraph_tree(PARAGRAPHS)
    assert found is not None and found.rule == "paragraphs"
    assert found.pieces == (
        "Sleep matters.",
        Fork(" It repairs the body, e.g. muscles, and the mind."),
        "\n\nSo it is.\n\nLight delays it.",
        Fork(" Screens are the worst of all!"),
        "  ",
    )


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "Two sentences. But nothing follows them.",
        "1. One: long enough text\n2. Two: long enough text",
        "1. One, long enough\n2. Two, long enough\n3. Three, long enough",
        "At 10:30 we met.\n\nAt 11:45 we left.",
        "- A bullet. With two sentences.\n\n- Another bullet. With two sentences.",
    ],
)
def test_other_answers_are_unstructured(answer: str) -> None:
    assert paragraph_tree(answer) is None


@pytest.mark.parametrize(
    ("addition", "name"),
    [
        ("```python\nprint()\n```", "code"),
        ("For example:\n\n    print()", "code"),
        (r"It is \(x^2\).", "math"),
        ("See https://example.com.", "address"),
        ("| a | b |", "table"),
        ("[Fork]", "control"),
        ('<promise topic="a"/>', "control"),
    ],
)
def test_ambiguous_answers_are_unstructured(addition: str, name: str) -> None:
    for answer in (LIST, PARAGRAPHS):
        assert ambiguity(answer) is None
        assert ambiguity(f"{answer}\n\n{addition}") == name
        assert paragraph_tree(f"{answer}\n\n{addition}") is None


_LINE = st.sampled_from(
    ("1. One: the first point", "2. Two: ", "3. **Three:** of them", "10. Ten:\tof them all", "   - a bullet",
     "A word. Two words",
     "And so. On it goes! ", "   3. In: an inner point", "", "", " ", "\t", "e.g. this. That", "结束。还有更多的内容在这里。")
)  # fmt: skip


@given(
    st.one_of(st.lists(_LINE, max_size=14).map("\n".join), st.text(), st.lists(st.text(" \n.1:Aa"), max_size=9).map("\n\n".join))
)
def test_every_form_gives_the_answer_back(answer: str) -> None:
    assert "".join(sentences(answer)) == answer
    found = paragraph_tree(answer)
    if found is not None:
        assert found.forks and all(len(fork.text.strip()) >= 10 for fork in found.forks)
        assert plain_text(found.pieces) == answer


ANSWER = "Discs came in 1983. A joint venture of two firms made that possible. They changed how we hear music, too."
TAGGED = (
    "Discs came in 1983. <async topic='joint venture'>A joint venture of two firms made that possible.</async> "
    "<async topic='impact'>They changed how we hear music, too.</async>"
)


def words(text: str) -> int:
    return len(text.split())


def test_the_rules_write_promises_and_a_join_before_the_closing() -> None:
    answer = (
        "Its methods:\n\n1. `read()`: It reads up to some bytes of it.\n2. `close()`: It ends here.\n"
        "3. `the lines of a file`: They come one after the other.\n\nThat is all."
    )
    found = PastaRules(words, min_tokens=5).annotate("What?", answer)
    assert found is not None and found.rule == "list"
    assert written(found.pieces) == (
        'Its methods:\n\n1. `read()`:<promise topic="read()" tokens="10"/><async> It reads up to some bytes of it.</async>'
        '\n2. `close()`: It ends here.\n3. `the lines of a file`:<promise topic="lines file" tokens="10"/>'
        "<async> They come one after the other.</async><sync/>\n\nThat is all."
    )
    assert parse(written(found.pieces)) == list(found.pieces)
    solution = " He has 3 * 4 = 12 apples.\n" * 12
    found = PastaRules(words, 5, 10).annotate("What?", f"1. First:{solution}2. Second:{solution}".rstrip())
    assert found is not None and [fork.topic for fork in found.forks] == ["First", "Second"], "calculations are never cut"
    assert PastaRules(words, 5).annotate("What?", "One. It has a detail of many words.\n\nTwo has not.") is None, "saves nothing"


@given(st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=12), min_size=2, max_size=5))
def test_long_parts_are_cut_at_ends_of_sentences(parts: list[list[int]]) -> None:
    answer = "\n\n".join(" ".join("A" + " word" * (size - 1) + "." for size in part) for part in parts)
    found = PastaRules(words, min_tokens=10, block_tokens=20).annotate("What?", answer)
    forks = () if found is None else found.forks
    assert all(words(fork.text) >= 10 and fork.text.endswith(".") for fork in forks)
    assert all(words(fork.text) < 20 + 40 for fork in forks), "no block has a whole sentence more than it needs"
    assert found is None or plain_text(found.pieces) == answer


def test_topics_have_at_most_three_words_and_no_quotes() -> None:
    assert topic_of("3. **Manage daily stress:**") == "Manage daily stress"
    assert topic_of('The "quick" <brown> fox of the wood.') == "quick brown fox"
    assert topic_of("It is as it is of the") == "It is as" and topic_of("1. ---:") is None


_TEXT = st.text(st.sampled_from("ab <>/\n\"'="), min_size=1).filter(lambda text: "<" not in text)
_FORK = st.builds(Fork, _TEXT, st.sampled_from(("a", "a b c()", "it's")), st.integers(1, 40).map(lambda tens: 10 * tens))


@given(st.lists(st.tuples(_TEXT, _FORK, st.booleans()), max_size=5), _TEXT)
def test_what_is_written_is_read_again(groups: list[tuple[str, Fork, bool]], last: str) -> None:
    pieces: list[Piece] = [last]
    for text, fork, joined in groups:
        pieces += [text, fork, *([JoinPoint()] if joined else []), "\n"]
    merged: list[Piece] = []
    for piece in pieces:
        if merged and isinstance(piece, str) and isinstance(merged[-1], str):
            merged[-1] += piece
        else:
            merged.append(piece)
    assert parse(written(merged)) == merged
    assert plain_text(parse(written(merged))) == plain_text(merged)


@pytest.mark.parametrize(
    "text",
    [
        "<async topic='a'>one",
        "one</async>",
        "<async topic='a'>one <async topic='b'>two</async></async>",
        "<async>one</async>",
        "<async topic='a b c d'>one</async>",
        '<promise topic="a" tokens="10"/> text <async>one</async>',
        '<promise topic="a" tokens="12"/><async>one</async>',
        "<sync/> one",
        "<async topic='a'one</async>",
    ],
)
def test_malformed_tags_are_refused(text: str) -> None:
    with pytest.raises(Malformed):
        parse(text)


class Server:
    """An OpenAI-compatible server that answers what it is told; ``asked`` holds path, key and body of every request."""

    def __init__(self) -> None:
        self.replies: list[tuple[int, Any]] = []
        self.asked: list[tuple[str, str | None, dict[str, Any]]] = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                server.asked.append((self.path, self.headers.get("Authorization"), body))
                status, content = server.replies.pop(0)
                self.send_response(status)
                self.send_header("Retry-After", "0")
                self.end_headers()
                self.wfile.write(content if isinstance(content, bytes) else json.dumps(content).encode())

            def log_message(self, *arguments: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"

    def say(self, text: str | None) -> None:
        self.replies.append((200, {"choices": [{"message": {"role": "assistant", "content": text}}]}))


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    thread = threading.Thread(target=server.http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.http.shutdown()
    thread.join()
    server.http.server_close()


@pytest.fixture
def ask(server: Server) -> Callable[[], Any]:
    endpoint = ChatEndpoint(server.url + "/", "judge", "secret", timeout_s=20, tries=3, pause_s=0)
    return lambda: ModelAnnotator(endpoint, words).annotate("When?", ANSWER)


def test_a_model_annotates(server: Server, ask: Callable[[], Any]) -> None:
    for reply in (TAGGED, f"```json\n{json.dumps({'from': 'chatbot', 'value': TAGGED})}\n```"):
        server.say(reply)
        found = ask()
        assert found.rule == "model" and plain_text(found.pieces) == ANSWER
        assert [(fork.topic, fork.tokens) for fork in found.forks] == [("joint venture", 10), ("impact", 10)]
    path, key, body = server.asked[0]
    assert (path, key, body["model"], body["temperature"]) == ("/v1/chat/completions", "Bearer secret", "judge", 0)
    assert body["messages"] == [{"role": "user", "content": annotation_prompt("When?", ANSWER)}]
    server.say(ANSWER)
    assert ask() is None, "said in one piece"
    with pytest.raises(Rejected, match="control tokens"):
        ModelAnnotator(ChatEndpoint(server.url, "judge"), words).annotate("?", "It is written <sync/> so.")
    assert len(server.asked) == 3, "answers with tags of their own are not asked about"
    prompt = annotation_prompt("When {now}?", 'He said "1983".')
    assert r'"value": "He said \"1983\"."' in prompt and '"value": "When {now}?"' in prompt and "{conversation}" not in prompt


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (TAGGED.replace("firms", "companies"), "the text was changed"),
        (TAGGED.replace("</async>", ""), "unpaired"),
        (TAGGED.replace("impact", "what it did to us"), "a topic of 5 words"),
        (ANSWER.replace("in 1983.", "<async topic='year'>in 1983.</async>"), "fewer than five words"),
        (None, "gave no reply"),
    ],
)
def test_bad_annotations_are_refused(server: Server, ask: Callable[[], Any], reply: str | None, reason: str) -> None:
    server.say(reply)
    with pytest.raises(Rejected, match=reason):
        ask()


def test_a_busy_server_is_asked_again_and_refusals_end_at_once(server: Server, ask: Callable[[], Any]) -> None:
    server.replies += [(429, {}), (503, {})]
    server.say(TAGGED)
    assert ask().rule == "model" and len(server.asked) == 3
    for replies, error, words in (
        ([(500, {})] * 3, PipedecError, "does not answer after 3 tries: 500"),
        ([(401, {})], UserError, "refuses: 401"),
        ([(200, b"<html>")], UserError, "OpenAI-compatible"),
        ([(200, {"choices": []})], UserError, "OpenAI-compatible"),
        ([(400, {})], Rejected, "."),
    ):
        server.replies += replies
        with pytest.raises(error, match=words) as ended:
            ask()
        assert "\n" not in str(ended.value) and not server.replies
    with pytest.raises(PipedecError, match="refused"):
        ChatEndpoint("http://127.0.0.1:9/v1", "judge", tries=2, pause_s=0).complete("?")
