"""Synthetic rows of a sweep, in the schema of ``pipedec bench sweep``."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pandas as pd

from pipedec.bench.report.frames import read_answers

Line = dict[str, Any]


def line(
    method: str = "pipedec",
    prompt_set: str = "humaneval",
    prompt_index: int = 0,
    *,
    groups: int = 14,
    stages: int | None = None,
    preset: str | None = "paper-14",
    width: int = 32,
    children: int = 16,
    tokens: int = 10,
    ms: float = 50.0,
    misses: int = 2,
    **changes: Any,
) -> Line:
    """One line: ``tokens`` decoded tokens of ``ms`` ms each, of which ``misses`` missed; ``changes`` replace whole fields."""
    hits = tokens - misses
    fields = {
        "schema": "pipedec.sweep/1",
        "key": "k",
        "date": "2025-11-21T10:00:00+00:00",
        "version": "0.1.0",
        "revision": "abc",
        "machine": {"cpu": "a CPU", "cores": 2, "gpu": None},
        "preset": preset,
        "clock": "measured",
        "emulated": preset is not None,
        "slow_motion": 4.0,
        "cluster": {
            "stages": stages or groups, "groups": groups, "model": "llama-3.1-70b", "draft": "llama-3.2-1b", "dtype": "float32",
            "devices": ["rtx3090"] * (stages or groups), "draft_device": "l40", "fits": True,
        },
        "pair": {"target": "pair/target", "draft": "pair/draft"},
        "method": method,
        "tree": None if method == "pp" else {"width": width, "children": children, "depth": None, "rows": None},
        "bita": None,
        "prompt_set": prompt_set,
        "prompt_index": prompt_index,
        "repeat": 0,
        "sampling": {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "max_tokens": 64, "ignore_eos": True, "seed": None},
        "answer": "9f",
        "prompt_tokens": 12,
        "output_tokens": tokens + 1,
        "finish_reason": "length",
        "timesteps": hits + misses * groups,
        "hits": hits,
        "misses": misses,
        "decode_ms": tokens * ms,
        "prefill_ms": 31.0,
        "ms_per_token": ms if tokens else None,
        "computed_ms_per_token": ms / 1.25,
        "overran": 0.01,
        "breakdown": None,
    }  # fmt: skip
    assert changes.keys() <= fields.keys(), changes
    return fields | changes


def bita(
    prompt_set: str = "humaneval",
    prompt_index: int = 0,
    *,
    name: str = "deep-16",
    prompting: str = "deep",
    prompt_tokens: int = 16,
    masks: int = 4,
    shape: str = "efficient",
    depth: int = 4,
    named: int = 5,
    rows: int | None = None,
    make: Callable[..., Line] = line,
    **changes: Any,
) -> Line:
    """A line of ``bita`` with the BiTA called ``name`` and this tree; the rest as in ``make``."""
    trained = {"name": name, "digest": name, "prompting": prompting, "masks": masks, "prompt_tokens": prompt_tokens}
    tree = {"shape": shape, "depth": depth, "children": named, "rows": rows}
    return make("bita", prompt_set, prompt_index, bita=trained, tree=tree, **changes)


def stochastic(
    *arguments: Any, repeat: int = 0, temperature: float = 0.6, top_k: int = 80, top_p: float = 0.9, seed: int = 0, **changes: Any
) -> Line:
    """A line of an answer whose tokens were sampled, with ``seed`` + ``repeat``; the rest as ``line``."""
    sampling = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed + repeat}
    return line(*arguments, repeat=repeat, sampling=line()["sampling"] | sampling, **changes)


def write(path: Path, lines: Iterable[Line]) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in lines), encoding="utf-8")
    return path


def answers(tmp_path: Path, lines: Iterable[Line]) -> pd.DataFrame:
    """The lines as figures and tables receive them, through a file."""
    return read_answers([write(tmp_path / "rows.jsonl", lines)])
