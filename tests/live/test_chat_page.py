"""The chat page in headless Chromium: questions by keyboard, answers as they come, errors, and nothing of a model as HTML."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from support.browsers import needs_chromium, sync_api, violations
from support.chats import CACHED_TOKENS, MODEL, PROMPT_TOKENS, ChatServer, Script, called, error, thought
from support.feeds import long_feed
from support.processes import wait_until

from pipedec.methods import METHOD_NAMES

pytestmark = needs_chromium
expect = sync_api.expect
HOSTILE = '<img src=x onerror="document.title = 1"><script>document.title = 2</script> [a](javascript:alert(1)) &lt;b&gt;'
MARKDOWN = """An **important** answer with `x * y` and *some* stress, not 2 * 3 * 4 or snake_case_names.
Its second line.

## Steps
1. first
   with more
2. second
   - below `a`
     - deeper
   ```sh
   ls -l

   cd ..
   ```
3. third

~~~
**not bold**
~~~
| a | b |
|---|:-:|
| 1 | `2` |

> quoted
---
* star
+ plus
"""
WITH_A_LONG_LINE = MARKDOWN + "word " * 900
SHOWN = "[...document.querySelectorAll('.answer > .text p')]"
FROM_END = (
    "(({ scrollHeight, clientHeight, scrollTop }) => scrollHeight - clientHeight - scrollTop)(document.getElementById('log'))"
)
LISTENS = """() => {
  const spoken = document.getElementById("spoken");
  window.heard = [];
  new MutationObserver(() => heard.push(spoken.textContent)).observe(spoken, { childList: true });
}"""
DRAWN = """(sizes) => {
  const root = document.createElement("div"), shown = new Markdown(root);
  for (const until of sizes) shown.write(text.slice(0, until));
  root.normalize();
  return root.innerHTML;
}"""


class Chat:
    """The page of a server. No script of it may raise."""

    def __init__(self, browser: Any, server: ChatServer, width: int = 800, scheme: str = "light") -> None:
        self.server = server
        viewport = {"width": width, "height": 800}
        context = browser.new_context(bypass_csp=True, viewport=viewport, color_scheme=scheme, reduced_motion="reduce")
        self.page = context.new_page()
        self.errors: list[str] = []
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.goto(server.url)

    def restart(self, *scripts: Script) -> None:
        """As if nothing had been asked or set yet."""
        self.page.unroute_all()
        self.page.evaluate("conversation.clear(), sessionStorage.clear(), localStorage.clear()")
        self.server.scripts = list(scripts)
        self.page.reload()
        self.server.bodies.clear()
        self.server.has_left.clear()

    def ask(self, question: str) -> None:
        self.page.fill("#question", question)
        self.page.keyboard.press("Enter")

    def ended(self) -> None:
        """Wait until no answer comes any more."""
        expect(self.page.locator("#send")).to_be_visible()
        expect(self.page.locator("#stop")).to_be_hidden()

    def texts(self) -> list[str]:
        return [text.strip() for text in self.page.locator(".answer > .text").all_text_contents()]

    def waits(self, is_true: Any) -> None:
        assert wait_until(lambda: self.page.wait_for_timeout(20) or is_true(), 20)


@pytest.fixture(scope="module")
def shared(browser: Any) -> Iterator[Chat]:
    with ChatServer().serving() as server:
        opened = Chat(browser, server)
        yield opened
        opened.page.context.close()


@pytest.fixture
def chat(shared: Chat) -> Iterator[Chat]:
    shared.restart(Script(["It ", "says ", "this."]))
    yield shared
    assert shared.errors == []


def test_a_question_is_asked_and_the_next_one_continues_the_conversation(chat: Chat) -> None:
    expect(chat.page).to_have_title("tiny-chat – pipedec chat")
    expect(chat.page.locator("#question")).to_be_focused()
    chat.page.keyboard.type("hello")
    chat.page.keyboard.press("Shift+Enter")
    chat.page.keyboard.type("you")
    chat.page.keyboard.press("Enter")
    chat.ended()
    assert chat.texts() == ["It says this."]
    chat.ask("and now?")
    chat.ended()
    first, second = chat.server.bodies
    assert first["messages"] == [{"role": "user", "content": "hello\nyou"}]
    assert second["messages"] == [
        *first["messages"], {"role": "assistant", "content": "It says this."}, {"role": "user", "content": "and now?"},
    ]  # fmt: skip
    assert first["model"] == MODEL and first["stream"] and first["stream_options"]["include_usage"]
    figures = chat.page.locator(".figures").first
    for words in ("3 tokens", "ms to the first", "ms per token", f"{CACHED_TOKENS} of {PROMPT_TOKENS} prompt tokens cached"):
        expect(figures).to_contain_text(words)


def test_an_answer_that_is_stopped_is_cancelled_and_its_text_stays_also_after_a_reload(chat: Chat) -> None:
    chat.server.scripts = [Script(["The beginning", threading.Event()])]
    chat.ask("go on")
    expect(chat.page.locator(".answer > .text")).to_have_text("The beginning")
    chat.page.keyboard.press("Escape")
    chat.ended()
    chat.waits(chat.server.has_left.is_set)
    expect(chat.page.locator(".figures")).to_contain_text("1 token")
    chat.page.reload()
    expect(chat.page.locator(".figures")).to_contain_text("stopped")
    assert chat.texts() == ["The beginning"]
    assert chat.page.locator(".question p").text_content() == "go on"


def test_a_reload_in_the_middle_keeps_what_has_come(chat: Chat) -> None:
    chat.server.scripts = [Script(["The beginning", threading.Event()])]
    chat.ask("go on")
    expect(chat.page.locator(".answer > .text")).to_have_text("The beginning")
    chat.page.reload()
    expect(chat.page.locator(".figures")).to_contain_text("stopped")
    assert chat.texts() == ["The beginning"]


def test_thoughts_are_folded_until_the_reader_opens_them(chat: Chat) -> None:
    middle, end = threading.Event(), threading.Event()
    chat.server.scripts = [Script([thought("two wo"), thought("rds"), middle, thought(" and more"), end, "So."])]
    chat.ask("think")
    thoughts = chat.page.locator(".thoughts")
    summary = thoughts.locator("summary")
    expect(summary).to_contain_text("Thinking for")
    expect(summary).to_contain_text("2 words")
    assert thoughts.get_attribute("open") is None
    summary.press("Enter")
    middle.set()
    expect(thoughts.locator(".text")).to_have_text("two words and more")
    assert thoughts.get_attribute("open") is not None
    end.set()
    chat.ended()
    expect(summary).to_contain_text("Thought for")
    expect(summary).to_contain_text("4 words")
    assert thoughts.get_attribute("open") is not None and chat.texts() == ["So."]


def test_calls_are_plain_text(chat: Chat) -> None:
    chat.server.scripts = [Script([called("find", ""), called("", '{"x":'), called("", "1}")], "tool_calls")]
    chat.ask("call")
    expect(chat.page.locator(".calls")).to_have_text('find({"x":1})')


def test_a_key_is_asked_for_once_and_kept_as_the_live_page_keeps_it(browser: Any) -> None:
    with ChatServer(Script(["Yes."]), key="secret").serving() as server:
        chat = Chat(browser, server)
        for key, title in (("wrong", "asks for a key"), ("secret", "does not know the key")):
            expect(chat.page.locator("#key-title")).to_contain_text(title)
            expect(chat.page.locator("#key")).to_be_focused()
            chat.page.fill("#key", key)
            chat.page.keyboard.press("Enter")
        expect(chat.page).to_have_title("tiny-chat – pipedec chat")
        chat.ask("hello")
        chat.ended()
        assert chat.texts() == ["Yes."] and chat.page.evaluate("sessionStorage.getItem('pipedec-key')") == "secret"
        chat.page.evaluate("server.key = 'old'")
        chat.ask("again")
        expect(chat.page.locator("#key")).to_be_focused()
        chat.page.keyboard.press("Escape")
        expect(chat.page.locator(".error").last).to_contain_text("give a valid API key")
        assert chat.errors == []
        chat.page.context.close()


@pytest.mark.parametrize(
    ("script", "message", "text"),
    [
        (Script([error("max_tokens must be at least 1")], status=400), "max_tokens must be at least 1", ""),
        (Script([error("the queue is full")], status=503), "the queue is full", ""),
        (Script(["a gateway's own page"], status=502), "The server answers with status 502.", ""),
        (Script(["Half", error("rank 3 was lost")]), "rank 3 was lost", "Half"),
        (Script(["Half"], finish=None), "The answer has broken off.", "Half"),
    ],
    ids=["refused", "full", "no document", "in the middle", "broken off"],
)
def test_an_error_is_one_line_and_the_question_can_be_tried_again(chat: Chat, script: Script, message: str, text: str) -> None:
    chat.server.scripts = [script, Script(["Now."])]
    chat.ask("hello")
    expect(chat.page.locator(".error span")).to_have_text(message)
    assert chat.texts() == [text]
    chat.page.locator(".error button").click()
    expect(chat.page.locator(".answer > .text")).to_have_text("Now.")
    assert [body["messages"] for body in chat.server.bodies] == 2 * [[{"role": "user", "content": "hello"}]]
    expect(chat.page.locator(".error")).to_be_hidden()


def test_a_server_that_has_gone_is_one_line_too(chat: Chat) -> None:
    chat.page.route("**/v1/chat/completions", lambda route: route.abort())
    chat.ask("hello")
    expect(chat.page.locator(".error span")).to_have_text("The server does not answer.")


def test_the_last_answer_is_made_again_and_the_last_question_edited(chat: Chat) -> None:
    chat.server.scripts = [Script([text]) for text in ("one", "two", "three")]
    chat.ask("first")
    chat.ended()
    chat.page.get_by_role("button", name="Try again").click()
    expect(chat.page.locator(".answer > .text")).to_have_text("two")
    chat.ended()
    chat.page.keyboard.press("ArrowUp")
    expect(chat.page.locator("#editing")).to_be_visible()
    chat.page.keyboard.press("Escape")
    expect(chat.page.locator("#question")).to_have_value("")
    chat.page.get_by_role("button", name="Edit").click()
    chat.page.keyboard.type(" edited")
    chat.page.keyboard.press("Enter")
    expect(chat.page.locator(".answer > .text")).to_have_text("three")
    asked = [body["messages"] for body in chat.server.bodies]
    assert asked == [[{"role": "user", "content": question}] for question in ("first", "first", "first edited")]


def test_a_new_conversation_begins_empty_and_the_last_one_comes_back(chat: Chat) -> None:
    chat.ask("hello")
    chat.ended()
    chat.page.get_by_role("button", name="New").click()
    expect(chat.page.locator(".turn")).to_have_count(0)
    expect(chat.page.locator("#question")).to_be_focused()
    chat.page.get_by_role("button", name="Back to the last conversation").click()
    assert chat.texts() == ["It says this."]


def test_a_new_conversation_in_the_middle_of_an_answer_cancels_it(chat: Chat) -> None:
    chat.server.scripts = [Script(["The beginning", threading.Event()]), Script(["Another."])]
    chat.ask("go on")
    expect(chat.page.locator(".answer > .text")).to_have_text("The beginning")
    chat.page.get_by_role("button", name="New").click()
    chat.waits(chat.server.has_left.is_set)
    chat.ask("hello")
    expect(chat.page.locator(".answer > .text")).to_have_text("Another.")
    chat.ended()
    assert [message["content"] for message in chat.server.bodies[1]["messages"]] == ["hello"]


def test_settings_are_sent_and_kept(chat: Chat) -> None:
    offered = chat.page.locator("#method option").all_text_contents()
    assert offered[1:] == list(METHOD_NAMES)
    chat.page.get_by_text("Settings").click()
    for field, value in (("System prompt", "Be brief."), ("Temperature", "0"), ("Max tokens", "12")):
        chat.page.get_by_label(field).fill(value)
    chat.page.get_by_label("Method").select_option("pp")
    chat.page.reload()
    chat.ask("hello")
    chat.ended()
    (body,) = chat.server.bodies
    assert (body["temperature"], body["max_tokens"], body["method"]) == (0, 12, "pp")
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}


def test_without_settings_the_server_decides(chat: Chat) -> None:
    chat.ask("hello")
    chat.ended()
    assert not {"temperature", "max_tokens", "method"} & chat.server.bodies[0].keys()


def test_what_a_model_writes_stays_text(chat: Chat) -> None:
    hostile = HOSTILE.replace("|", "")
    places = ["{}", "**{}**", "- {}", "| {} |", "# {}", "> {}", "```{}", "{}\n```"]
    chat.server.scripts = [Script([thought(hostile), "\n\n".join(place.replace("{}", hostile) for place in places)])]
    chat.ask(HOSTILE)
    chat.ended()
    assert chat.texts()[0].count(hostile) == len(places) and chat.page.locator(".question p").text_content() == HOSTILE
    assert chat.page.locator("#turns :is(img, script, a, iframe)").count() == 0
    expect(chat.page).to_have_title("tiny-chat – pipedec chat")


def test_markdown_is_drawn_the_same_however_it_arrives(chat: Chat) -> None:
    chat.page.evaluate("(given) => { window.text = given; }", WITH_A_LONG_LINE)
    whole = chat.page.evaluate(DRAWN, [len(WITH_A_LONG_LINE)])
    for step in (1, 7, 100):
        assert chat.page.evaluate(DRAWN, [*range(step, len(WITH_A_LONG_LINE), step), len(WITH_A_LONG_LINE)]) == whole
    for part in (
        "<strong>important</strong>", "<code>x * y</code>", "<em>some</em>", "2 * 3 * 4", "<h3>Steps</h3>",
        "<li>first\nwith more</li>", "ls -l\n\ncd ..\n", "<li>third</li>", "<span>**not bold**\n</span>", "<th>a</th>",
        "<td><code>2</code></td>", "<blockquote>quoted</blockquote><hr>", "<ul><li>star</li><li>plus",
    ):  # fmt: skip
        assert part in whole, part
    assert whole.count("<ol>") == 1 and whole.count("<figure>") == 2


def test_what_has_been_drawn_of_a_long_answer_is_not_drawn_again(chat: Chat) -> None:
    gate = threading.Event()
    chat.server.scripts = [Script(["A paragraph.\n\n" * 2000, gate, "The end."])]
    chat.ask("go on")
    expect(chat.page.locator(".answer > .text p")).to_have_count(2000)
    chat.page.evaluate(f"window.first = {SHOWN}")
    gate.set()
    chat.ended()
    assert chat.page.evaluate(f"{SHOWN}.filter((one, at) => one === first[at]).length") == 2000


def test_the_end_stays_in_sight_unless_the_reader_scrolls_up(chat: Chat) -> None:
    gates = [threading.Event() for _ in range(2)]
    part = "A line.\n\n" * 60
    chat.server.scripts = [Script([part, gates[0], part, gates[1], part])]
    chat.ask("go on")
    for count in (60, 120):
        expect(chat.page.locator(".answer > .text p")).to_have_count(count)
        chat.waits(lambda: chat.page.evaluate(FROM_END) < 2)
        gates[0].set()
    chat.page.locator("#log").hover()
    chat.page.mouse.wheel(0, -300)
    chat.waits(lambda: chat.page.evaluate(FROM_END) > 250)
    top = chat.page.evaluate("document.getElementById('log').scrollTop")
    gates[1].set()
    chat.ended()
    assert chat.page.evaluate("document.getElementById('log').scrollTop") == top
    chat.page.get_by_role("button", name="Newest").click()
    chat.waits(lambda: chat.page.evaluate(FROM_END) < 2)


def test_a_screen_reader_hears_whole_sentences_and_not_every_token(chat: Chat) -> None:
    chat.page.evaluate(LISTENS)
    chat.server.scripts = [Script(["One ", "word", ". ", "And ", "**another**."])]
    chat.ask("speak")
    chat.ended()
    chat.waits(lambda: chat.page.evaluate("heard.length"))
    assert chat.page.evaluate("heard") == ["One word. And another. The answer is complete."]
    assert chat.page.locator("#log").get_attribute("aria-live") == "off"


def test_the_picture_is_beside_the_chat_as_wide_as_the_reader_wants_or_not_at_all(browser: Any) -> None:
    with ChatServer(frames=long_feed(40)).serving() as server:
        chat = Chat(browser, server, 1280)
        live = chat.page.frame_locator("iframe")
        expect(live.locator("canvas")).to_be_visible()
        for hidden in ("header .button", ".legend", ".transport", ".answers"):
            expect(live.locator(hidden).first).to_be_hidden()
        width = "document.getElementById('picture').clientWidth"
        before = chat.page.evaluate(width)
        chat.page.focus("#split")
        chat.page.keyboard.press("ArrowLeft")
        assert chat.page.evaluate(width) == before + 24
        chat.page.click("#theme")
        expect(live.locator("html")).to_have_attribute("data-theme", "dark")
        chat.page.reload()
        expect(live.locator("html")).to_have_attribute("data-theme", "dark")
        assert chat.page.evaluate(width) == before + 24
        chat.page.get_by_role("button", name="Pipeline").click()
        chat.page.reload()
        expect(chat.page.locator("#show")).to_have_attribute("aria-pressed", "false")
        expect(chat.page.locator("iframe")).to_have_count(0)
        assert chat.errors == []
        chat.page.context.close()


@pytest.mark.fast_cases("360-dark", "1280-light")
@pytest.mark.parametrize(("width", "scheme"), [(360, "light"), (360, "dark"), (1280, "light"), (1280, "dark")])
def test_it_fits_and_is_accessible(browser: Any, width: int, scheme: str) -> None:
    scripts = [Script([thought("hm"), MARKDOWN]), Script([error("the queue is full")], status=503)]
    with ChatServer(*scripts, frames=long_feed(40)).serving() as server:
        chat = Chat(browser, server, width, scheme)
        expect(chat.page.locator("#picture")).to_be_visible(visible=width > 900)
        assert violations(chat.page) == []
        for question in ("hello", "another"):
            chat.ask(question)
            chat.ended()
        if width < 900:
            chat.page.click("#show")
        expect(chat.page.frame_locator("iframe").locator("canvas")).to_be_visible()
        chat.page.locator(".thoughts summary").first.click()
        chat.page.locator("#settings summary").click()
        assert violations(chat.page) == []
        assert chat.page.evaluate("document.documentElement.scrollWidth") <= width
        assert chat.page.evaluate("document.documentElement.scrollHeight") <= 800
        chat.page.goto(f"{server.url}/live?compact")
        chat.page.locator("canvas").wait_for()
        assert violations(chat.page) == []
        assert chat.errors == []
        chat.page.context.close()
