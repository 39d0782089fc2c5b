"""Pipelines with little KV memory."""

from __future__ import annotations

from dataclasses import replace

from pipedec.engine.spec import PipelineSpec


def with_slots(spec: PipelineSpec, slots: int) -> PipelineSpec:
    """With KV pools of at most so many slots."""
    return replace(spec, kv_cache_memory=slots * max(rank.token_bytes for rank in spec.kv_budget().ranks))
