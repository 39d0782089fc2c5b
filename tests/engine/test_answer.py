"""What a client reads of an answer: text, document order of threads, stop strings, log-probabilities, news of each thread."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from pipedec.client.reply import Reply
from pipedec.core.errors import UserError
from pipedec.core.request import TokenizedRequest
from pipedec.core.sampling import SamplingParams, StructuredOutputs
from pipedec.core.verdict import Accepted, Verdict
from pipedec.directories import reference_pair
from pipedec.engine.output import Answer
from pipedec.engine.threaded_output import ThreadedAnswer
from pipedec.messages.events import CompletionEvent, LogprobsEvent, ThreadNews, TokensEvent
from pipedec.text.prompt import Prompter
from pipedec.text.tokenizer import Tokenizer
from pipedec.threads import ThreadedSequence, bind, load_dialect
from pipedec.threads.sequences import Sequences

TARGET = reference_pair() / "target"
PROMPT = (20, 21, 22)
END = "<|end|>"
USER = Tokenizer(TARGET).token_id("<|user|>")


@pytest.fixture(scope="module")
def prompter() -> Prompter:
    return Prompter(TARGET, 2048)


class Telling:
    """An answer, and what the client has heard of it. ``dialect`` None: in one thread."""

    def __init__(self, prompter: Prompter, dialect: str | None, show_threads: bool = False, **sampling: Any) -> None:
        params = SamplingParams(**{"max_tokens": 200, **sampling})
        text = None if dialect is None else load_dialect(dialect).to_json()
        new_sequence = Sequences(TARGET).maker(len(PROMPT), params, text)
        asked = TokenizedRequest(0, PROMPT, params, threads=text)
        self._prompter = prompter
        self.answer = (
            Answer(asked, prompter, 2)
            if text is None
            else ThreadedAnswer(asked, prompter, 2, new_sequence, show_threads=show_threads)
        )
        self.text = ""
        self.token_ids: list[int] = []

    def ids(self, text: str) -> list[int]:
        found: list[int] = self._prompter.tokenizer.encode(text, add_special_tokens=False)
        return found

    def say(self, finished: str | None = None, **texts: str) -> str:
        """The text that a verdict adds."""
        accepted = tuple(Accepted(int(name[1:]), tuple(self.ids(text))) for name, text in texts.items())
        self.verdict = self.answer.cut(Verdict(accepted, finished))
        [event] = self.answer.news()
        assert isinstance(event, TokensEvent)
        self.event = event
        self.text += self.event.text
        self.token_ids += self.event.token_ids
        assert self.answer.completion.text == self.text and self.answer.completion.token_ids == self.token_ids
        assert self.answer.completion.finish_reason == self.verdict.finished
        return self.event.text

    @property
    def has_ended(self) -> bool:
        return self.verdict.finished is not None

    def completed(self) -> CompletionEvent:
        return self.answer.completed()

    def threads(self) -> dict[str, Any]:
        found = self.completed().completion.threads
        assert found is not None
        return found


def test_a_stop_string_cuts_the_verdict_of_an_answer_in_one_thread(prompter: Prompter) -> None:
    """Every rank replays the same, cut verdict."""
    telling = Telling(prompter, None, stop=("st Tw",))
    assert telling.say(t0="One first") == "One fir" and not telling.has_ended
    assert telling.say(t0=" Two three four") == ""
    assert telling.text == "One fir" and telling.verdict == Verdict.of(*telling.ids(" Two"), finished="stop")
    assert prompter.text(telling.token_ids) == "One first Two"
    assert telling.completed().sampled is None and telling.completed().completion.threads is None


@pytest.mark.parametrize("dialect", [None, "apar"])
@pytest.mark.failure_case("H35")
def test_a_special_token_that_a_stop_string_names_ends_an_answer(prompter: Prompter, dialect: str | None) -> None:
    telling = Telling(prompter, dialect, stop=(" two<|user|>",))
    assert telling.say(t0="One<|user|>") == "One"
    assert telling.say(t0=" two<|user|> three") == "" and telling.answer.completion.finish_reason == "stop"
    assert telling.token_ids == telling.ids("One<|user|> two<|user|>")


@pytest.mark.parametrize("dialect", [None, "apar"])
@pytest.mark.parametrize(
    ("said", "finished", "params", "reason"),
    [
        (END, "stop", {}, None), (END, "stop", {"stop": (" two",)}, None), (" two three", None, {"stop": (" two",)}, " two"),
        (" two" + END, "stop", {"stop": (" two",)}, " two"), (" two", "length", {"stop_token_ids": (40,)}, None),
        ("<|user|>", "stop", {"stop_token_ids": (40, USER)}, USER), (" two", "cancelled", {}, None),
    ],
)  # fmt: skip
def test_an_answer_knows_what_ended_it(
    prompter: Prompter, dialect: str | None, said: str, finished: str | None, params: dict[str, Any], reason: str | int | None
) -> None:
    """The stop string or the id of the stop token, not the model's end token."""
    telling = Telling(prompter, dialect, **params)
    telling.say(t0="One")
    telling.say(finished, t0=said)
    assert telling.has_ended and telling.completed().completion.stop_reason == reason


@pytest.mark.parametrize(
    ("params", "text", "texts"),
    [
        ({}, "One. first Two.", ["One. Two.", " first"]),
        ({"skip_special_tokens": False}, "One.<|user|> first<|user|> Two.", ["One.<|user|> Two.", " first<|user|>"]),
        (
            {"skip_special_tokens": False, "include_stop_str_in_output": True},
            f"One.<|user|> first<|user|> Two.{END}", ["One.<|user|> Two.", " first<|user|>"],
        ),
    ],
)  # fmt: skip
def test_control_tokens_of_threads_are_no_text_even_if_special_tokens_are(
    prompter: Prompter, params: dict[str, Any], text: str, texts: list[str]
) -> None:
    telling = Telling(prompter, "apar", show_threads=True, **params)
    telling.say(t0="One.<|user|>[Fork] Two." + END)
    telling.say("stop", t1=f" first<|user|>{END}")
    assert telling.text == text and [thread["text"] for thread in telling.threads()["threads"]] == texts
    assert [news.text for news in telling.event.threads or () if news.path == (0,)] == [texts[1]]


@pytest.mark.parametrize("finished", ["length", "cancelled", "stop"])
def test_what_was_held_back_is_told_at_the_end(prompter: Prompter, finished: str) -> None:
    """Text that might begin a stop string, and what stands behind a thread that runs."""
    telling = Telling(prompter, None, stop=("first light",))
    assert telling.say(t0="One first") == "One "
    assert telling.say(finished, t0=" l" + END * (finished == "stop")) == "first l"
    telling = Telling(prompter, "apar")
    telling.say(t0="One.[Fork] Two.", t1=" fir")
    assert telling.say(finished, t1="st") == "st Two."


def test_threads_are_read_in_document_order_whichever_ends_first(prompter: Prompter) -> None:
    telling = Telling(prompter, "apar")
    assert telling.say(t0="One.[Fork]") == "One."
    assert telling.say(t0=" Two.[Fork]") == ""
    assert telling.say(t0=" Three." + END, t2=" second" + END) == ""
    assert telling.say(t1=" first") == " first"
    assert telling.say("stop", t1=END) == " Two. second Three."
    assert telling.text == "One. first Two. second Three."
    assert telling.has_ended and telling.answer.completion.finish_reason == "stop"
    assert prompter.text(telling.token_ids) == telling.text
    told = telling.threads()
    assert [(tuple(thread["path"]), thread["ended_by"]) for thread in told["threads"]] == [
        ((), "stop"),
        ((0,), "stop"),
        ((1,), "stop"),
    ]
    assert [thread["text"] for thread in told["threads"]] == ["One. Two. Three.", " first", " second"]
    assert told["metrics"]["threads"] == 3 and told["anomalies"] == {}


def test_threads_are_told_as_far_as_the_answer_goes(prompter: Prompter) -> None:
    """How much was decoded behind the cut depends on who was faster."""
    telling = Telling(prompter, "apar", max_tokens=8)
    telling.say(t0="a[Fork]b[Fork]c")
    telling.say(t1="x", t2="q")
    telling.say(t1="y")
    telling.say(t1="z")
    telling.say("length", t1="w")
    told = telling.threads()
    assert prompter.tokenizer.decode(telling.answer.completion.token_ids, skip_special_tokens=False) == "a[Fork][Child]xyzwb"
    assert [(thread["text"], thread["tokens"]) for thread in told["threads"]] == [("ab", 3), ("xyzw", 5)]
    assert told["metrics"]["threads"] == 2


def test_tags_are_not_shown_but_their_tails_are(prompter: Prompter) -> None:
    telling = Telling(prompter, "pasta")
    telling.say(t0='One<promise tokens="5"/')
    assert telling.text == "One", "it may yet be text"
    assert telling.say(t0="> two") == ""
    assert telling.say(t1=" body</async>") == " body two"
    telling.say(t0="<sync/> three" + END)
    telling.say("stop")
    assert telling.text == "One body two three"
    broken = Telling(prompter, "pasta")
    broken.say(t0="One<promise two" + END)
    broken.say("stop")
    assert broken.text == "One two" and broken.threads()["anomalies"] == {"opener_not_completed": 1}


def test_a_tail_is_shown_where_it_stands(prompter: Prompter) -> None:
    """Text behind the end of a tag, in the token that completes it."""
    [last] = prompter.tokenizer.encode("!", add_special_tokens=False)
    tokenizer = prompter.tokenizer
    bound = bind(load_dialect("pasta"), tokenizer.token_id, lambda token: "/>!" if token == last else "")
    telling = Telling(prompter, "pasta")
    telling.answer = ThreadedAnswer(telling.answer.asked, prompter, 2, lambda: ThreadedSequence(bound, 3, (), 50))
    assert telling.say(t0="One<promise!") == "One!"
    telling.say(t0=" two", t1=" body</async>")
    assert telling.text == "One! body two"


def test_a_stop_string_counts_in_document_order_and_across_threads(prompter: Prompter) -> None:
    telling = Telling(prompter, "apar", stop=("st Tw",))
    telling.say(t0="One.[Fork] Two. Three.")
    assert not telling.has_ended and telling.text == "One."
    assert telling.say(t1=" first") == " fir", "what may become a stop string is held back"
    assert telling.say(t1=END) == ""
    assert telling.answer.completion.finish_reason == "stop"
    assert telling.text == "One. fir"
    document = prompter.text(telling.token_ids)
    assert "st Tw" in document and "Three" not in document
    assert len(telling.completed().sampled or ()) == len(telling.token_ids)


def test_a_stop_string_that_only_a_threads_own_text_holds_does_not_stop(prompter: Prompter) -> None:
    """Between the two words of the parent stands its child."""
    telling = Telling(prompter, "apar", stop=("One. Two",))
    telling.say(t0="One.[Fork] Two." + END)
    telling.say("stop", t1=" first" + END)
    assert telling.text == "One. first Two."


@pytest.mark.parametrize(("last", "finished"), [(" more" + END, None), (" more", "length")])
def test_a_stop_string_behind_another_thread_does_not_cut_what_stands_before(
    prompter: Prompter, last: str, finished: str | None
) -> None:
    """The parent says it first in time, but its child, which ends later or with the answer, stands before it."""
    telling = Telling(prompter, "apar", stop=("Two",))
    assert telling.say(t0="One.[Fork] Two. Three.") == "One."
    assert telling.say(t1=" first") == " first"
    assert not telling.has_ended
    telling.say(finished, t1=last)
    assert telling.text == "One. first more "
    assert telling.answer.completion.finish_reason == (finished or "stop")


@pytest.mark.usefixtures("redis_client")
def test_log_probabilities_follow_the_document(prompter: Prompter) -> None:
    """``sampled`` says which of all accepted tokens each token of the document is; the forced one was never sampled."""
    telling = Telling(prompter, "apar", logprobs=0)
    telling.say(t0="a[Fork]")
    telling.say(t0="b", t1="x")
    telling.say("stop", t0=END, t1="y" + END)
    event = telling.completed()
    written = [prompter.tokenizer.decode([token], skip_special_tokens=False) for token in telling.token_ids]
    assert written == ["a", "[Fork]", "[Child]", "x", "y", END, "b", END]
    assert event.sampled == [0, 1, -1, 3, 5, 6, 2, 4]

    logprobs = [[[100 + index, -float(index)]] for index in range(7)]
    reply = Reply(0, lambda delta: None)
    for said in (LogprobsEvent(logprobs), event):
        reply.take("0", said)
    completion = reply.completion
    forced = prompter.tokenizer.token_id("[Child]")
    assert completion is not None and completion.logprobs is not None
    assert [list(entry) for entry in completion.logprobs] == [[100], [101], [forced], [103], [105], [106], [102], [104]]
    assert completion.logprobs[2] == {forced: 0.0}


def test_news_of_each_thread_come_as_it_speaks(prompter: Prompter) -> None:
    telling = Telling(prompter, "parallel", show_threads=True)
    telling.say(t0="One.<Parallel>")
    assert telling.event.threads == [ThreadNews((), "One.", "running", 4), ThreadNews((0,), "", "running", 1)]
    telling.say(t0="<Conclusion>", t1=" first")
    assert [(one.path, one.text, one.state) for one in telling.event.threads or ()] == [((0,), " first", "running")]
    telling.say(t1="</Path>")
    news = {one.path: one for one in telling.event.threads or ()}
    assert news[0,].state == "ended" and news[0,].text == ""
    telling = Telling(prompter, "apar")
    telling.say(t0="One.[Fork]")
    assert telling.event.threads is None, "nobody asked for them"


def test_dialects_need_the_targets_tokens(tmp_path: Path) -> None:
    sequences = Sequences(TARGET)
    own = load_dialect("apar").to_json().replace("[Fork]", "[Split]")
    with pytest.raises(UserError, match=r"the tokenizer has no token '\[Split\]', which dialect apar needs"):
        sequences.maker(3, SamplingParams(), own)
    with pytest.raises(UserError, match="the dialect"):
        sequences.maker(3, SamplingParams(), "{")
    with pytest.raises(UserError, match="no tokenizer in"):
        (tmp_path / "config.json").write_text((TARGET / "config.json").read_text())
        Sequences(tmp_path).maker(3, SamplingParams(), load_dialect("apar").to_json())


@pytest.mark.failure_case("M18")
def test_an_end_token_that_only_the_tokenizer_knows_ends_answers(tmp_path: Path) -> None:
    """Structured ones, too."""
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TARGET / file, tmp_path)
    config = json.loads((TARGET / "config.json").read_text()) | {"eos_token_id": None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    sequences, structure = Sequences(tmp_path), StructuredOutputs(regex="a")
    [end] = Prompter(TARGET, 2048).tokenizer.encode(END, add_special_tokens=False)
    for params, ends in ((SamplingParams(), "stop"), (SamplingParams(ignore_eos=True), None)):
        sequence = sequences.maker(3, params)()
        sequence.accept_token(0, end)
        assert sequence.finished == ends
    sequences.check(structure)
    sequences.maker(3, SamplingParams(structured_outputs=structure))()


def test_what_ends_a_thread_is_what_ends_an_answer() -> None:
    """The model's own end tokens, unless they are ignored, and the request's."""
    sequences = Sequences(TARGET)
    [end] = Prompter(TARGET, 2048).tokenizer.encode(END, add_special_tokens=False)
    for params, token, ends in (
        (SamplingParams(), end, True),
        (SamplingParams(ignore_eos=True), end, False),
        (SamplingParams(ignore_eos=True, stop_token_ids=(40,)), 40, True),
        (SamplingParams(), 40, False),
    ):
        for dialect in (None, load_dialect("apar").to_json()):
            sequence = sequences.maker(3, params, dialect)()
            sequence.accept_token(0, token)
            assert (sequence.finished == "stop") == ends and sequence.can_fork == (dialect is not None)
    new_sequence = sequences.maker(3, SamplingParams(max_tokens=7))
    assert new_sequence() is not new_sequence()
    assert (new_sequence().max_tokens, new_sequence().prompt_length) == (7, 3)


def test_every_sequence_of_a_structured_answer_has_a_grammar_of_its_own() -> None:
    sequences, [end] = Sequences(TARGET), Prompter(TARGET, 2048).tokenizer.encode(END, add_special_tokens=False)
    sampling = SamplingParams(structured_outputs=StructuredOutputs(choice=("yes", "no")))
    new_sequence = sequences.maker(3, sampling)
    one, other = new_sequence(), new_sequence()
    assert one.grammar is not None and other.grammar is not None
    first = next(iter(one.grammar.allowed()))
    one.accept_token(0, first)
    assert one.grammar.allowed() == other.grammar.allowed([first])
    resumed = sequences.maker(3, sampling, output_token_ids=(first,))()
    assert resumed.grammar is not None and resumed.grammar.allowed() == one.grammar.allowed()
    while one.finished is None:
        one.accept_token(0, next(iter(one.grammar.allowed())))
    assert (one.finished, one.main.token_ids[-1]) == ("stop", end)
    assert sampling.structured_outputs is not None
    sequences.check(sampling.structured_outputs, tuple(one.main.token_ids))
    assert sequences.maker(3, SamplingParams())().grammar is None


def test_structures_that_cannot_be_are_refused(tmp_path: Path) -> None:
    sequences, structure = Sequences(TARGET), StructuredOutputs(choice=("yes", "no"))
    sequences.check(structure)
    with pytest.raises(UserError, match=r"structured_outputs.regex: invalid regex"):
        sequences.check(StructuredOutputs(regex="("))
    with pytest.raises(UserError, match="in several threads"):
        sequences.maker(3, SamplingParams(structured_outputs=structure), load_dialect("apar").to_json())
    with pytest.raises(UserError, match="the answer to resume is impossible: it does not follow its structured_outputs"):
        sequences.check(structure, (40, 40))
    config = json.loads((TARGET / "config.json").read_text()) | {"eos_token_id": None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="names none"):
        Sequences(tmp_path).check(structure)
