"""llama.cpp beside pipedec, on the same GGUF file: skipped without its package; what is refused is told without it, too."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.gguf_files import byte_level_tokenizer, save_gguf
from support.tiny_pair import Pair

from benchmarks import llama_cpp
from benchmarks.alternatives import LlamaCppContender, load_contenders
from benchmarks.llama_cpp import LlamaCpp
from pipedec.config import Settings
from pipedec.core.errors import UserError
from pipedec.engine.build import resolve


@pytest.fixture
def file(pair: Pair, tmp_path: Path, own_cache: Path) -> Path:
    if not llama_cpp.is_installed():
        pytest.skip("llama.cpp is not installed (pip install xllamacpp)")
    return save_gguf(tmp_path / "model.gguf", pair.target, "F32", byte_level_tokenizer(pair.target))


def test_its_answers_are_counted(file: Path) -> None:
    contenders = load_contenders(resolve(Settings.of(target=file, draft="none", stages=1, device="cpu")))
    (found,) = (one for one in contenders if isinstance(one, LlamaCppContender))
    answer = found.answer([1, 20, 30], 6)
    assert 0 < len(answer) <= 6 and found.answer([1, 20, 30], 6) == answer
    assert found.count.passes == 2 * len(answer)


def test_what_it_cannot_do_is_told(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xllamacpp", None)
    with pytest.raises(UserError, match="pip install xllamacpp"):
        LlamaCpp(Path("model.gguf"), 64)
    monkeypatch.setitem(sys.modules, "xllamacpp", SimpleNamespace(__spec__=object()))  # type: ignore[arg-type]
    with pytest.raises(UserError, match="is none"):
        LlamaCpp(pair.target, 64)
