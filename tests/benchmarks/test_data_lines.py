"""The lines of docs/papers/data.md make files of prompts that pipedec reads, from records with the fields of the data sets.

``curl`` and ``datasets.load_dataset`` hand out these records instead of what they would download.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.papers.prompts import SOURCES
from pipedec.data import read_prompts
from recipes.thread_models.records import read_questions

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "papers" / "data.md").read_text(encoding="utf-8")
LINES = [line for block in re.findall(r"^```sh\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE) for line in block.splitlines()]
FILES = sorted(set(re.findall(r"\| ([\w-]+/[\w.-]+\.(?:jsonl|gz))\b", PAGE)))

LIST = "Do this:\n\n1. First: begin with the first part.\n2. Then: go on with the second.\n3. Last: end with the third.\n\nDone."
ALPACA = [
    {"instruction": "Sort it.", "input": "3 1 2", "output": "1 2 3"},
    {"instruction": "Say hello.", "input": "", "output": "Hello."},
]
CIP = [{"prompt": "How are you?", "response": "Fine."}, {"prompt": " ", "response": "?"}]


def turns(*texts: str, first: str = "human") -> list[dict[str, str]]:
    return [{"from": role, "value": text} for role, text in zip((first, *("gpt", "human") * len(texts)), texts, strict=False)]


# The records of each data set, by what the line passes to ``load_dataset``.
RECORDS: dict[str, list[dict[str, object]]] = {
    "ucinlp/drop split=validation": [{"passage": "Ten yards.", "question": "How many?", "answers_spans": {"spans": ["10"]}}],
    "cais/mmlu all split=test": [{"question": "Which?", "subject": "law", "choices": ["a", "b", "c", "d"], "answer": 1}],
    "wmt/wmt14 de-en split=test": [{"translation": {"de": "Guten Tag", "en": "Good day"}}],
    "mandarjoshi/trivia_qa rc.wikipedia.nocontext split=validation": [{"question": "Who?", "answer": {"value": "He"}}],
    "EdinburghNLP/xsum split=test revision=refs/convert/parquet": [{"document": "It rains.", "summary": "Rain", "id": "1"}],
    "alespalla/chatbot_instruction_prompts split=test": CIP,
    "alespalla/chatbot_instruction_prompts split=train": CIP,
    "json data_files=https://huggingface.co/datasets/tatsu-lab/alpaca_eval/resolve/main/alpaca_eval.json split=train": [
        {"dataset": "koala", "instruction": "What?", "output": "That.", "generator": "text_davinci_003"}
    ],
    "json data_files=hf://datasets/GAIR/lima/train.jsonl split=train": [{"conversations": ["Why?", "So."], "source": "wiki"}],
    "vicgalle/alpaca-gpt4 split=train": ALPACA,
    "sahil2801/CodeAlpaca-20k split=train": ALPACA,
    "garage-bAInd/Open-Platypus split=train": ALPACA,
    "anon8231489123/ShareGPT_Vicuna_unfiltered data_files=ShareGPT_V3_unfiltered_cleaned_split.json split=train": [
        {"id": "a", "conversations": said}
        for said in (
            turns("How?", LIST, "And?", "No."), turns("Who?", "He."), turns("Go on.", "Yes?", first="gpt"),
            turns("Alone?"), turns("", "x"),
        )
    ],
    "Open-Orca/SlimOrca split=train": [
        {"conversations": [{"from": "system", "value": "Be kind."}, *turns("Where?", "There.")]},
        {"conversations": turns("Unanswered?")},
    ],
}  # fmt: skip
# The record of each file that is downloaded as it is, by the end of its address.
DOWNLOADED = {
    "HumanEval.jsonl.gz": {"task_id": "HumanEval/0", "prompt": "def f():", "canonical_solution": " pass"},
    "grade_school_math/data/test.jsonl": {"question": "How much?", "answer": "#### 1"},
    "grade_school_math/data/train.jsonl": {"question": "How much?", "answer": "#### 1"},
    "mt_bench/question.jsonl": {"question_id": 81, "category": "writing", "turns": ["Write.", "Again."]},
    "vicuna_bench/question.jsonl": {"question_id": 1, "category": "generic", "turns": ["Write."]},
    "spec_bench/question.jsonl": {"question_id": 1, "category": "qa", "turns": ["Write."]},
    **{f"humaneval_{one}.jsonl.gz": {"task_id": "a", "prompt": one} for one in ("python", "cpp", "go", "java", "js")},
}
CURL = """#!{python}
import json, pathlib, sys
output, address = sys.argv[sys.argv.index("-o") + 1], sys.argv[-1]
[record] = [record for end, record in json.load(open({downloaded!r})).items() if address.endswith("/" + end)]
path = pathlib.Path(output)
path.parent.mkdir(parents=True, exist_ok=True)
path.write_text(json.dumps(record) + "\\n")
"""
DATASETS = """import json
class Rows(list):
    def shuffle(self, seed): return self
    def select(self, numbers): return Rows(self[: len(numbers)])
def load_dataset(*names, **options):
    asked = " ".join([*names, *(f"{{key}}={{value}}" for key, value in options.items())])
    return Rows(json.load(open({records!r}))[asked])
"""
PROMPTS = {
    "alpacaeval/eval.jsonl": ("What?",),
    "bita/lima.jsonl": ("Why?",),
    **dict.fromkeys(("cip/test.jsonl", "cip/train.jsonl"), ("How are you?",)),
    **{f"bita/{one}.jsonl": ("Sort it.\n\n3 1 2", "Say hello.") for one in ("alpaca-gpt4", "CodeAlpaca-20k", "Open-Platypus")},
    "drop/validation.jsonl": ("Ten yards.\n\nHow many?",),
    **dict.fromkeys(("gsm8k/test.jsonl", "gsm8k/train.jsonl"), ("How much?",)),
    "humaneval/HumanEval.jsonl.gz": ("def f():",),
    "humaneval-x/python.jsonl": ("python",),
    "mmlu/test.jsonl": ("Which?\nA. a\nB. b\nC. c\nD. d",),
    **dict.fromkeys(("mt_bench/question.jsonl", "spec_bench/question.jsonl", "vicuna_bench/question.jsonl"), ("Write.",)),
    "sharegpt/test.jsonl": ("How?",),
    "sharegpt/train.jsonl": ("Who?",),
    "slimorca/train.jsonl": ("Where?",),
    "triviaqa/validation.jsonl": ("Who?",),
    "wmt14/test.jsonl": ("Translate German to English: Guten Tag",),
    "xsum/test.jsonl": ("Summarize: It rains.",),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory in which all lines have run, one after the other."""
    place, tools = tmp_path_factory.mktemp("data"), tmp_path_factory.mktemp("tools")
    for name, records in (("records", RECORDS), ("downloaded", DOWNLOADED)):
        (tools / name).write_text(json.dumps(records))
    (tools / "datasets.py").write_text(DATASETS.format(records=str(tools / "records")))
    (tools / "curl").write_text(CURL.format(python=sys.executable, downloaded=str(tools / "downloaded")))
    (tools / "curl").chmod(0o755)
    (tools / "python").symlink_to(sys.executable)
    environment = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "PYTHONPATH": f"{tools}:{ROOT}"}
    ended = subprocess.run(
        ["bash", "-e", "-c", "\n".join(LINES)], cwd=place, env=environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return place


def test_every_file_has_a_line_and_every_source_of_experiments_a_file() -> None:
    assert sorted(PROMPTS) == FILES
    assert {source.partition("#")[0] for sources in SOURCES.values() for source in sources} <= set(FILES)


@pytest.mark.parametrize("file", PROMPTS)
def test_a_line_makes_a_file_of_prompts(file: str, data: Path) -> None:
    assert read_prompts(data / file).prompts == PROMPTS[file]


@pytest.mark.parametrize(("file", "answer"), [("sharegpt/train.jsonl", "He."), ("slimorca/train.jsonl", "There.")])
def test_answers_to_annotate_stand_beside_their_questions(file: str, answer: str, data: Path) -> None:
    assert [one.answer for one in read_questions((data / file,))] == [answer]
