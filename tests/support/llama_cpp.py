"""llama.cpp itself, from the library in the wheel ``xllamacpp``; a test that asks for it is skipped without."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest


class _Params(ctypes.Structure):
    """More than the size of the parameters of models and contexts: structures that large are passed in memory."""

    _fields_ = (("values", ctypes.c_uint64 * 40),)


class _Batch(ctypes.Structure):
    _fields_ = (
        ("count", ctypes.c_int32),
        *((name, ctypes.c_void_p) for name in ("token", "embd", "pos", "n_seq_id", "seq_id", "logits")),
    )


class LlamaCpp:
    """The model of a GGUF file."""

    def __init__(self, file: Path) -> None:
        self._library = _library()
        params = self._library.llama_model_default_params()
        self._model = self._library.llama_model_load_from_file(str(file).encode(), params)
        assert self._model, f"llama.cpp does not load {file}"
        self._vocabulary = self._library.llama_model_get_vocab(self._model)

    def encode(self, text: str, ends: bool = True) -> list[int]:
        """Token ids of a text, in which special tokens are read as such; ``ends``: with those before and behind every text."""
        raw = text.encode()
        room = (ctypes.c_int32 * (len(raw) + 8))()
        count = self._library.llama_tokenize(self._vocabulary, raw, len(raw), room, len(room), ends, True)
        assert count >= 0
        return list(room[:count])

    def logits(self, tokens: Sequence[int], vocab_size: int) -> list[float]:
        """Those after the last token; keys and values are in float16."""
        context = self._library.llama_init_from_model(self._model, self._library.llama_context_default_params())
        values = (ctypes.c_int32 * len(tokens))(*tokens)
        batch = self._library.llama_batch_get_one(ctypes.cast(values, ctypes.c_void_p), len(tokens))
        assert self._library.llama_decode(context, batch) == 0
        found = self._library.llama_get_logits_ith(context, -1)[:vocab_size]
        self._library.llama_free(context)
        return list(found)


_LOG = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
_quiet = _LOG(lambda level, text, data: None)


def _library() -> ctypes.CDLL:
    found = find_spec("xllamacpp")
    if found is None or not found.submodule_search_locations:
        pytest.skip("llama.cpp is not installed (pip install xllamacpp)")
    library = ctypes.CDLL(str(next(Path(found.submodule_search_locations[0]).glob("*.so"))))
    library.llama_model_default_params.restype = _Params
    library.llama_model_load_from_file.restype = library.llama_model_get_vocab.restype = ctypes.c_void_p
    library.llama_model_load_from_file.argtypes = (ctypes.c_char_p, _Params)
    library.llama_model_get_vocab.argtypes = (ctypes.c_void_p,)
    text, room = (ctypes.c_char_p, ctypes.c_int32), (ctypes.POINTER(ctypes.c_int32), ctypes.c_int32)
    library.llama_tokenize.argtypes = (ctypes.c_void_p, *text, *room, ctypes.c_bool, ctypes.c_bool)
    library.llama_context_default_params.restype, library.llama_batch_get_one.restype = _Params, _Batch
    library.llama_init_from_model.argtypes, library.llama_init_from_model.restype = (ctypes.c_void_p, _Params), ctypes.c_void_p
    library.llama_batch_get_one.argtypes = (ctypes.c_void_p, ctypes.c_int32)
    library.llama_decode.argtypes, library.llama_free.argtypes = (ctypes.c_void_p, _Batch), (ctypes.c_void_p,)
    library.llama_get_logits_ith.argtypes = (ctypes.c_void_p, ctypes.c_int32)
    library.llama_get_logits_ith.restype = ctypes.POINTER(ctypes.c_float)
    library.llama_log_set.argtypes = (_LOG, ctypes.c_void_p)
    library.llama_log_set(_quiet, None)
    library.llama_backend_init()
    return library
