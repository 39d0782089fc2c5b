"""What tests of several packages share: a tiny pair of real checkpoints, a resident cluster, and the proof that nothing is left."""

from __future__ import annotations

import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch
from checkpoints import save_tiny_llama
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from pipedec.engine.cluster import LocalCluster
from pipedec.engine.spec import PipelineSpec
from pipedec.engine.verify import Reference

# Every process that the tests start, however indirectly, has this in its environment.
MARK = f"PIPEDEC_TESTS={uuid.uuid4().hex}"
os.environ.update([MARK.split("=")])
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

TARGET_LAYERS, DRAFT_LAYERS = 8, 2
CONTEXT = 2048
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SENTENCES = [
    "The pipeline is kept full: at every timestep each stage works on a different part of the tree.",
    "Natalia sold 12 clips in April, and then half as many in May. How many clips did she sell?",
    "Größe, naïve café, Ελλάδα, 東京 and \U0001f680 need more than one byte for a character.",
]


@dataclass(frozen=True)
class Pair:
    """A target of 8 layers and a draft of 2 with its tokenizer; ``foreign_draft`` has another one."""

    target: Path
    draft: Path
    foreign_draft: Path

    def spec(self, stages: int = 2, groups: int | None = None, draft: str | None = None) -> PipelineSpec:
        return PipelineSpec.create(self.target, draft or self.draft, stages, groups, device="cpu")

    @property
    def flags(self) -> list[str]:
        return ["--target", str(self.target), "--draft", str(self.draft), "--device", "cpu"]


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("pair")
    made = Pair(folder / "target", folder / "draft", folder / "foreign")
    tokenizer = _train_tokenizer(SENTENCES, vocab_size=300)
    target = save_tiny_llama(made.target, layers=TARGET_LAYERS, vocab=len(tokenizer), max_position_embeddings=CONTEXT)
    # The draft is the target without its last layers, so that it is sometimes right.
    target.model.layers = torch.nn.ModuleList(target.model.layers[:DRAFT_LAYERS])
    target.config.num_hidden_layers = DRAFT_LAYERS
    target.save_pretrained(made.draft)
    save_tiny_llama(made.foreign_draft, layers=DRAFT_LAYERS, vocab=300, max_position_embeddings=CONTEXT)
    for directory in (made.target, made.draft):
        tokenizer.save_pretrained(directory)
    _train_tokenizer(["Entirely other words make entirely other merges, whatever the vocabulary."], 300).save_pretrained(
        made.foreign_draft
    )
    return made


def _train_tokenizer(texts: list[str], vocab_size: int) -> PreTrainedTokenizerBase:
    """A byte-level BPE tokenizer with the usual control tokens (``<s>`` 1, ``</s>`` 2) and a chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = ["<pad>", "<s>", "</s>", "<|user|>", "<|assistant|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>", chat_template=CHAT_TEMPLATE
    )


@pytest.fixture(scope="session")
def tokenizer(pair: Pair) -> PreTrainedTokenizerBase:
    return PreTrainedTokenizerFast.from_pretrained(pair.target)


@pytest.fixture(scope="session")
def reference(pair: Pair) -> Reference:
    """The target alone, in transformers."""
    return Reference(pair.spec())


@pytest.fixture(scope="session")
def resident(pair: Pair) -> Iterator[LocalCluster]:
    """A running cluster of 2 stages that no test may break."""
    with LocalCluster(pair.spec(2)) as cluster:
        yield cluster


@pytest.fixture
def state_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A state directory of this test's own, and no Redis named in the environment."""
    directory = tmp_path / "state"
    directory.mkdir(mode=0o700)
    monkeypatch.setenv("PIPEDEC_STATE_DIR", str(directory))
    for name in ("PIPEDEC_REDIS_URL", "PIPEDEC_REDIS_PASSWORD"):
        monkeypatch.delenv(name, raising=False)
    return directory


@pytest.fixture
def leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fails the test if a process it started, or a temporary file of ours, is still there seconds after its end."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    before = marked_processes()
    yield
    assert wait_until(lambda: not marked_processes() - before), [
        (pid, Path(f"/proc/{pid}/cmdline").read_bytes()[-200:]) for pid in marked_processes() - before
    ]
    assert list(scratch.glob("pipedec-*")) == []


def marked_processes() -> set[int]:
    """Processes of this test session that are alive, but for this one and the helpers that multiprocessing keeps."""
    helpers = {
        os.getpid(),
        multiprocessing.forkserver._forkserver._forkserver_pid,
        multiprocessing.resource_tracker._resource_tracker._pid,
    }
    return {process.pid for process in psutil.process_iter() if process.pid not in helpers and _is_marked(process.pid)}


def _is_marked(pid: int) -> bool:
    try:
        return MARK.encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")  # empty for a zombie
    except OSError:
        return False


def wait_until(condition: Callable[[], object], seconds: float = 15.0) -> bool:
    """Whether ``condition`` comes true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
