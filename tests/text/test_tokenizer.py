"""The tokenizer without transformers says what transformers' AutoTokenizer says; templates run in a sandbox with limits."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.checkpoints import save_tiny_llama
from support.tool_templates import HERMES_TEMPLATE, LLAMA3_TEMPLATE, MISTRAL_TEMPLATE
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from pipedec.config.settings import Models
from pipedec.core.errors import UserError
from pipedec.directories import reference_pair, reference_threads
from pipedec.engine.build import checked_models
from pipedec.text.chat_template import MAX_CHARS, ChatTemplate
from pipedec.text.prompt import load_tokenizer
from pipedec.text.tokenizer import Tokenizer

THREADS = reference_threads()
WORDS = [
    "Hello there, it's a test .", "Größe: naïve café", "東京 \U0001f680", "don't  stop\n\n\tnow", "<|end|>", "<s> a</s>b", " x",
]  # fmt: skip
TEXTS = st.one_of(st.text(max_size=40), st.lists(st.sampled_from(WORDS), max_size=4).map("".join))
TEMPLATE = """{%- if tools is none and documents is not defined %}?{% endif -%}
{{ bos_token }}{% for message in messages %}
    {%- if message['role'] == 'system' and not loop.first %}{{ raise_exception('system must be first') }}{% endif %}
    {%- if message.role == 'skip' %}{% continue %}{% endif %}
{% generation %}<|{{ message['role'] }}|>{% endgeneration %}
{{ message.content | trim }}{{ message | tojson }} {{ message.reasoning_content }}
{% set ns = namespace(last=loop.last) %}{{ ns.last ~ '/' ~ dict(a=1) }}{{ eos_token }}
{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}{{ extra | default('none') }}
"""


def save_spaced(directory: Path, **config: Any) -> None:
    """A BPE tokenizer like Llama 2's: words begin with ▁, and bytes stand for letters that it does not know."""
    backend = Backend(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(content=" ", left=1)]
    backend.decoder = decoders.Sequence(steps)
    specials = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=specials, show_progress=False)
    backend.train_from_iterator(["Hello there, it's a test for don't stop now ."] * 3, trainer)
    state = json.loads(backend.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if not token["content"].startswith("<0x")]
    backend = Backend.from_str(json.dumps(state))
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    made = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    made.chat_template = TEMPLATE
    made.save_pretrained(directory)
    change_config(directory, config)


def change_config(directory: Path, config: dict[str, Any]) -> None:
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))


def save_metaspace(directory: Path, **config: Any) -> None:
    """A Unigram tokenizer with a Metaspace pre-tokenizer, as sentencepiece's are converted."""
    backend = Backend(models.Unigram())
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=80, special_tokens=["<unk>", "<s>", "</s>"], unk_token="<unk>", show_progress=False
    )
    backend.train_from_iterator([*WORDS[:4], "a b c d"] * 4, trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>", chat_template=TEMPLATE
    ).save_pretrained(directory)
    change_config(directory, config)


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory, tokenizer_files: Path) -> dict[str, Path]:
    made = {name: tmp_path_factory.mktemp(name) for name in ("spaced", "metaspace", "cleaned", "older", "listed")}
    save_spaced(made["spaced"])
    save_metaspace(made["metaspace"])
    save_metaspace(made["cleaned"], clean_up_tokenization_spaces=True)
    save_spaced(made["older"], add_eos_token=True)  # tokenizer.json has the last word
    (made["older"] / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "<eos>"}, "pad_token": "<unk>"}))
    bos = {"__type": "AddedToken", "content": "<bos>", "special": True, "lstrip": False, "rstrip": False, "normalized": False}
    save_spaced(made["listed"], bos_token=bos, additional_special_tokens=["<|end|>"])
    return {"tiny": tokenizer_files, "shipped": reference_pair() / "target", "threads": THREADS / "target", **made}


KINDS = ["tiny", "shipped", "threads", "spaced", "metaspace", "cleaned", "older", "listed"]


@pytest.fixture(scope="module", params=KINDS)
def both(request: pytest.FixtureRequest, directories: dict[str, Path]) -> tuple[Tokenizer, Any]:
    """Ours, and that of transformers."""
    directory = directories[request.param]
    return Tokenizer(directory), AutoTokenizer.from_pretrained(directory)


@given(text=TEXTS, special=st.booleans())
def test_texts_have_the_token_ids_of_transformers(both: tuple[Tokenizer, Any], text: str, special: bool) -> None:
    ours, theirs = both
    assert ours.encode(text, add_special_tokens=special) == theirs.encode(text, add_special_tokens=special)


@given(data=st.data(), skip=st.booleans())
def test_token_ids_have_the_text_of_transformers(both: tuple[Tokenizer, Any], data: st.DataObject, skip: bool) -> None:
    ours, theirs = both
    token_ids = data.draw(st.lists(st.integers(0, len(ours) - 1), max_size=30))
    assert ours.decode(token_ids, skip_special_tokens=skip) == theirs.decode(token_ids, skip_special_tokens=skip)


MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "skip"]), "content": TEXTS},
        optional={"reasoning": TEXTS, "name": st.none() | TEXTS, "thinking": st.none()},
    ),
    min_size=1,
    max_size=4,
)


@given(messages=MESSAGES, prompted=st.booleans(), extra=st.none() | TEXTS)
def test_conversations_have_the_token_ids_of_transformers(
    both: tuple[Tokenizer, Any], messages: list[dict[str, Any]], prompted: bool, extra: str | None
) -> None:
    ours, theirs = both
    options = {} if extra is None else {"extra": extra}
    expected = theirs.apply_chat_template(messages, add_generation_prompt=prompted, return_dict=False, **options)
    assert ours.apply_chat_template(messages, prompted, **options) == expected


@given(messages=MESSAGES)
def test_the_last_message_is_continued_as_by_transformers(both: tuple[Tokenizer, Any], messages: list[dict[str, Any]]) -> None:
    ours, theirs = both
    try:
        options: Any = {"tokenize": False, "add_generation_prompt": False, "continue_final_message": True}
        expected = theirs.apply_chat_template(messages, **options)
    except ValueError:
        with pytest.raises(UserError, match="continue_final_message"):
            ours.render_chat(messages, False, continue_final_message=True)
    else:
        assert ours.render_chat(messages, False, continue_final_message=True) == expected
        token_ids = theirs.apply_chat_template(
            messages, return_dict=False, add_generation_prompt=False, continue_final_message=True
        )
        assert ours.apply_chat_template(messages, False, continue_final_message=True) == token_ids


_EACH = "{% for m in messages %}<{{ m.role }}>{{ CONTENT }}</s>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
_PARTS = [{"type": "text", "text": "a "}, {"type": "text", "text": " b "}]


@pytest.mark.parametrize(
    ("written", "content", "expected"),
    [
        ("m.content", " The moon ", "<user>Hi</s><assistant> The moon "),
        ("m.content | trim", " The moon ", "<user>Hi</s><assistant>The moon"),
        ("m.content ~ '!' ~ messages[0].content", "Hi", "<user>Hi!Hi</s><assistant>Hi"),
        ("m.content", "", "<user>Hi</s><assistant>"),
        ("m.content", "CONTINUE_FINAL_MESSAGE_TAG ", "<user>Hi</s><assistant>CONTINUE_FINAL_MESSAGE_TAG "),
        ("m.content", _PARTS, "<user>Hi</s><assistant>a \n b "),
        ("m.content[0].text ~ m.content[-1].text", _PARTS, "<user>HiHi</s><assistant>a  b "),
    ],
)
def test_a_continued_message_ends_the_prompt(
    directories: dict[str, Path], tmp_path: Path, written: str, content: Any, expected: str
) -> None:
    """As far as the template writes it, without what would come after it. Content is in the form that the template reads."""
    shutil.copy(directories["tiny"] / "tokenizer.json", tmp_path)
    (tmp_path / "chat_template.jinja").write_text(_EACH.replace("CONTENT", written))
    tokenizer = Tokenizer(tmp_path)
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": content}]
    assert tokenizer.render_chat(messages, add_generation_prompt=False, continue_final_message=True) == expected
    assert messages[1]["content"] == content, "the messages are the caller's"


@pytest.mark.parametrize(
    ("written", "last", "prompted", "message"),
    [
        ("m.content", {"content": "a"}, True, "not possible with add_generation_prompt"),
        ("m.content", {"tool_calls": []}, False, "the last message has no text to continue"),
        ("m.content", {"content": []}, False, "the last message has no text to continue"),
        ("m.content", {"content": [{"type": "image"}]}, False, "the last message has no text to continue"),
        ("m.content[:2]", {"content": "a long one"}, False, "does not write the last message as it is"),
        ("m.content | upper", {"content": "abc"}, False, "does not write the last message as it is"),
        ("m.content.split('b')[1]", {"content": "abc"}, False, "does not write the last message as it is"),
    ],
)
def test_a_message_that_cannot_be_continued_is_refused(
    directories: dict[str, Path], tmp_path: Path, written: str, last: dict[str, Any], prompted: bool, message: str
) -> None:
    shutil.copy(directories["tiny"] / "tokenizer.json", tmp_path)
    written = f"({written}) if m.role == 'assistant' else m.content"
    (tmp_path / "chat_template.jinja").write_text(_EACH.replace("CONTENT", written))
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", **last}]
    with pytest.raises(UserError, match=message):
        Tokenizer(tmp_path).render_chat(messages, prompted, continue_final_message=True)


def test_both_know_the_same_tokens(both: tuple[Tokenizer, Any]) -> None:
    ours, theirs = both
    assert (len(ours), ours.vocabulary) == (len(theirs), theirs.get_vocab())
    assert ours.token_id(ours.special_tokens.get("bos_token", "")) == theirs.bos_token_id
    assert ours.eos_token_id == theirs.eos_token_id
    assert ours.all_special_ids >= set(theirs.all_special_ids)


@given(text=st.text(max_size=30))
def test_the_bytes_of_tokens_make_the_text(both: tuple[Tokenizer, Any], text: str) -> None:
    ours, _ = both
    token_ids = ours.encode(text, add_special_tokens=False)
    if ours.special_tokens.get("unk_token") in map(ours.token, token_ids):
        return  # what is unknown is lost
    spelled, decoded = b"".join(map(ours.token_bytes, token_ids)).decode(), ours.decode(token_ids, skip_special_tokens=False)
    assert spelled.replace(" ", "") == decoded.replace(" ", ""), "decoders leave out some spaces"


def test_a_part_of_a_character_is_named_by_its_bytes(directories: dict[str, Path]) -> None:
    for name in ("tiny", "spaced"):
        tokenizer = Tokenizer(directories[name])
        tokens = [tokenizer.token(token) for token in tokenizer.encode("\U0001f680", add_special_tokens=False)]
        assert tokens[-4:] == ["bytes:\\xf0", "bytes:\\x9f", "bytes:\\x9a", "bytes:\\x80"]
        assert tokenizer.token(len(tokenizer) + 5) == ""


def test_texts_are_refused_that_cannot_be_or_are_too_long(directories: dict[str, Path]) -> None:
    tokenizer = Tokenizer(directories["tiny"])
    with pytest.raises(UserError, match="character 1 is half a surrogate pair"):
        tokenizer.encode("a\ud83d")
    assert tokenizer.encode("a\0b"), "a NUL is a character"
    limit = 10 * tokenizer.max_chars_per_token
    tokenizer.check_length("x" * limit, 10)
    with pytest.raises(UserError, match=f"has {limit + 1} characters, but the 10 tokens that fit are at most {limit}"):
        tokenizer.check_length("x" * (limit + 1), 10)


def test_the_template_named_default_is_taken_from_a_list(directories: dict[str, Path], tmp_path: Path) -> None:
    shutil.copy(directories["tiny"] / "tokenizer.json", tmp_path)
    assert not Tokenizer(tmp_path).has_chat_template
    with pytest.raises(UserError, match="has no chat template"):
        Tokenizer(tmp_path).apply_chat_template([{"role": "user", "content": "Hi"}])
    said = "{{ messages[0].content }}"
    listed = [{"name": "tool_use", "template": f"tools {said}"}, {"name": "default", "template": said}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": listed}))
    assert Tokenizer(tmp_path).render_chat([{"role": "user", "content": "Hi"}]) == "Hi"
    assert Tokenizer(tmp_path).render_chat([{"role": "user", "content": "Hi"}], tools=[]) == "tools Hi"


def test_the_template_of_a_multimodal_checkpoint_is_found(directories: dict[str, Path], tmp_path: Path) -> None:
    """In the file that transformers' processors read."""
    shutil.copy(directories["tiny"] / "tokenizer.json", tmp_path)
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "{{ messages[0].content }}!"}))
    assert Tokenizer(tmp_path).render_chat([{"role": "user", "content": "Hi"}]) == "Hi!"


TOOLS = [
    {"type": "function", "function": {"name": "add", "description": "ü", "parameters": {"type": "object", "properties": {}}}}
]
CALLED = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": [1, "ß"]}}}]},
    {"role": "tool", "name": "add", "content": "2"},
]


@pytest.mark.parametrize(("template", "is_file"), [(HERMES_TEMPLATE, True), (LLAMA3_TEMPLATE, False), (MISTRAL_TEMPLATE, False)])
def test_tools_are_shown_as_transformers_shows_them(
    directories: dict[str, Path], tmp_path: Path, template: str, is_file: bool
) -> None:
    """By the template for tools where there is one of its own."""
    shutil.copytree(directories["tiny"], tmp_path / "own")
    if is_file:
        (tmp_path / "own" / "additional_chat_templates").mkdir()
        (tmp_path / "own" / "additional_chat_templates" / "tool_use.jinja").write_text(template)
    else:
        (tmp_path / "own" / "chat_template.jinja").write_text(template)
    ours, theirs = Tokenizer(tmp_path / "own"), AutoTokenizer.from_pretrained(tmp_path / "own")
    expected = theirs.apply_chat_template(CALLED, tools=TOOLS, add_generation_prompt=True, return_dict=False)
    assert ours.apply_chat_template(CALLED, tools=TOOLS) == expected
    assert ours.tool_template == template


_WALKED = "{% for c in m.content %}{% if c.type == 'text' %}{{ c.text }};{% endif %}{% endfor %}"
_SET = "{%- set content = m['content'] %}{% for c in content %}{{ c['text'] }};{% endfor %}"


@pytest.mark.parametrize(
    ("walk", "texts"),
    [
        (_WALKED, ["Hi;", "a;b;", "", ""]),
        (_SET, ["Hi;", "a;b;", "", ""]),
        ("{% macro say(m) %}" + _WALKED + "{% endmacro %}{{ say(m) }}", ["Hi;", "a;b;", "", ""]),
        ("{{ m.content }}", ["Hi", "a\nb", "", ""]),
        ("{% if m.content is string %}{{ m.content }}{% else %}" + _WALKED + "{% endif %}", ["Hi", "a\nb", "", ""]),
    ],
)
@pytest.mark.failure_case("H37")
def test_content_reaches_a_template_in_the_form_that_it_reads(
    directories: dict[str, Path], tmp_path: Path, walk: str, texts: list[str]
) -> None:
    """Text is a part for one that walks over parts; parts are lines for others."""
    shutil.copy(directories["tiny"] / "tokenizer.json", tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}{% for m in messages %}" + walk + "{% endfor %}")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>"}))
    tokenizer, parts = Tokenizer(tmp_path), [{"type": "text", "text": text, "cache_control": {}} for text in "ab"]
    for content, text in zip(("Hi", parts, [], None), texts, strict=True):
        assert tokenizer.render_chat([{"role": "user", "content": content}]) == f"<s>{text}"


@pytest.mark.failure_case("H37")
def test_a_template_that_leaves_out_what_the_user_says_is_refused(directories: dict[str, Path], tmp_path: Path) -> None:
    shutil.copy(directories["tiny"] / "tokenizer.json", tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}<|{{ m.role }}|>{{ m.text }}{% endfor %}")
    with pytest.raises(UserError, match="leaves out what the user says"):
        Tokenizer(tmp_path).render_chat([{"role": "user", "content": "Hi"}])


def test_damaged_files_are_refused_in_one_line(directories: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no tokenizer in"):
        Tokenizer(tmp_path)
    shutil.copy(directories["tiny"] / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(UserError, match=r"cannot be read: tokenizer_config.json") as refused:
        Tokenizer(tmp_path)
    assert "\n" not in str(refused.value)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{% for %}"}))
    with pytest.raises(UserError, match="no valid Jinja"):
        Tokenizer(tmp_path).render_chat([{"role": "user", "content": "Hi"}])


def rendered(source: str, seconds: float = 5.0, **message: Any) -> str:
    return ChatTemplate(source, seconds).render([{"role": "user", **message}])


def test_an_endless_template_ends() -> None:
    with pytest.raises(UserError, match="takes too long"):
        rendered("{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}", seconds=0.1)


BIG = "makes a value of more than"


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("{{ 'a' * 100000000000 }}", BIG),
        ("{{ 100000000000 * ['a'] }}", BIG),
        ("{{ 9 ** (9 ** 9) }}", "power"),
        ("{% set ns = namespace(x='aaaaaaaa') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}", BIG),
        ("{% set ns = namespace(x='aaaaaaaa') %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}", BIG),
        (f"{{% for i in range(100) %}}{{{{ 'a' * {MAX_CHARS // 50} }}}}{{% endfor %}}", "writes more than"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ dict.mro() }}", "unsafe"),
        ("{{ namespace().__class__.__mro__ }}", "unsafe"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 1 }}", "cannot render these messages"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion"),
    ],
)
def test_a_template_that_goes_too_far_is_refused_in_one_line(source: str, why: str) -> None:
    with pytest.raises(UserError, match=why) as refused:
        rendered(source, content="Hi")
    assert "\n" not in str(refused.value)
    assert len(rendered("{{ strftime_now('%Y-%m-%d') }}")) == 10, "the time is at a template's disposal"


def test_a_tokenizer_in_another_format_is_converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What transformers makes of ``tokenizer.model`` is what counts."""
    save_spaced(tmp_path / "written")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "written")
    (tmp_path / "tokenizer.model").write_bytes(b"a sentencepiece model")
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda directory: theirs)
    monkeypatch.setattr("pipedec.text.tokenizer._CONVERTERS", ())
    ours = load_tokenizer(tmp_path)
    assert ours.encode("Hello there") == theirs.encode("Hello there")
    assert ours.directory == tmp_path


@pytest.mark.failure_case("M19")
def test_a_tokenizer_that_cannot_be_converted_is_named_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny_llama(tmp_path / "target")
    (tmp_path / "target" / "tokenizer.model").write_bytes(b"a sentencepiece model")
    monkeypatch.setattr("pipedec.text.tokenizer._CONVERTERS", ("no_such_package.at_all",))
    for reads in (load_tokenizer, lambda target: checked_models(Models(str(target), "none"))):
        with pytest.raises(UserError, match=r"tokenizer\.model and no tokenizer\.json: pip install 'pipedec\[sentencepiece\]'"):
            reads(tmp_path / "target")


def test_no_torch_and_no_transformers_are_loaded(directories: dict[str, Path]) -> None:
    program = (
        "import sys; from pathlib import Path; from pipedec.text.prompt import Prompter\n"
        f"Prompter(Path({str(directories['tiny'])!r}), 100).token_ids('Hi', False, 1)\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_an_encoder_without_some_added_tokens_reads_them_as_text_and_keeps_the_others(
    tmp_path: Path, tokenizer_files: Path
) -> None:
    backend = Backend.from_file(str(tokenizer_files / "tokenizer.json"))
    backend.add_tokens([AddedToken("<a>", special=False), AddedToken("[TOOL]", special=False)])
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    hidden = [*tokenizer.all_special_ids, tokenizer.token_id("<a>")]
    encode = tokenizer.encoder_without(hidden)
    for text in ("Größe naïve", "[TOOL]é", "a [TOOL] b"):
        assert encode(text) == tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(encode("<a></s>[TOOL]"), skip_special_tokens=False) == "<a></s>[TOOL]"
    assert set(hidden).isdisjoint(encode("<a></s>[TOOL]"))
